"""Seconds of a training step of each row of a table, measured in turns, with random photos: the table `speed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from haav.config import Config
from haav.data.loader import to_device
from haav.files import json_of
from haav.model.build import build_model
from haav.studies.ablate import config_of
from haav.studies.bench import machine
from haav.studies.grid import Grid
from haav.text import BOS, EOS, PAD, SPECIAL
from haav.train.loop import keep_memory
from haav.train.objectives import CrossEntropy, Learner, StepInput
from haav.train.setup import build_learner
from haav.types import Batch, View, ViewSpec

ROUNDS = 12
LEAST_WORDS, MORE_WORDS = 8, 3.0
"""words of a random caption: so many, and a Poisson number with this mean"""
Seconds = Mapping[str, Mapping[str, float]]
"""row → round → seconds of a step"""


@dataclass(frozen=True)
class Speed:
    machine: str
    seconds: Seconds

    def percent(self, row: str, reference: str) -> dict[str, float]:
        """Round → time of a step in per cent of that of the reference row in the same round"""
        whole = self.seconds[reference]
        return {number: 100 * value / whole[number] for number, value in self.seconds[row].items()}


def measure_speed(grid: Grid, report: Callable[[str], None], rounds: int = ROUNDS) -> dict[str, Any]:
    """What the study's file holds. A process of its own trains, so that its memory is given back."""
    report(f"{grid.title}: begins; nothing else should run beside it")
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        name, seconds = executor.submit(step_seconds, grid, rounds).result()
    return {"machine": name, "seconds": seconds}


def read_speed(file: Path, grid: Grid) -> Speed | None:
    """None if it was not measured yet, or with other rows"""
    if not file.exists():
        return None
    speed = Speed(**json_of(file.read_text(encoding="utf-8")))
    return speed if speed.seconds.keys() == {row.name for row in grid.rows} else None


def step_seconds(grid: Grid, rounds: int) -> tuple[str, Seconds]:
    """The machine, and the seconds. The rows take turns, so that whatever else the machine does slows all of them.
    The first round is not counted."""
    keep_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = {
        row.name: train_steps(config_of(grid.recipe, {**grid.settings, **row.settings}), device)
        for row in grid.in_order
    }
    seconds: dict[str, dict[str, float]] = {row.name: {} for row in grid.rows}
    for number in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            next(step)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                seconds[name][str(number)] = time.perf_counter() - started
    return (torch.cuda.get_device_name() if device.type == "cuda" else machine()), seconds


def train_steps(config: Config, device: torch.device) -> Iterator[Learner]:
    """Steps of cross-entropy with a batch of the configured size, again and again with the same random photos"""
    torch.manual_seed(config.train.seed)
    learner = build_learner(config, build_model(config.model), CrossEntropy(config.train.label_smoothing))
    learner.to(device).train()
    contrast = learner.contrast
    if contrast is not None:  # full, as it is after some dozens of steps
        contrast.enqueue(F.normalize(torch.randn_like(contrast.queue), dim=1))
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.train.lr, fused=True)
    batch = to_device(random_batch(config), device)
    while True:
        optimizer.zero_grad(set_to_none=True)
        losses, keys = learner(StepInput([batch]))
        losses["loss"].backward()
        if config.train.clip:
            nn.utils.clip_grad_norm_(trained, config.train.clip)
        optimizer.step()
        learner.after_step(keys)
        yield learner


def random_batch(config: Config) -> Batch:
    """Photos whose views are as long as they can be, and captions about as long as those of COCO"""
    photos, captions = config.train.batch, config.train.captions
    lengths = LEAST_WORDS + torch.poisson(torch.full((photos, captions, 1), MORE_WORDS)).long()
    lengths = lengths.clamp(max=config.model.max_words - 1)
    places = torch.arange(int(lengths.max()) + 2)
    words = torch.randint(len(SPECIAL), config.model.vocabulary_size, (photos, captions, len(places)))
    words[:, :, 0] = BOS
    words = words.where(places <= lengths, EOS).where(places <= lengths + 1, PAD)
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
