"""Captions are the same whatever computes their words: torch or onnxruntime."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import haav
from haav.data.collate import collate
from haav.errors import ConfigError
from haav.generate.backends import SEARCHES, Backend, OnnxModel
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.model.aggregators import aggregators
from haav.model.aggregators.pool import MeanAggregator
from haav.model.build import build_model
from haav.model.decoders import decoders
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.photos.images import load_image
from haav.types import Aggregated, Caption, Memory, PhotoView, Views
from helpers import SAMPLES, VIEWS, WORDS, combinations, random_photo_views, tiny_config

pytest.importorskip("onnxruntime", reason="needs the onnx extra")
pytest.importorskip("onnx", reason="needs the onnx extra")

WAYS: dict[str, dict[str, Any]] = {
    "beam 3": {"beam": 3},
    "greedy": {"beam": 1},
    "beam 5, all captions": {"beam": 5, "n_best": 5, "keep_greedy": False},
    "groups": {"beam": 4, "groups": 2, "n_best": 4},
    "samples": {"method": "sample", "samples": 4, "n_best": 4, "seed": 7},
    "nucleus": {"method": "sample", "samples": 3, "n_best": 3, "seed": 8, "top_p": 0.8, "temperature": 0.7},
    "required": {"beam": 3, "must": ("{0}|{1}", "{2}")},
    "forbidden": {"beam": 3, "never": ("{0}", "{1}")},
    "prefix": {"beam": 3, "prefix": "{0} {1}"},
    "penalty": {"beam": 3, "length_penalty": 0.7, "min_words": 4, "n_best": 2},
}
"""settings of captions; {n} stands for a word of the vocabulary"""


def options(way: str, words: tuple[str, ...]) -> CaptionOptions:
    def fill(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return value.format(*words) if isinstance(value, str) else value

    return CaptionOptions(**{name: fill(value) for name, value in WAYS[way].items()})


def assert_same(ours: Caption, theirs: Caption) -> None:
    assert [word.token for word in theirs.words] == [word.token for word in ours.words]
    assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-4)
    for word, other in zip(ours.words, theirs.words, strict=True):
        assert other.logprob == pytest.approx(word.logprob, abs=1e-4)
        assert (other.views is None) == (word.views is None)
        assert dict(other.views or {}) == pytest.approx(dict(word.views or {}), abs=1e-5)
    assert len(theirs.n_best) == len(ours.n_best)
    for one, other_caption in zip(ours.n_best, theirs.n_best, strict=True):
        assert_same(one, other_caption)


def any_views(photos: int, seed: int) -> Views:
    """Of any length, some of them absent"""
    return collate([""] * photos, random_photo_views(VIEWS, photos, seed)).views


def pair(**model: Any) -> tuple[Captioner, Captioner]:
    """The same small model with each backend"""
    torch.manual_seed(3)
    config = tiny_config(vocabulary_size=len(WORDS), **model)
    network = build_model(config.model).eval().requires_grad_(False)
    return tuple(Captioner(network, config, WORDS, backend=Backend(name, network)) for name in ("torch", "onnxruntime"))  # type: ignore[return-value]


def one_model_variants() -> list[Any]:
    """Every variant that a graph can be made of. Each aggregator once; other pairs in the long run only"""
    variants = [
        model
        for model in combinations()
        if decoders.get(model["decoder"]).exportable and isinstance(build_model(tiny_config(**model).model), Haav)
    ]
    return [
        pytest.param(
            model,
            id="-".join(model.values()),
            marks=() if model["encoding"] == "shared" and model["encoder_outputs"] == "last" else pytest.mark.slow,
        )
        for model in variants
    ]


@pytest.mark.parametrize("model", one_model_variants())
def test_every_model_that_can_be_a_graph_gives_the_same_captions(model: dict[str, str]) -> None:
    ours, theirs = pair(**model)
    # Batches of several sizes, views missing here and there, and photos that leave the batch when they are settled
    for photos in (1, 2, 7):
        views = any_views(photos, photos)
        both = (captioner.caption_views(views, beam=3, n_best=2) for captioner in (ours, theirs))
        for one, other in zip(*both, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_gives_the_same_captions(way: str) -> None:
    ours, theirs = pair(aggregator="hierarchical")
    views = any_views(5, 1)
    settings = options(way, WORDS.words[4:])
    for one, other in zip(ours.caption_views(views, settings), theirs.caption_views(views, settings), strict=True):
        assert_same(one, other)


def test_steps_that_the_graph_does_not_know_are_left_to_torch() -> None:
    _, captioner = pair()
    model = captioner.backend.next_search()
    assert isinstance(model, OnnxModel)
    encoded = model.encode(any_views(2, 0))
    whole = torch.randint(4, len(WORDS), (2, 3, 5))
    with torch.no_grad():
        forced = model.decode(whole, model.init_cache(encoded), 1)
        cache, logits, weights = model.init_cache(encoded), [], []
        for place in range(5):
            # A step by torch continues what a step by onnxruntime began, and the other way round.
            decoded = model.decode(whole[:, :, [place]], cache, None if place % 2 else 1)
            cache = decoded.cache
            logits.append(decoded.logits)
            assert decoded.weights is not None
            weights.append(decoded.weights[:, :, :, -1:])
        torch.testing.assert_close(torch.cat(logits, dim=2), forced.logits, atol=1e-5, rtol=1e-4)
        assert forced.weights is not None
        torch.testing.assert_close(torch.cat(weights, dim=2), forced.weights[:, :, :, -1:], atol=1e-5, rtol=0)
        full = replace(cache, length=captioner.config.model.max_words)
        with pytest.raises(ValueError, match="positions"):
            model.decode(whole[:, :, :1], full, 0)


def test_threads_share_a_backend() -> None:
    _, captioner = pair()
    views = [any_views(2, seed) for seed in range(8)]
    alone = [[str(caption) for caption in captioner.caption_views(part)] for part in views]
    together: dict[int, list[str]] = {}

    def work(index: int) -> None:
        together[index] = [str(caption) for caption in captioner.caption_views(views[index])]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(8)] == alone


def test_auto_makes_no_graph_for_a_few_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build_model(tiny_config().model).eval()
    made: list[OnnxModel] = []
    monkeypatch.setattr("haav.generate.backends.OnnxModel", lambda model: made.append(OnnxModel(model)) or made[-1])
    backend = Backend("auto", network)
    assert [backend.next_search() for _ in range(SEARCHES)] == [network] * SEARCHES
    assert not made
    assert [backend.next_search() for _ in range(3)] == made * 3
    assert len(made) == 1
    prepared = Backend("auto", network)
    prepared.prepare()
    assert isinstance(prepared.next_search(), OnnxModel)
    plain = Backend("torch", network)
    plain.prepare()
    assert [plain.next_search() for _ in range(SEARCHES + 1)] == [network] * (SEARCHES + 1)


def test_a_backend_that_cannot_be_is_refused_and_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build_model(tiny_config().model).eval()
    with pytest.raises(ConfigError, match="unknown backend 'onyx'.*\n.*auto, onnxruntime, torch"):
        Backend("onyx", network)
    with pytest.raises(ConfigError, match="unknown backend 'onyx'"):
        haav.load(backend="onyx")
    cases: list[tuple[Haav | Ensemble, str]] = [(Ensemble([network, network]), "this is an ensemble")]
    for decoder in decoders:
        if not decoders.get(decoder).exportable:
            recurrent = build_model(tiny_config(decoder=decoder).model)
            cases.append((recurrent, "cannot be written as a graph"))
    cases.append((build_model(tiny_config().model).to("meta"), "on the CPU in float32, and the model is on meta"))
    cases.append((build_model(tiny_config().model).bfloat16(), "the model is on cpu in bfloat16"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    cases.append((network, r"it needs onnxruntime.\n  pip install 'haav\[onnx\]'"))
    for model, reason in cases:
        with pytest.raises(ConfigError, match=f"backend onnxruntime: .*{reason}"):
            Backend("onnxruntime", model)
        backend = Backend("auto", model, wait=0)
        backend.prepare()
        assert backend.next_search() is model


class Branching(MeanAggregator):
    """It does something else where there are few words, which a graph does not"""

    def forward(self, query: torch.Tensor, memory: Memory, weighed: bool = True) -> Aggregated:
        return super().forward(query * (2 if query.shape[1] < 3 else 1), memory, weighed)


@pytest.mark.parametrize("fault", ["a graph that is wrong", "a package that is broken"])
def test_a_graph_that_fails_is_refused_and_auto_does_without(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setitem(aggregators._entries, "mean_of_a_few", Branching)
    network = build_model(tiny_config(aggregator="mean_of_a_few").model).eval()
    reason = "its scores differ from those of PyTorch"
    if fault == "a package that is broken":
        reason = "cannot open libonnx.so"
        monkeypatch.setattr("haav.generate.backends._session", broken_package)
    with pytest.raises(ConfigError, match=f"backend onnxruntime: {reason}"):
        Backend("onnxruntime", network).prepare()
    backend = Backend("auto", network, wait=1)
    assert [backend.next_search() for _ in range(3)] == [network] * 3


def broken_package(graph: bytes) -> None:
    raise ImportError("cannot open libonnx.so")


@pytest.fixture(scope="module")
def shipped() -> tuple[Captioner, Captioner, dict[str, list[PhotoView]]]:
    ours = haav.load(backend="torch")
    theirs = ours.with_config(ours.config)
    theirs.backend = Backend("onnxruntime", ours.model)
    photos = [load_image(path) for path in sorted(SAMPLES.glob("*.jpg"))]
    return ours, theirs, ours.extract(photos)


def sample_views(extracted: dict[str, list[PhotoView]], rows: slice) -> Views:
    parts = {name: views[rows] for name, views in extracted.items()}
    return collate([""] * len(next(iter(parts.values()))), parts).views


@pytest.mark.parametrize("way", WAYS)
def test_the_shipped_model_writes_the_same_captions_of_the_samples(
    shipped: tuple[Captioner, Captioner, dict[str, list[PhotoView]]], way: str
) -> None:
    ours, theirs, extracted = shipped
    settings = options(way, ("dog", "cat", "a", "the"))
    for rows in (slice(0, 1), slice(1, 10)):
        views = sample_views(extracted, rows)
        if way == "forbidden":
            settings = replace(settings, views=("patches",))
        for one, other in zip(ours.caption_views(views, settings), theirs.caption_views(views, settings), strict=True):
            assert_same(one, other)
