"""Seconds of a training step of each row of a table, measured in turns, with random photos: the table `speed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import torch

from haav.config import Config
from haav.model.build import build_model
from haav.studies.ablate import config_of
from haav.studies.grid import Grid
from haav.text import BOS, SPECIAL
from haav.train.loop import keep_memory
from haav.train.objectives import CrossEntropy, StepInput
from haav.train.setup import build_learner
from haav.types import Batch, View, ViewSpec

ROUNDS = 10
WORDS = 12
"""of a caption, with its end"""
Seconds = dict[str, dict[str, float]]
"""row → round → seconds of a step"""


def step_seconds(grid: Grid, report: Callable[[str], None], rounds: int = ROUNDS) -> Seconds:
    """The rows take turns, so that whatever else the machine does slows all of them. The first round is not counted."""
    keep_memory()
    steps = {row.name: train_steps(config_of(grid.recipe, {**grid.settings, **row.settings})) for row in grid.in_order}
    seconds: Seconds = {row.name: {} for row in grid.rows}
    for number in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            next(step)
            if number:
                seconds[name][str(number)] = time.perf_counter() - started
        report(f"{grid.title}: round {number} of {rounds}")
    return seconds


def train_steps(config: Config) -> Iterator[None]:
    """Steps of cross-entropy with a batch of the configured size, again and again with the same random photos"""
    torch.manual_seed(config.train.seed)
    learner = build_learner(config, build_model(config.model), CrossEntropy(config.train.label_smoothing)).train()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=config.train.lr, fused=True)
    batch = random_batch(config)
    while True:
        optimizer.zero_grad(set_to_none=True)
        losses, keys = learner(StepInput([batch]))
        losses["loss"].backward()
        optimizer.step()
        learner.after_step(keys)
        yield


def random_batch(config: Config) -> Batch:
    """Photos whose views are as long as they can be"""
    photos, captions = config.train.batch, config.train.captions
    words = torch.randint(len(SPECIAL), config.model.vocabulary_size, (photos, captions, WORDS + 1))
    words[:, :, 0] = BOS
    return Batch(tuple(map(str, range(photos))), random_views(config.model.views, photos), words)


def random_views(specs: Mapping[str, ViewSpec], photos: int) -> dict[str, View]:
    return {
        name: View(
            torch.randn(photos, spec.max_tokens, spec.dim),
            torch.ones(photos, spec.max_tokens, dtype=torch.bool),
            {index: torch.randint(0, size, (photos, spec.max_tokens)) for index, size in spec.indices.items()},
            torch.rand(photos, spec.max_tokens, 4) if spec.boxes else None,
        )
        for name, spec in specs.items()
    }


def relative(seconds: Seconds, reference: str) -> Seconds:
    """Each step in per cent of that of the reference row in the same round"""
    whole = seconds[reference]
    return {
        row: {number: 100 * value / whole[number] for number, value in each.items()} for row, each in seconds.items()
    }
