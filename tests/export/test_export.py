"""Exported graphs against the model they were exported from, with torch and where there is none."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import haav
from haav.cli.main import main
from haav.config import DecodeConfig
from haav.data.collate import collate
from haav.errors import CheckpointError, ConfigError, ImageError
from haav.generate.build import build_rules, build_strategy
from haav.generate.loop import generate
from haav.inference.pack import pack
from haav.inference.stream import find_items
from haav.model.decoders import decoders
from haav.model.encodings import encodings
from haav.text import SPECIAL, Vocabulary
from haav.types import Caption, Decoded, PhotoView
from helpers import SAMPLES, SHARED, VIEWS, combinations, random_photo_views, save_text_model, tiny_captioner

pytest.importorskip("onnxruntime", reason="needs the onnx extra")
pytest.importorskip("onnx", reason="needs the onnx extra")
from haav.export.onnx import export_onnx
from haav.export.portable import PortableCaptioner
from haav.export.portable.search import Search

PHOTOS = sorted(SAMPLES.glob("*.jpg"))


def single_models() -> list[Any]:
    """Every variant that is one model. Each aggregator and each encoding once; other pairs in the long run only"""
    found = []
    for model in combinations():
        kind = encodings.get(model["encoding"])
        if len(kind.split(tuple(VIEWS))) == 1 and decoders.get(model["decoder"]).exportable:
            each_once = model["encoding"] == "shared" or model["aggregator"] == kind.default_aggregator
            quick = model["encoder_outputs"] == "last" and each_once
            found.append(pytest.param(model, marks=() if quick else pytest.mark.slow))
    return found


def same(ours: Caption, theirs: Caption) -> None:
    assert theirs.text == ours.text
    assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-4)
    assert theirs.confidence == pytest.approx(ours.confidence, abs=1e-4)
    for word, other in zip(ours.words, theirs.words, strict=True):
        assert other.logprob == pytest.approx(word.logprob, abs=1e-4)
        assert (word.views is None) == (other.views is None)
        if word.views is not None and other.views is not None:
            assert dict(other.views) == pytest.approx(dict(word.views), abs=1e-5)
    assert len(ours.n_best) == len(theirs.n_best)
    for one, other in zip(ours.n_best, theirs.n_best, strict=True):
        same(one, other)


def arrays(seen: dict[str, list[PhotoView]]) -> dict[str, list[dict[str, np.ndarray]]]:
    def one(view: PhotoView) -> dict[str, np.ndarray]:
        parts = {"tokens": view.tokens.numpy(), **{name: index.numpy() for name, index in view.indices.items()}}
        return parts if view.boxes is None else parts | {"boxes": view.boxes.numpy()}

    return {name: [one(view) for view in views] for name, views in seen.items()}


@pytest.mark.parametrize(
    "decode",
    [
        {},
        {"beam": 1},
        {"keep_greedy": False, "no_repeat": 2},
        {"length_penalty": 0.7, "min_words": 5},
        {"allow_cut": True, "allow_unk": True, "no_repeat": 0},
        {"keep_greedy": False, "length_penalty": 1.0, "beam": 4, "no_repeat": 1},
    ],
)
def test_any_settings_give_the_same_captions(tmp_path: Path, decode: dict[str, Any]) -> None:
    captioner = tiny_captioner(tmp_path / "model", decode)
    export_onnx(tmp_path / "model", tmp_path / "out")
    portable = PortableCaptioner(tmp_path / "out")
    for seed in range(6):
        seen = random_photo_views(VIEWS, 1 + seed, seed)
        n_best = min(3, captioner.config.decode.beam)
        ours = captioner.caption_views(collate([""] * (1 + seed), seen).views, n_best=n_best)
        for one, other in zip(ours, portable.caption_extracted(arrays(seen), n_best=n_best), strict=True):
            same(one, other)


@pytest.mark.parametrize(
    "model",
    [
        *single_models(),
        {"aggregator": "joint", "encoder_outputs": "all"},
        {"aggregator": "sigmoid", "cls": "mean", "encoder_outputs": "all"},
        {"memory_slots": 0, "encoder_outputs": "all"},
    ],
    ids=lambda model: "-".join(map(str, model.values())),
)
def test_any_single_model_can_be_exported(tmp_path: Path, model: dict[str, Any]) -> None:
    captioner = tiny_captioner(tmp_path / "model", {}, **model)
    export_onnx(tmp_path / "model", tmp_path / "out")
    portable = PortableCaptioner(tmp_path / "out")
    seen = random_photo_views(VIEWS, 4, 0)
    ours = captioner.caption_views(collate([""] * 4, seen).views)
    for one, other in zip(ours, portable.caption_extracted(arrays(seen)), strict=True):
        same(one, other)
    with pytest.raises(ConfigError, match="views that cannot be exported"):
        portable.caption(PHOTOS[0])


@dataclass(frozen=True)
class Chain:
    """The simplest thing that can be searched: what follows a word depends on it, its place and the photo."""

    tables: torch.Tensor
    """(B, places, words, words)"""
    at: int = 0

    @property
    def present(self) -> torch.Tensor:
        return torch.ones(len(self.tables), 1, dtype=torch.bool)

    def init_cache(self, encoded: Chain) -> Chain:
        return encoded

    def decode(self, tokens: torch.Tensor, cache: Chain, weighed: int | None = None) -> Decoded:
        photos = torch.arange(len(tokens))[:, None, None]
        logits = cache.tables[photos, cache.at, tokens]
        return Decoded(logits, None, Chain(cache.tables, cache.at + 1))  # type: ignore[arg-type]

    def reorder(self, rows: torch.Tensor, photos: torch.Tensor | None = None) -> Chain:
        return self if photos is None else Chain(self.tables[photos], self.at)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([0.5, 2.0, 5.0]),
    st.fixed_dictionaries(
        {
            "length_penalty": st.sampled_from([0.0, 0.5, 1.0]),
            "keep_greedy": st.booleans(),
            "no_repeat": st.integers(0, 3),
            "no_doubles": st.booleans(),
            "allow_cut": st.booleans(),
            "allow_unk": st.booleans(),
            "min_words": st.integers(0, 3),
            "max_words": st.integers(5, 8),
        }
    ),
)
def test_the_search_in_numpy_is_the_search_in_torch(
    seed: int, beam: int, n_best: int, spread: float, given_settings: dict[str, Any]
) -> None:
    n_best = min(beam, n_best)
    vocabulary = Vocabulary((*SPECIAL, "a", "of", "with", "dog", "dogs", "cat"))
    torch.manual_seed(seed)
    chain = Chain(spread * torch.randn(3, 8, len(vocabulary), len(vocabulary)))
    decode = DecodeConfig(beam=beam, **given_settings)
    strategy, rules = build_strategy(decode, vocabulary, n_best=n_best), build_rules(decode, vocabulary)
    ours = generate(chain, chain, strategy, rules, decode.max_words)  # type: ignore[arg-type]
    tables = chain.tables.numpy()

    def step(words: np.ndarray, past: list[np.ndarray], at: int) -> Any:
        return tables[np.arange(3)[:, None], at, words], np.zeros((*words.shape, 0), np.float32), past

    theirs = Search(decode, vocabulary, beam, n_best)(step, [], 3)
    for photo, found in enumerate(theirs):
        for rank, one in enumerate(found):
            score = float(ours.scores[photo, rank])
            assert one.logprob == pytest.approx(score, abs=1e-4)
            if score > -math.inf:
                assert vocabulary.decode(one.words.tolist()) == vocabulary.decode(ours.tokens[photo, rank].tolist())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads cells, objects and sentences, and is packed with what it retrieves them by"""
    folder = tmp_path_factory.mktemp("models")
    pack(save_text_model(folder), folder / "packed", folder / "bridge", folder / "textdb")
    return folder / "packed"


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main(["export", str(model), "--out", str(out)]) == 0
    return out


def test_photos_give_the_same_captions(model: Path, exported: Path) -> None:
    portable = PortableCaptioner(exported)
    ours = haav.load(model).caption(PHOTOS, n_best=2)
    for one, other in zip(ours, portable.caption(PHOTOS, n_best=2), strict=True):
        same(one, other)
    same(ours[0], portable.caption(PHOTOS[0].read_bytes(), n_best=2))
    assert portable.caption([]) == []
    with pytest.raises(ImageError):
        portable.caption(b"no picture")
    with pytest.raises(ConfigError, match="from 1 to the beam"):
        portable.caption(PHOTOS[0], beam=2, n_best=3)
    with pytest.raises(ConfigError, match="beam must be at most 50, not 51"):
        portable.caption(PHOTOS[0], beam=51)


WITHOUT_TORCH = """
import sys
for name in ("torch", "onnx"):
    sys.modules[name] = None  # importing it raises
from haav.export.portable.__main__ import main
raise SystemExit(main(sys.argv[1:]))
"""


def test_it_runs_where_there_is_no_torch(model: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no")
    photos = [str(PHOTOS[0]), str(tmp_path / "broken.jpg"), str(PHOTOS[1])]
    words = [sys.executable, "-c", WITHOUT_TORCH, str(exported), *photos]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    first, broken, second = map(json.loads, done.stdout.splitlines())
    ours = haav.load(model).caption([photos[0], photos[2]])
    assert [first["caption"], second["caption"]] == [caption.text for caption in ours]
    assert set(broken) == {"image", "error"}


def test_a_batch_has_photos(exported: Path) -> None:
    for batch in (0, -1):
        with pytest.raises(ConfigError, match="a batch has at least 1 photo"):
            PortableCaptioner(exported).caption(PHOTOS, batch=batch)


def test_what_cannot_be_exported_or_read_is_said(tmp_path: Path, exported: Path) -> None:
    tiny_captioner(tmp_path / "samples", {"method": "sample"})
    with pytest.raises(ConfigError, match="plain beam search"):
        export_onnx(tmp_path / "samples", tmp_path / "out")
    tiny_captioner(tmp_path / "many", {}, encoding="model_per_view")
    with pytest.raises(ConfigError, match="an ensemble cannot be exported"):
        export_onnx(tmp_path / "many", tmp_path / "out")
    for decoder in decoders:
        if not decoders.get(decoder).exportable:
            tiny_captioner(tmp_path / decoder, {}, decoder=decoder)
            with pytest.raises(ConfigError, match=f"a model with decoder '{decoder}' cannot be exported"):
                export_onnx(tmp_path / decoder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="not what `haav export` writes"):
        PortableCaptioner(tmp_path)
    (tmp_path / "broken").mkdir()
    for file in exported.iterdir():
        if file.is_file():
            (tmp_path / "broken" / file.name).write_bytes(file.read_bytes())
    whole = (exported / "step.onnx").read_bytes()
    (tmp_path / "broken" / "step.onnx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"step.onnx cannot be read"):
        PortableCaptioner(tmp_path / "broken")
    (tmp_path / "broken" / "step.onnx").write_bytes(whole)
    (tmp_path / "broken" / "sentences.text_whole.json").unlink()
    with pytest.raises(CheckpointError, match=r"sentences.text_whole.json"):
        PortableCaptioner(tmp_path / "broken")


@pytest.mark.slow
def test_the_shipped_model_gives_the_same_captions_of_two_hundred_photos(tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the photos of ../shared/data")
    items = find_items([str(SHARED / "flickr8k")], lambda most: b"")[:200]
    photos = [item.read() for item in items]
    export_onnx("best", tmp_path / "out")
    ours, portable = haav.load(precision="float32"), PortableCaptioner(tmp_path / "out")
    differ = [
        (item.name, one.text, other.text)
        for item, one, other in zip(items, ours.caption(photos), portable.caption(photos), strict=True)
        if one.text != other.text
    ]
    assert len(items) == 200
    assert differ == []
