"""Small models and random views that the tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from haav.config import Config, ContrastConfig, DecodeConfig, ModelConfig
from haav.model.aggregators import aggregators
from haav.model.build import build_model, resolve
from haav.model.encodings import encodings
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.types import View, ViewSpec

VIEWS = {
    "objects": ViewSpec(dim=10, max_tokens=5, boxes=True),
    "grid": ViewSpec(dim=6, max_tokens=4),
    "text": ViewSpec(dim=8, max_tokens=6, indices={"crop": 2, "rank": 3}),
}

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


def random_captions(batch: int = 3, captions: int = 2, words: int = 5, vocabulary: int = 23) -> torch.Tensor:
    return torch.randint(4, vocabulary, (batch, captions, words))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, pad: int) -> torch.Tensor:
    """The slow obvious one: logits (B, C, T, words), targets (B, C, T); the mean over real words"""
    real = (targets != pad).nonzero().tolist()
    return -torch.stack([logits[b, c, t].log_softmax(-1)[targets[b, c, t]] for b, c, t in real]).mean()


def combinations() -> list[tuple[str, str, str]]:
    """Every (encoding, aggregator, encoder_outputs) that makes sense."""
    return [
        (encoding, aggregator, outputs)
        for encoding in encodings
        for aggregator in aggregators
        for outputs in ("last", "all")
        if encodings.get(encoding).keeps_views or not aggregators.get(aggregator).needs_views
    ]
