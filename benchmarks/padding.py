"""A training step with the captions of a photo in one row of words, against a padded row each, in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from haav.model.build import build_model
from haav.model.decoders.base import Decoder
from haav.model.decoders.transformer import TransformerDecoder
from haav.pretrained import find_model, read_config
from haav.studies.speed import random_views
from haav.text import BOS, EOS, PAD, SPECIAL
from haav.train.objectives import CrossEntropy, Learner, StepInput
from haav.types import Batch

LENGTHS = {8: 17, 9: 21, 10: 21, 11: 16, 12: 10, 13: 6, 14: 3, 15: 2, 16: 1, 17: 1, 18: 1, 20: 1}
"""words of a caption → share of COCO's captions, %"""
ROUNDS = 5


def captions_like_coco(photos: int, each: int, words: int) -> torch.Tensor:
    """(photos, each, T) random words in captions as long as COCO's"""
    rng = random.Random(0)
    lengths = rng.choices(list(LENGTHS), list(LENGTHS.values()), k=photos * each)
    captions = torch.full((photos * each, max(lengths) + 2), PAD)
    captions[:, 0] = BOS
    for row, length in zip(captions, lengths, strict=True):
        row[1 : length + 1] = torch.randint(len(SPECIAL), words, (length,))
        row[length + 1] = EOS
    return captions.view(photos, each, -1)


def step_of(photos: int, each: int) -> Callable[[], None]:
    """A cross-entropy step of a model of the shipped sizes, with the shipped views"""
    torch.manual_seed(0)
    sizes = read_config(find_model("best")).model
    model = build_model(sizes)
    batch = Batch(
        tuple(f"p{index}" for index in range(photos)),
        random_views(sizes.views, photos),
        captions_like_coco(photos, each, sizes.vocabulary_size),
    )
    learner = Learner(model, None, CrossEntropy(), 0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses, _ = learner(StepInput([batch]))
        losses["loss"].backward()
        optimizer.step()

    return step


def padding() -> dict[str, Any]:
    found: dict[str, Any] = {"what": "XE step, the shipped sizes, captions as long as COCO's, medians of turns"}
    for photos, each in ((32, 3), (16, 5)):
        step = step_of(photos, each)
        ways = {"a row each": Decoder.read_whole, "one row": TransformerDecoder.read_whole}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, way in ways.items():
                with patch.object(TransformerDecoder, "read_whole", way):
                    started = time.perf_counter()
                    step()
                    times[name] += [time.perf_counter() - started] if number else []  # the first warms up
        medians = {name: statistics.median(values) for name, values in times.items()}
        label = f"{photos} photos, {each} captions"
        found |= {f"{label}, {name}, s": took for name, took in medians.items()}
        found[f"{label}, times faster"] = medians["a row each"] / medians["one row"]
    return found
