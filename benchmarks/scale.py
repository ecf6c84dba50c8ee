"""From one machine's measured step to sets and clusters that are not here: storage, bytes a second, hours.

python -m benchmarks scale: measures a training step with embedded views on this machine, then does the arithmetic.
Nothing about a cluster is measured; what is assumed stands in the constants below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from haav.config import ModelConfig
from haav.model.build import build_contrast, build_model, load_config, resolve
from haav.studies.bench import seconds
from haav.train.loop import keep_memory
from haav.train.objectives import CrossEntropy, Learner, StepInput
from haav.types import Batch, View, ViewSpec

SETS = {"COCO, Karpathy train": 113_287, "CC12M": 12_000_000, "LAION-400M": 400_000_000}
EPOCHS = {"COCO, Karpathy train": 10, "CC12M": 3, "LAION-400M": 1}
BYTES_A_PHOTO = 140_000
"""cells, objects, two text views, as `haav store info` gives them"""
EXTRACTED_A_SECOND = 17.0
"""photos, on this machine: docs/how-to/scale.md"""
BATCH = 50
NETWORK = 10e9 / 8
"""assumed: bytes a second between machines"""
MACHINES = (1, 16, 256)
"""assumed: machines like this one, each with a batch of its own"""

VIEWS = {
    "cells": (ViewSpec(2048, 25, indices={"row": 5, "column": 5}), 25),
    "objects": (ViewSpec(849, 50, boxes=True), 15),
    "text_whole": (ViewSpec(384, 16, indices={"crop": 1, "rank": 16}), 16),
    "text_five": (ViewSpec(384, 20, indices={"crop": 5, "rank": 4}), 20),
}
"""with how many tokens a batch is padded to"""


def step_seconds() -> tuple[float, int]:
    """Of a step of BATCH photos with two captions each and the contrastive loss; parameters that are trained"""
    keep_memory()
    torch.manual_seed(0)
    config = load_config("best")
    model_config: ModelConfig = replace(
        config.model, views={name: spec for name, (spec, _) in VIEWS.items()}, vocabulary_size=6000
    )
    config, _ = resolve(replace(config, model=model_config))
    model = build_model(config.model)
    contrast = build_contrast(model.encoding, config.model, config.contrast)
    learner = Learner(model, contrast, CrossEntropy(0.1), 0.05).train()
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    views = {
        name: View(
            torch.randn(BATCH, tokens, spec.dim),
            torch.ones(BATCH, tokens, dtype=torch.bool),
            {index: torch.randint(0, size, (BATCH, tokens)) for index, size in spec.indices.items()},
            torch.rand(BATCH, tokens, 4) if spec.boxes else None,
        )
        for name, (spec, tokens) in VIEWS.items()
    }
    batch = Batch(("",) * BATCH, views, torch.randint(4, 6000, (BATCH, 2, 13)))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses, keys = learner(StepInput([batch]))
        losses["loss"].backward()
        optimizer.step()
        contrast.enqueue(keys[0])
        contrast.follow(model.encoding)

    return seconds(step, times=5), sum(parameter.numel() for parameter in trained)


def scale() -> dict[str, Any]:
    """What larger sets would take"""
    took, parameters = step_seconds()
    found: dict[str, Any] = {
        "what": f"a step of {BATCH} photos × 2 captions, embedded views, {parameters / 1e6:.1f} M parameters",
        "measured here, s a step": took,
        "photos a second, training": BATCH / took,
    }
    for name, photos in SETS.items():
        found[f"{name}: photos"] = f"{photos:,}"
        found[f"{name}: storage, GB"] = photos * BYTES_A_PHOTO / 1e9
        for machines in MACHINES:
            # A ring all-reduce moves the gradient twice, whatever the number of machines.
            exchange = 2 * (machines - 1) / machines * 4 * parameters / NETWORK
            whole = took + exchange
            steps = photos / (BATCH * machines)
            found[f"{name}: {machines} machines"] = (
                f"extraction {photos / EXTRACTED_A_SECOND / machines / 3600:,.1f} h; {EPOCHS[name]} epochs of "
                f"{steps:,.0f} steps of {whole:.2f} s: {EPOCHS[name] * steps * whole / 3600:,.1f} h; "
                f"reading {machines * BATCH / whole * BYTES_A_PHOTO / 1e6:,.0f} MB/s in all; "
                f"{100 * took / whole:.0f} % of the time spent on work"
            )
    return found
