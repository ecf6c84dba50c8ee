"""Hours of training, estimated from FLOPs before anything is trained.

FLOPs are those of the executed matrix products (`describe.py`). A backward pass takes twice those of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from haav.config import Config
from haav.studies.describe import Cost, cost
from haav.studies.outcomes import Outcome

WORDS = 12
"""of a caption, end token included: the mean of COCO's is 11.5"""
GIGAFLOPS = 25.0
"""per second, where no run has been measured yet: two CPU cores and small models, by the captions per second of HAAV in
docs/experiments/2026-11-16-coco-small.md"""


def training_flops(config: Config, photos: int, val: int, per_photo: Cost | None = None) -> float:
    """FLOPs of a whole run on so many training photos, the evaluations on val included"""
    each, train, decode = per_photo or cost(config.model), config.train, config.decode
    passes = 3.0 * (each.encoding + each.memory)
    if config.contrast.enabled and train.contrast_weight:
        further = train.unlabelled_batch / train.batch
        passes += each.encoding + 4 * each.encoding * further  # the momentum copy; photos without captions
    if train.objective == "scst":
        passes += (decode.max_words + 3 * WORDS) * train.hypotheses * each.step
    else:
        passes += 3 * train.captions * WORDS * each.step
    evaluation = each.encoding + each.memory + decode.max_words * decode.beam * each.step
    evaluations = -(-train.epochs // train.evaluate_every)
    epoch = photos * max(1, math.ceil(train.epoch_steps * train.batch / max(1, photos)))
    return float(epoch * train.epochs * passes + val * evaluations * evaluation)


def measured_gigaflops(outcomes: Sequence[Outcome]) -> float | None:
    """Estimated FLOPs of finished runs by the time they took; None without such runs"""
    speeds = [1000 * each.teraflops / 60 / each.minutes for each in outcomes if each.minutes and each.teraflops]
    return float(np.median(speeds)) if speeds else None


def hours(flops: float, gigaflops: float) -> float:
    return flops / gigaflops / 1e9 / 3600
