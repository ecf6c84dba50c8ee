from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from haav.evaluate.statistics import (
    NORMAL,
    STUDENT,
    Components,
    bootstrap_counts,
    bootstrap_means,
    bootstrap_seeds_and_photos,
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


def simulated(
    rng: np.random.Generator, seeds: int, photos: int, spreads: Sequence[float], truth: float = 0.0
) -> list[np.ndarray]:
    """Rows with what varies with the seed, with the photo, and with both; the others are subtracted from the first"""
    rows = [
        spread * rng.standard_normal((seeds, 1))
        + 5 * rng.standard_normal((1, photos))
        + 5 * rng.standard_normal((seeds, photos))
        for spread in spreads
    ]
    return [truth + rows[0], *(-row for row in rows[1:])]


def test_seeds_and_photos_are_resampled_as_in_a_slow_obvious_version() -> None:
    rows = simulated(np.random.default_rng(0), 3, 11, [2.0, 1.0])
    stretch = STUDENT[3] / NORMAL * math.sqrt(3 / 2)  # two rows of three seeds: 4 degrees of freedom
    photo_draws, seed_draws = np.random.default_rng(4), [np.random.default_rng(5), np.random.default_rng(6)]
    slow = []
    for _ in range(40):
        photos = photo_draws.integers(11, size=11)
        total = 0.0
        for row, draws in zip(rows, seed_draws, strict=True):
            grand = row.mean()
            for seed in draws.integers(3, size=3):
                own = row[seed].mean()
                total += stretch * (own - grand) + grand + np.mean([row[seed, photo] - own for photo in photos])
        slow.append(total / 3)
    assert bootstrap_seeds_and_photos(rows, 40, seed=4) == pytest.approx(slow, abs=1e-9)


def test_one_seed_is_the_plain_paired_bootstrap() -> None:
    rows = simulated(np.random.default_rng(0), 1, 30, [0.0, 0.0])
    assert bootstrap_seeds_and_photos(rows, 25, seed=3) == pytest.approx(
        bootstrap_means((rows[0] + rows[1])[0], 25, seed=3), abs=1e-12
    )


def test_equal_rows_differ_by_nothing() -> None:
    row = np.random.default_rng(0).standard_normal((1, 5)).repeat(3, axis=0)
    assert bootstrap_seeds_and_photos([row, -row], 20, seed=0) == pytest.approx(0)
    assert bootstrap_seeds_and_photos([np.full((2, 1), 1.5)], 20, seed=0) == pytest.approx(1.5)


@pytest.mark.parametrize("spreads", [[0.0], [1.0], [3.0], [0.0, 0.0], [1.0, 1.0], [3.0, 3.0], [3.0, 1.5]])
def test_intervals_of_three_seeds_cover_the_truth(spreads: list[float]) -> None:
    """In about 95 % of the cases; a plain bootstrap covers it in about 80 % where seeds vary most."""
    rng = np.random.default_rng(1)
    covered, plain = 0, 0
    for trial in range(200):
        rows = simulated(rng, 3, 60, spreads, truth=2.0)
        low, high = percentile_interval(bootstrap_seeds_and_photos(rows, 200, seed=trial))
        covered += low <= 2.0 <= high
        differences = np.sum(rows, axis=0)
        counts = bootstrap_counts(60, 200, trial) @ differences.T / 60 * bootstrap_counts(3, 200, trial + 1)
        low, high = percentile_interval(counts.sum(axis=1) / 3)
        plain += low <= 2.0 <= high
    assert covered >= 0.92 * 200
    if spreads[0] == 3.0:
        assert plain < 0.9 * 200


def test_seeds_of_two_rows_tell_more_than_those_of_their_difference() -> None:
    """4 degrees of freedom instead of 2: intervals are 2.776 / 4.303 as wide."""
    rng = np.random.default_rng(3)
    of_rows, of_differences = [], []
    for trial in range(40):
        rows = simulated(rng, 3, 400, [5.0, 5.0])
        for widths, parts in ((of_rows, rows), (of_differences, [rows[0] + rows[1]])):
            low, high = percentile_interval(bootstrap_seeds_and_photos(parts, 400, seed=trial))
            widths.append((high - low) ** 2)
    assert np.sqrt(np.mean(of_rows) / np.mean(of_differences)) == pytest.approx(2.776 / 4.303, rel=0.1)


def test_variance_components_are_found_again() -> None:
    rng = np.random.default_rng(2)
    for spreads in ([3.0], [3.0, 1.0]):
        parts = [Components.of(simulated(rng, 8, 400, spreads)) for _ in range(60)]
        assert np.mean([part.seed for part in parts]) == pytest.approx(sum(spread**2 for spread in spreads), rel=0.2)
        assert np.mean([part.photo for part in parts]) == pytest.approx(25 * len(spreads), rel=0.1)
        assert np.mean([part.rest for part in parts]) == pytest.approx(25 * len(spreads), rel=0.05)


def test_the_width_of_an_interval_follows_from_the_components() -> None:
    """Seeds that agree leave the photos: 1.96 · 5 / sqrt(100). More seeds and more photos narrow it."""
    assert Components(0, 25, 0).half_width(3, 100) == pytest.approx(1.96 * 5 / 10)
    assert Components(4, 0, 0).half_width(3, 100) == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert Components(4, 0, 0, rows=2).half_width(3, 100) == pytest.approx(2.776 * 2 / math.sqrt(3))
    both = Components(4, 25, 10)
    assert both.half_width(6, 100) < both.half_width(3, 100)
    assert both.half_width(3, 1000) < both.half_width(3, 100)


def test_one_seed_has_no_component_of_seeds() -> None:
    assert Components.of([np.array([[1.0, 2.0, 3.0]])]) == Components(0.0, 1.0, 0.0)
    assert Components.of([np.array([[1.0], [3.0]])]) == Components(2.0, 0.0, 0.0)
    assert Components.of([np.array([[1.0], [3.0]]), np.array([[1.0], [2.0]])]) == Components(2.5, 0.0, 0.0, rows=2)
