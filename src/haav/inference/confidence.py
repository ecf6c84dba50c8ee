"""Confidence of a word: its probability, calibrated to how often people use such words for the same photo."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from haav.config import ConfidenceConfig


def confidence(logprob: float, settings: ConfidenceConfig) -> float:
    return float(confidences([logprob], settings)[0])


def confidences(logprobs: ArrayLike, settings: ConfidenceConfig) -> NDArray[np.float64]:
    """sigmoid(offset + slope · logit(p))"""
    return _sigmoid(settings.offset + settings.slope * _logits(np.asarray(logprobs, dtype=np.float64)))


def fit(logprobs: ArrayLike, used: ArrayLike, steps: int = 100) -> ConfidenceConfig:
    """Fit offset and slope by maximum likelihood, with Newton's method and step halving.

    A small ridge penalty keeps the solution finite if people used all words, or none.
    """
    x = np.stack([np.ones(len(np.asarray(logprobs))), _logits(np.asarray(logprobs, dtype=np.float64))], axis=1)
    y = np.asarray(used, dtype=np.float64)
    start, ridge = np.array([0.0, 1.0]), 1e-6

    def loss(weights: NDArray[np.float64]) -> float:
        z = x @ weights
        return float((np.logaddexp(0, z) - y * z).mean() + ridge / 2 * ((weights - start) ** 2).sum())

    best = start
    for _ in range(steps):
        p = _sigmoid(x @ best)
        curve = x.T @ (x * (p * (1 - p))[:, None]) / len(y) + ridge * np.eye(2)
        move = np.linalg.solve(curve, x.T @ (y - p) / len(y) - ridge * (best - start))
        while loss(best + move) > loss(best) and np.abs(move).max() > 1e-12:
            move = move / 2
        best = best + move
        if np.abs(move).max() < 1e-9:
            break
    return ConfidenceConfig(offset=float(best[0]), slope=float(best[1]))


@dataclass(frozen=True)
class Bin:
    """Words of similar confidence."""

    words: int
    confidence: float
    used: float
    """share of the words that people used"""


def reliability(sure: ArrayLike, used: ArrayLike, bins: int = 15) -> tuple[float, list[Bin]]:
    """Expected calibration error, and the bins of equal width that it is computed from."""
    sure, used = np.asarray(sure, dtype=np.float64), np.asarray(used, dtype=np.float64)
    place = np.minimum((sure * bins).astype(int), bins - 1)
    filled = [
        Bin(int(inside.sum()), float(sure[inside].mean()), float(used[inside].mean()))
        for inside in (place == index for index in range(bins))
        if inside.any()
    ]
    error = sum(part.words * abs(part.confidence - part.used) for part in filled) / max(len(sure), 1)
    return float(error), filled


def _logits(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(p / (1 - p)), finite for p = 1"""
    logprobs = np.clip(logprobs, math.log(1e-12), math.log1p(-1e-7))
    return logprobs - np.log(-np.expm1(logprobs))


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))
