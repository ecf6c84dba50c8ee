"""What test files share: paths, small models, random views, photos."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from haav.config import Config, ContrastConfig, DecodeConfig, ModelConfig, override
from haav.inference.captioner import Captioner
from haav.model.aggregators import aggregators
from haav.model.build import NO_AGGREGATOR, build_model, resolve
from haav.model.decoders import decoders
from haav.model.encodings import encodings
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.pretrained import load_weights, save_pretrained
from haav.text import SPECIAL, Vocabulary
from haav.types import PhotoView, View, ViewSpec
from haav.views import ExtractorOptions, build_extractor
from haav.views.retrieval.bridge import FIRST_FEATURES, Bridge, BridgeConfig, CrossFitted
from haav.views.retrieval.textdb import Entry, Manifest, TextDatabase

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "src" / "haav" / "samples"
SHARED = ROOT.parent / "shared" / "data"
"""data sets that are no part of the repository; tests that need them are skipped where it is missing"""

VIEWS = {
    "objects": ViewSpec(dim=10, max_tokens=5, boxes=True),
    "grid": ViewSpec(dim=6, max_tokens=4),
    "text": ViewSpec(dim=8, max_tokens=6, indices={"crop": 2, "rank": 3}),
}

WORDS = Vocabulary((*SPECIAL, *(f"w{n}" for n in range(4, 23))))

SILENT = {"dropout": 0.0, "channel_dropout": 0.0, "token_dropout": 0.0, "view_dropout": 0.0}


def tiny_config(**model: Any) -> Config:
    """A model of width 16 over three views; keyword arguments are model settings."""
    settings = ModelConfig(
        views=VIEWS,
        vocabulary_size=23,
        d_model=16,
        d_ff=24,
        heads=4,
        encoder_layers=2,
        decoder_layers=2,
        memory_slots=3,
        max_words=12,
    )
    config = Config(replace(settings, **model), ContrastConfig(queue_size=20, hidden=12), DecodeConfig(max_words=8))
    config, problems = resolve(config)
    assert not problems, problems
    return config


def tiny_model(**model: Any) -> Haav | Ensemble:
    return build_model(tiny_config(**model).model).eval()


def random_view(spec: ViewSpec, batch: int, lengths: list[int] | None = None) -> View:
    """`lengths`: real tokens of each photo; what lies behind them is noise, not zeros."""
    size = spec.max_tokens
    lengths = lengths if lengths is not None else [size] * batch
    return View(
        tokens=torch.randn(batch, size, spec.dim),
        mask=torch.arange(size) < torch.tensor(lengths)[:, None],
        indices={name: torch.randint(0, count, (batch, size)) for name, count in spec.indices.items()},
        boxes=torch.rand(batch, size, 4) if spec.boxes else None,
    )


def random_views(batch: int = 3, specs: dict[str, ViewSpec] = VIEWS) -> dict[str, View]:
    return {name: random_view(spec, batch) for name, spec in specs.items()}


def random_photo_views(specs: dict[str, ViewSpec], photos: int, seed: int) -> dict[str, list[PhotoView]]:
    """Of any length, some of them absent"""
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int) -> int:
        return int(torch.randint(0, high, (), generator=generator))

    def view(spec: ViewSpec) -> PhotoView:
        size = whole(spec.max_tokens + 1)
        return PhotoView(
            torch.randn(size, spec.dim, generator=generator),
            {name: torch.randint(0, count, (size,), generator=generator) for name, count in spec.indices.items()},
            torch.rand(size, 4, generator=generator) if spec.boxes else None,
        )

    return {name: [view(spec) for _ in range(photos)] for name, spec in specs.items()}


def random_captions(batch: int = 3, captions: int = 2, words: int = 5, vocabulary: int = 23) -> torch.Tensor:
    return torch.randint(4, vocabulary, (batch, captions, words))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, pad: int) -> torch.Tensor:
    """The slow obvious one: logits (B, C, T, words), targets (B, C, T); the mean over real words"""
    real = (targets != pad).nonzero().tolist()
    return -torch.stack([logits[b, c, t].log_softmax(-1)[targets[b, c, t]] for b, c, t in real]).mean()


def combinations() -> list[dict[str, str]]:
    """The settings of every model that makes sense: encoding, decoder, aggregator, encoder_outputs."""
    return [
        {"encoding": encoding, "decoder": decoder, "aggregator": aggregator, "encoder_outputs": outputs}
        for encoding in encodings
        for decoder in decoders
        for aggregator in (aggregators if decoders.get(decoder).uses_aggregator else [NO_AGGREGATOR])
        for outputs in ("last", "all")
        if encodings.get(encoding).keeps_views or not _needs_views(aggregator)
    ]


def _needs_views(aggregator: str) -> bool:
    return aggregator in aggregators and aggregators.get(aggregator).needs_views


every_decoder = pytest.mark.parametrize("decoder", list(decoders))
every_variant = pytest.mark.parametrize("variant", combinations(), ids=lambda variant: "-".join(variant.values()))


def save_model(
    folder: Path, views: Sequence[str] = ("cells", "objects"), options: ExtractorOptions | None = None
) -> Path:
    """A small model of chance weights that reads these views; `options`: of their extractors"""
    torch.manual_seed(0)
    specs = {name: build_extractor(name, options).spec for name in views}
    config = tiny_config()
    config, problems = resolve(replace(config, model=replace(config.model, views=specs, vocabulary_size=len(WORDS))))
    assert not problems
    Captioner(build_model(config.model), config, WORDS).save_pretrained(folder)
    return folder


def save_text_model(
    folder: Path, views: Sequence[str] = ("cells", "objects", "text_whole"), bridge_from: str = FIRST_FEATURES
) -> Path:
    """A model that reads sentences too; the bridge, from features of a view, and the text database lie beside it"""
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(50, 384), dim=1)
    text = TextDatabase([Entry(f"sentence {n}", (f"p{n}",)) for n in range(50)], vectors, Manifest("toy"))
    text.save(folder / "textdb")
    config = BridgeConfig(features=build_extractor(bridge_from).spec.dim, vectors=384, folds=2)
    bridges = [Bridge(config) for _ in range(3)]
    CrossFitted(config, bridges, {"p1": 0, "p2": 1}, "toy", bridge_from).save(folder / "bridge")
    return save_model(folder / "model", views, ExtractorOptions(bridge=folder / "bridge", textdb=folder / "textdb"))


def tiny_captioner(folder: Path, decode: dict[str, Any], **model: Any) -> Captioner:
    torch.manual_seed(3)
    config = override(tiny_config(vocabulary_size=len(WORDS), **model), "decode", decode)
    save_pretrained(folder, build_model(config.model), config, WORDS)
    return Captioner.from_pretrained(folder)


def make_photos(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 255, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 48)).save(folder / f"{index:03d}.jpg")
    return folder


def checkpoint_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(folder / "checkpoint.safetensors")[0]


def assert_identical(first: Path, second: Path) -> None:
    one, other = checkpoint_weights(first), checkpoint_weights(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def write_tar(path: Path, count: int, first: int = 0) -> Path:
    """A WebDataset shard: photos that all differ, each with a text beside it, and one file that is no photo"""
    with Image.open(SAMPLES / "cat.jpg") as image:
        photo = image.convert("RGB").resize((96, 72))
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + count):
            turned = photo.rotate(3 * number)
            buffer = io.BytesIO()
            turned.save(buffer, "JPEG")
            for name, data in ((f"{number:05d}.jpg", buffer.getvalue()), (f"{number:05d}.txt", b"a text")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path
