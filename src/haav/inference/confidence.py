"""Confidence: the calibrated chance that people use a word, or the words of a caption, for the same photo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from haav.config import ConfidenceConfig
from haav.types import Word


def confidence(logprob: float, settings: ConfidenceConfig) -> float:
    return float(confidences([logprob], settings)[0])


def confidences(logprobs: ArrayLike, settings: ConfidenceConfig) -> NDArray[np.float64]:
    """sigmoid(offset + slope · logit(p))"""
    return _sigmoid(settings.offset + settings.slope * _logits(np.asarray(logprobs, dtype=np.float64)))


def caption_confidence(
    words: Sequence[Word], agreement: float | None, novelty: float | None, settings: ConfidenceConfig
) -> float:
    """Expected share of the words of a caption that people use. None stands for a typical value."""
    if not words:
        return 0.0
    features = caption_features(words, agreement, novelty, settings)
    weights = (settings.caption_offset, settings.caption_slope, settings.agreement, settings.novelty)
    return float(_sigmoid(np.dot(weights, features)))


def caption_features(
    words: Sequence[Word], agreement: float | None, novelty: float | None, settings: ConfidenceConfig
) -> tuple[float, float, float, float]:
    """1, the logit of the mean confidence of the words, agreement above the typical one, novelty above the limit

    Below the limit novelty says nothing: photos that are a little unusual get captions as good as others.
    """
    mean = sum(word.confidence for word in words) / max(1, len(words))
    return (
        1.0,
        float(_logits(np.log(np.clip([mean], 1e-12, 1)))[0]),
        0.0 if agreement is None else agreement - settings.typical_agreement,
        0.0 if novelty is None else max(0.0, novelty - settings.unfamiliar_above),
    )


def fit(logprobs: ArrayLike, used: ArrayLike) -> ConfidenceConfig:
    """Fit offset and slope of the confidence of words."""
    logits = _logits(np.asarray(logprobs, dtype=np.float64))
    offset, slope = fit_logistic(np.stack([np.ones(len(logits)), logits], axis=1), used, [0.0, 1.0])
    return ConfidenceConfig(offset=float(offset), slope=float(slope))


def fit_logistic(features: ArrayLike, targets: ArrayLike, prior: ArrayLike, steps: int = 100) -> NDArray[np.float64]:
    """Logistic regression (N, F) → weights (F,) by maximum likelihood, with Newton's method and step halving.

    `targets` are shares from 0 to 1. A small ridge penalty towards `prior` keeps the solution finite if all are 0 or 1.
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    start, ridge = np.asarray(prior, dtype=np.float64), 1e-6

    def loss(weights: NDArray[np.float64]) -> float:
        z = x @ weights
        return float((np.logaddexp(0, z) - y * z).mean() + ridge / 2 * ((weights - start) ** 2).sum())

    best = start
    for _ in range(steps):
        p = _sigmoid(x @ best)
        curve = x.T @ (x * (p * (1 - p))[:, None]) / len(y) + ridge * np.eye(x.shape[1])
        move = np.linalg.solve(curve, x.T @ (y - p) / len(y) - ridge * (best - start))
        while loss(best + move) > loss(best) and np.abs(move).max() > 1e-12:
            move = move / 2
        best = best + move
        if np.abs(move).max() < 1e-9:
            break
    return best


@dataclass(frozen=True)
class Bin:
    """Words or captions of similar confidence."""

    count: int
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
    error = sum(part.count * abs(part.confidence - part.used) for part in filled) / max(len(sure), 1)
    return float(error), filled


def area_under_curve(scores: ArrayLike, good: ArrayLike) -> float:
    """Chance that a good one has a higher score than a bad one; ties count half."""
    scores, good = np.asarray(scores, dtype=np.float64), np.asarray(good, dtype=bool)
    _, rank, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[rank]
    positives, negatives = int(good.sum()), int((~good).sum())
    if not positives or not negatives:
        return float("nan")
    return float((ranks[good].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _logits(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(p / (1 - p)), finite for p = 1"""
    logprobs = np.clip(logprobs, math.log(1e-12), math.log1p(-1e-7))
    return logprobs - np.log(-np.expm1(logprobs))


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))
