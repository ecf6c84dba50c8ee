"""A decoding step stays a small number of operations. They are counted, as clocks are not to be trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from haav.config import DecodeConfig, ModelConfig
from haav.generate.build import build_rules, build_strategy
from haav.generate.loop import generate
from haav.model.build import build_model
from haav.text import SPECIAL, Vocabulary
from haav.types import ViewSpec
from helpers import random_views

SHIPPED = ModelConfig(
    views={
        "patches": ViewSpec(dim=24, max_tokens=50, boxes=True),
        "text_whole": ViewSpec(dim=12, max_tokens=16, indices={"crop": 1, "rank": 16}),
    },
    vocabulary_size=60,
    aggregator="joint",
    encoder_outputs="last",
    d_model=32,
    d_ff=64,
    heads=8,
    encoder_layers=2,
    decoder_layers=3,
    memory_slots=40,
    max_words=54,
)
"""the architecture of `best`; the number of operations does not depend on widths"""
MOST = {0: 135, 1: 169}
"""operations of a step, without and with the view weights of the last layer: those of 18 November 2026 and 5 % more"""


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations(beam: int, batch: int, weighed: int) -> list[int]:
    """Operations of each step but the first: of the model, the search, its rules and the order of the cache"""
    torch.manual_seed(0)
    model = build_model(SHIPPED).eval().requires_grad_(False)
    vocabulary = Vocabulary((*SPECIAL, *(f"w{index}" for index in range(56))))
    decode = DecodeConfig(beam=beam, no_repeat=3, no_doubles=True, min_words=9, max_words=12)
    strategy, rules = build_strategy(decode, vocabulary), build_rules(decode, vocabulary)
    marks: list[int] = []
    counter, whole = Count(), model.decode

    def watched(*arguments: Any) -> Any:
        marks.append(counter.operations)
        return whole(*arguments)

    model.decode = watched  # type: ignore[method-assign]
    with torch.no_grad():
        encoded = model.encode(random_views(batch, SHIPPED.views))
        generate(model, encoded, strategy, rules, decode.max_words, weighed)  # packs the weights
        marks.clear()
        with counter:
            generate(model, encoded, strategy, rules, decode.max_words, weighed)
    return np.diff(marks)[1:9].tolist()


@pytest.mark.parametrize("weighed", MOST)
@pytest.mark.parametrize(("beam", "batch"), [(3, 1), (5, 1), (5, 16)])
def test_a_step_of_the_shipped_architecture_is_few_operations(beam: int, batch: int, weighed: int) -> None:
    assert max(operations(beam, batch, weighed)) <= MOST[weighed]


def test_operations_do_not_grow_with_words_beams_or_photos() -> None:
    few, many = operations(2, 1, 0), operations(6, 8, 0)
    assert max(many) - min(few) <= 6, "only rules that have something to forbid add to them"
