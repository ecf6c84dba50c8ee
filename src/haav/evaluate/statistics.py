"""Bootstrap and confidence intervals, shared by the whole package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom"""


def bootstrap_counts(items: int, resamples: int, seed: int) -> Floats:
    """(resamples, items): how often each item occurs in each resample, drawn with replacement"""
    rng = np.random.default_rng(seed)
    counts = (np.bincount(rng.integers(items, size=items), minlength=items) for _ in range(resamples))
    return np.stack(list(counts)).astype(np.float64)


def bootstrap_means(values: Floats, resamples: int, seed: int) -> Floats:
    """(resamples,): means of resampled values (N,)"""
    means: Floats = bootstrap_counts(len(values), resamples, seed) @ values / len(values)
    return means


def percentile_interval(resampled: Floats) -> tuple[Floats, Floats]:
    """Bounds that contain 95 % of the resamples: (resamples, …) → (…), (…)"""
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return low, high


def sign_p_value(resampled: Floats) -> Floats:
    """Two-sided p of a difference being 0: (resamples, …) → (…)

    One more resample is counted on the other side, because a finite number of resamples cannot show that p is 0.
    """
    tails = np.minimum((resampled <= 0).sum(axis=0), (resampled >= 0).sum(axis=0)) + 1
    p: Floats = np.minimum(1, 2 * tails / (len(resampled) + 1))
    return p


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t; NaN for a single value

    For more than 10 values the interval is slightly too wide, because the last quantile of the table is used.
    """
    if len(values) < 2:
        return float(np.mean(values)), float("nan")
    student = STUDENT[min(len(values) - 2, len(STUDENT) - 1)]
    return float(np.mean(values)), float(student * np.std(values, ddof=1) / len(values) ** 0.5)
