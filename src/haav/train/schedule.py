"""Learning rate schedules, as a fraction of the peak rate."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def build_schedule(name: str, warmup_steps: int, steps: int, steps_per_epoch: int) -> Schedule:
    """Linear warm-up to 1, followed by the schedule `name`.

    "constant" is the schedule of the paper. "cosine" falls to 0 at the last step. "cyclic" is the cosine of the
    release: its horizon is one epoch, so it falls and rises repeatedly.
    """

    def share(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        after = step - warmup_steps
        if name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, after / max(1, steps - warmup_steps))))
        if name == "cyclic":
            return 0.5 * (1 + math.cos(math.pi * after / max(1, steps_per_epoch)))
        return 1.0

    return share
