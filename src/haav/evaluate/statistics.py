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


def bootstrap_seeds_and_photos(rows: Sequence[Floats], resamples: int, seed: int) -> Floats:
    """(resamples,): sums of the means of rows (seeds, photos), of resampled seeds and photos

    For a difference, the row that is subtracted is given as its negative. Photos are drawn for all rows at once, so
    rows are paired by photo. Seeds are drawn for each row: the same seed does not make runs of two rows alike.

    A plain bootstrap of three seeds is too narrow: it covers the truth in about 80 % of the cases instead of 95 %. So
    the deviations of seeds from their mean are stretched first, by sqrt(S / (S - 1)), and by the quantile of Student's
    t over that of the normal distribution. All rows together give the degrees of freedom: four for two rows of three
    seeds. With one seed this is the plain paired bootstrap over photos.
    """
    photos = bootstrap_counts(rows[0].shape[1], resamples, seed) / rows[0].shape[1]
    quantile = student(1 + sum(len(row) - 1 for row in rows))
    drawn = np.zeros(resamples)
    for number, row in enumerate(rows):
        seeds = len(row)
        if seeds > 1:
            means = row.mean(axis=1, keepdims=True)
            row = row + (quantile / NORMAL * (seeds / (seeds - 1)) ** 0.5 - 1) * (means - means.mean())
        draws = bootstrap_counts(seeds, resamples, seed + 1 + number)
        drawn += (photos @ row.T * draws).sum(axis=1) / seeds
    return drawn


@dataclass(frozen=True)
class Components:
    """Variance of a sum of rows, split into what varies with the seed, with the photo, and with both at once."""

    seed: float
    photo: float
    rest: float
    rows: int = 1

    @classmethod
    def of(cls, rows: Sequence[Floats]) -> Components:
        """From rows (seeds, photos), by the mean squares of a two-way table. One seed shows no `seed`."""
        seeds, photos = rows[0].shape
        by_photo = np.sum([row.mean(axis=0) for row in rows], axis=0)
        of_seeds = sum(float(row.mean(axis=1).var(ddof=1)) for row in rows) if seeds > 1 else 0.0
        of_photos = float(by_photo.var(ddof=1)) if photos > 1 else 0.0
        if seeds < 2 or photos < 2:
            return cls(of_seeds, of_photos, 0.0, len(rows))
        rest = sum(_interaction(row) for row in rows)
        return cls(max(0.0, of_seeds - rest / photos), max(0.0, of_photos - rest / seeds), rest, len(rows))

    def half_width(self, seeds: int, photos: int) -> float:
        """Half the width of the 95 % interval that so many seeds and photos would give"""
        quantile = student(1 + self.rows * (seeds - 1))
        between = quantile**2 * (self.seed + self.rest / photos) / seeds if seeds > 1 else 0.0
        return float((between + NORMAL**2 * self.photo / photos) ** 0.5)


def _interaction(row: Floats) -> float:
    """Variance of (seeds, photos) that neither seed nor photo explains"""
    residual = row - row.mean(axis=1, keepdims=True) - row.mean(axis=0) + row.mean()
    return float((residual**2).sum() / ((row.shape[0] - 1) * (row.shape[1] - 1)))
