from __future__ import annotations

import math

import numpy as np
import pytest

from haav.evaluate.statistics import (
    bootstrap_counts,
    bootstrap_means,
    percentile_interval,
    sign_p_value,
    student_interval,
)


def test_a_resample_holds_as_many_items_as_there_are() -> None:
    counts = bootstrap_counts(7, 20, seed=1)
    assert counts.shape == (20, 7)
    assert (counts.sum(axis=1) == 7).all()
    assert (bootstrap_counts(1, 3, seed=0) == 1).all()


def test_resampled_means_are_those_of_the_drawn_values() -> None:
    values = np.array([0.5, -2.0, 3.25, 8.0])
    rng = np.random.default_rng(5)
    slow = [values[rng.integers(4, size=4)].mean() for _ in range(30)]
    assert bootstrap_means(values, 30, seed=5) == pytest.approx(slow, abs=1e-12)


def test_the_percentile_interval_by_hand() -> None:
    """Of 0 … 200 the 2.5 % quantile is 0.025 · 200 = 5, the 97.5 % quantile 195."""
    column = np.random.default_rng(0).permutation(np.arange(201.0))
    low, high = percentile_interval(np.stack([column, 2 * column], axis=1))
    assert low == pytest.approx([5, 10])
    assert high == pytest.approx([195, 390])


def test_the_p_value_by_hand() -> None:
    """9 resamples, 1 of them not above 0: 2 · (1 + 1) / (9 + 1); none: 2 · 1 / 10; all tied: never above 1."""
    assert sign_p_value(np.array([-1.0, *[1.0] * 8])) == pytest.approx(0.4)
    assert sign_p_value(np.ones(9)) == pytest.approx(0.2)
    assert sign_p_value(-np.ones(9)) == pytest.approx(0.2)
    assert sign_p_value(np.zeros(9)) == 1


def test_the_student_interval_by_hand() -> None:
    """1, 2, 3: standard deviation 1, 2 degrees of freedom"""
    mean, half = student_interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.303 * 1 / math.sqrt(3))
    assert student_interval([0.0, 2.0]) == pytest.approx((1, 12.706 * math.sqrt(2) / math.sqrt(2)))
    assert math.isnan(student_interval([5.0])[1])


def test_many_values_take_the_last_quantile_of_the_table() -> None:
    values = [0.0, 1.0] * 10
    _, half = student_interval(values)
    assert half == pytest.approx(2.262 * np.std(values, ddof=1) / math.sqrt(20))
