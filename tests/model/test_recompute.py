"""Layers that keep only their input for the gradient: the same gradients from less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from haav.model.build import build_contrast, build_model
from haav.model.recompute import recompute
from haav.text import PAD
from haav.train.objectives import CrossEntropy, Learner, StepInput
from haav.types import Batch
from helpers import every_variant, random_captions, random_views, tiny_config


def learn(variant: dict[str, Any], again: bool, bfloat16: bool = False) -> tuple[dict[str, Tensor], int]:
    """One step with all dropouts: gradients by name, and the bytes that were kept for them"""
    torch.manual_seed(0)
    config = tiny_config(**variant)
    model = build_model(config.model)
    contrast = build_contrast(model.members[0].encoding, config.model, config.contrast)
    learner = Learner(model, contrast, CrossEntropy(), 0.1).train()
    if again:
        recompute(model)
    captions = random_captions(8, 2, 9)
    captions[:3, :, 5:] = PAD
    batch = Batch(tuple(f"p{number}" for number in range(8)), random_views(8), captions)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
    ):
        loss = learner(StepInput([batch]))[0]["loss"]
    for part in learner.parameters():
        kept.pop(part.untyped_storage().data_ptr(), None)
    loss.backward()
    return {name: part.grad for name, part in learner.named_parameters() if part.grad is not None}, sum(kept.values())


@every_variant
def test_gradients_are_the_same_bits(variant: dict[str, Any]) -> None:
    plain, _ = learn(variant, again=False)
    recomputed, _ = learn(variant, again=True)
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_less_is_kept(bfloat16: bool) -> None:
    variant = {"encoder_layers": 3, "decoder_layers": 3, "decoder": "transformer", "aggregator": "hierarchical"}
    plain, much = learn(variant, again=False, bfloat16=bfloat16)
    recomputed, little = learn(variant, again=True, bfloat16=bfloat16)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert little < 0.5 * much
