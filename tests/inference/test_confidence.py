from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haav.config import ConfidenceConfig
from haav.inference.confidence import confidences, fit, reliability


def test_by_default_confidence_is_the_probability() -> None:
    p = np.array([0.001, 0.2, 0.5, 0.999])
    np.testing.assert_allclose(confidences(np.log(p), ConfidenceConfig()), p, rtol=1e-6)
    assert confidences([0.0, -np.inf], ConfidenceConfig()) == pytest.approx([1, 0], abs=1e-6), "certain or impossible"


def test_fit_finds_the_curve_that_the_words_were_drawn_from() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(0.01, 0.99, 200_000)
    true = ConfidenceConfig(offset=0.8, slope=0.6)
    used = rng.uniform(size=len(p)) < confidences(np.log(p), true)
    found = fit(np.log(p), used)
    assert (found.offset, found.slope) == (pytest.approx(0.8, abs=0.03), pytest.approx(0.6, abs=0.03))
    before, _ = reliability(p, used)
    after, _ = reliability(confidences(np.log(p), found), used)
    assert after < 0.01 < 0.1 < before


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(-4, 4), st.floats(-1, 4), st.floats(0.01, 3))
def test_no_fit_is_worse_than_the_probability_or_a_constant(
    seed: int, offset: float, slope: float, spread: float
) -> None:
    """Newton's method overshoots where a model is very sure; the fit must not."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(2, spread, 300)
    logprobs = -np.logaddexp(0, -logits)
    used = rng.uniform(size=300) < 1 / (1 + np.exp(-(offset + slope * logits)))

    def loss(p: np.ndarray) -> float:
        p = np.clip(p, 1e-12, 1 - 1e-12)
        return float(-(used * np.log(p) + ~used * np.log(1 - p)).mean())

    found = loss(confidences(logprobs, fit(logprobs, used)))
    assert found <= loss(np.exp(logprobs)) + 1e-3
    assert found <= loss(np.full(300, used.mean())) + 1e-3


def test_fit_survives_words_that_are_all_used() -> None:
    found = fit(np.log([0.2, 0.5, 0.9]), [True, True, True])
    assert np.isfinite([found.offset, found.slope]).all()


def test_expected_calibration_error_by_hand() -> None:
    # Two bins: 0.2, 0.4 with one of two used: |0.3 - 0.5| = 0.2; 0.9 twice, both used: 0.1. Mean: 0.15.
    error, bins = reliability([0.2, 0.4, 0.9, 0.9], [True, False, True, True], bins=2)
    assert error == pytest.approx(0.15)
    assert [(part.count, part.used) for part in bins] == [(2, 0.5), (2, 1.0)]
    assert reliability([1.0], [True])[0] == 0
