"""Bootstrap and confidence intervals, shared by the whole package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom"""
NORMAL = 1.96
"""97.5 % quantile of the normal distribution"""


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
    return float(np.mean(values)), float(student(len(values)) * np.std(values, ddof=1) / len(values) ** 0.5)


def student(values: int) -> float:
    """97.5 % quantile of Student's t for the mean of so many values"""
    return STUDENT[min(values - 2, len(STUDENT) - 1)] if values > 1 else float("nan")


def bootstrap_seeds_and_photos(differences: Floats, resamples: int, seed: int) -> Floats:
    """(resamples,): mean differences of resampled seeds and photos, from differences (seeds, photos) of two rows

    Seeds are drawn, then photos, the same photos for every seed. A plain bootstrap of three seeds is too narrow: it
    covers the truth in about 80 % of the cases instead of 95 %. So the deviations of seeds from their mean are
    stretched first, by the quantile of Student's t over that of the normal distribution, and by sqrt(S / (S - 1)).
    With one seed this is the plain paired bootstrap over photos.
    """
    seeds, photos = differences.shape
    if seeds > 1:
        means = differences.mean(axis=1, keepdims=True)
        stretch = student(seeds) / NORMAL * (seeds / (seeds - 1)) ** 0.5
        differences = differences + (stretch - 1) * (means - means.mean())
    by_seed = bootstrap_counts(photos, resamples, seed) @ differences.T / photos
    drawn: Floats = (by_seed * bootstrap_counts(seeds, resamples, seed + 1)).sum(axis=1) / seeds
    return drawn


@dataclass(frozen=True)
class Components:
    """Variance of a difference, split into what varies with the seed, with the photo, and with both at once."""

    seed: float
    photo: float
    rest: float

    @classmethod
    def of(cls, differences: Floats) -> Components:
        """From differences (seeds, photos), by the mean squares of a two-way table. One seed shows no `seed`."""
        seeds, photos = differences.shape
        by_seed, by_photo = differences.mean(axis=1), differences.mean(axis=0)
        if seeds < 2 or photos < 2:
            return cls(
                float(by_seed.var(ddof=1)) if seeds > 1 else 0.0, float(by_photo.var(ddof=1)) if photos > 1 else 0.0, 0
            )
        residual = differences - by_seed[:, None] - by_photo + differences.mean()
        rest = float((residual**2).sum() / ((seeds - 1) * (photos - 1)))
        return cls(
            max(0.0, float(by_seed.var(ddof=1)) - rest / photos),
            max(0.0, float(by_photo.var(ddof=1)) - rest / seeds),
            rest,
        )

    def half_width(self, seeds: int, photos: int) -> float:
        """Half the width of the 95 % interval that so many seeds and photos would give"""
        between = student(seeds) ** 2 * (self.seed + self.rest / photos) / seeds if seeds > 1 else 0.0
        return float((between + NORMAL**2 * self.photo / photos) ** 0.5)
