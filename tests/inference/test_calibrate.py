"""Confidence of captions: fitted on words that people use, agreement with sentences, and unlikeness to known photos."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haav.config import ConfidenceConfig, DecodeConfig
from haav.data.annotations import Photo
from haav.errors import CheckpointError, DataError
from haav.inference.calibrate import Case, fit_confidence, held_out_report, used_words
from haav.inference.caption import choose_captions
from haav.inference.confidence import area_under_curve, caption_confidence, fit_logistic
from haav.inference.novelty import FILE, Novelty, save_novelty, summarise
from haav.photos.blank import blank_pictures
from haav.text import SPECIAL, Vocabulary
from haav.types import Caption, Word


def caption_of(text: str, *confidences: float) -> Caption:
    words = tuple(Word(word, 0, -0.5, sure, None) for word, sure in zip(text.split(), confidences, strict=True))
    return Caption(text, words, -1.0, sum(confidences) / len(confidences))


def said(*words: tuple[str, float]) -> Caption:
    return Caption("", tuple(Word(text, 0, logprob, 0.0, None) for text, logprob in words), 0.0, 0.0)


def test_words_that_people_use_are_counted() -> None:
    """Every photo: one sure word that people use, one unsure that they do not. Fitted, the error nearly vanishes."""
    photo = Photo("0", "val", ("a man's dog",))
    caption = said(("man's", -0.9), ("cat", -1.5), (".", -0.1))
    used = used_words(caption, photo)
    assert used == {0: True, 1: False}, "a full stop is no word"
    report = held_out_report([Case(caption, used)] * 40, [], np.arange(40) < 20)
    assert report["used by people"] == 0.5
    assert report["words"] == 80
    assert report["calibration error of the confidence"] < 0.05 < report["calibration error of the probabilities"]
    with pytest.raises(DataError, match="nothing to calibrate on"):
        fit_confidence([Case(caption, {})], [])
    with pytest.raises(DataError, match="at least two"):
        held_out_report([Case(caption, used)], [], np.array([True]))


def test_agreement_and_novelty_are_learnt_from_photos_and_blank_pictures() -> None:
    """Captions of equal probability: those that agree with sentences are right, those of blank pictures never are."""
    rng = np.random.default_rng(0)
    caption = said(("a", -0.5), ("dog", -0.5))

    def case(agreement: float, novelty: float, right: float) -> Case:
        return Case(caption, {0: rng.random() < right, 1: rng.random() < right}, agreement, novelty)

    photos = [case(agreement, rng.normal(), 0.2 + agreement) for agreement in 0.7 * rng.random(400)]
    blanks = [case(0.3, 8 + rng.random(), 0.0) for _ in range(40)]
    settings = fit_confidence(photos, blanks)
    assert settings.agreement > 1
    assert settings.novelty < -0.5
    assert 2 < settings.unfamiliar_above < 4
    assert settings.typical_agreement == pytest.approx(0.35, abs=0.03)
    report = held_out_report(photos, blanks, np.array([photo.agreement > 0.35 for photo in photos]))
    assert report["area under the curve, caption is good"] > 0.99
    assert report["area under the curve by the words alone"] == pytest.approx(0.5, abs=0.05)
    assert report["confidence of blank pictures"] < 0.1 < 0.5 < report["confidence of photos"]
    assert report["blank pictures flagged"] == 1
    assert report["photos flagged"] < 0.03
    without = fit_confidence([replace(photo, agreement=None, novelty=None) for photo in photos], [])
    assert (without.agreement, without.novelty, without.unfamiliar_above) == (0, 0, 0)


def test_by_default_a_caption_is_as_sure_as_its_words_are_on_average() -> None:
    caption = caption_of("a dog runs", 0.9, 0.3, 0.6)
    assert caption_confidence(caption.words, 0.2, 5.0, ConfidenceConfig()) == pytest.approx(0.6)
    assert caption_confidence((), None, None, ConfidenceConfig()) == 0.0


def test_agreement_raises_and_novelty_lowers_confidence_by_the_fitted_line() -> None:
    caption = caption_of("a dog", 0.5, 0.5)
    settings = ConfidenceConfig(
        caption_offset=0.3, agreement=2.0, typical_agreement=0.1, novelty=-0.5, unfamiliar_above=1.5
    )

    def sigmoid(x: float) -> float:
        return float(1 / (1 + np.exp(-x)))

    assert caption_confidence(caption.words, 0.4, 2.0, settings) == pytest.approx(sigmoid(0.3 + 2 * 0.3 - 0.5 * 0.5))
    assert caption_confidence(caption.words, 0.1, 1.4, settings) == pytest.approx(sigmoid(0.3)), "below the limit"
    assert caption_confidence(caption.words, None, None, settings) == pytest.approx(sigmoid(0.3)), "unknown is typical"


def test_a_picture_above_the_limit_is_flagged() -> None:
    vocabulary, decode = Vocabulary((*SPECIAL, "a", "dog")), DecodeConfig()
    settings = ConfidenceConfig(unfamiliar_above=3.0)

    def flagged(novelty: float | None, settings: ConfidenceConfig) -> bool:
        captions = [caption_of("a dog", 0.5, 0.5)]
        return choose_captions(captions, (), novelty, 1, vocabulary, decode, settings).unfamiliar

    assert [flagged(novelty, settings) for novelty in (2.9, 3.1, None)] == [False, True, False]
    assert not flagged(100.0, ConfidenceConfig()), "a model without a limit flags nothing"
    assert choose_captions([caption_of("a", 0.5)], (), 4.0, 1, vocabulary, decode, settings).to_json()["unfamiliar"]


def test_logistic_regression_finds_the_weights_that_shares_were_made_with() -> None:
    rng = np.random.default_rng(0)
    features = np.concatenate([np.ones((4000, 1)), rng.normal(size=(4000, 3))], axis=1)
    weights = np.array([0.4, 1.2, -0.7, 0.0])
    shares = rng.binomial(9, 1 / (1 + np.exp(-features @ weights))) / 9
    np.testing.assert_allclose(fit_logistic(features, shares, [0.0, 1.0, 0.0, 0.0]), weights, atol=0.05)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_area_under_the_curve_is_the_share_of_pairs_in_the_right_order(cases: list[tuple[int, bool]]) -> None:
    scores, good = zip(*cases, strict=True)
    pairs = [(a > b) + 0.5 * (a == b) for a, g in cases if g for b, h in cases if not h]
    area = area_under_curve(scores, good)
    assert area == pytest.approx(np.mean(pairs)) if pairs else np.isnan(area)


def photos_of(count: int, rng: np.random.Generator) -> np.ndarray:
    """Photos that vary in 4 of 16 directions, and a little in the others"""
    directions = np.linalg.qr(np.random.default_rng(7).normal(size=(16, 16)))[0]
    values = rng.normal(size=(count, 16)) * np.array([3.0] * 4 + [0.3] * 12)
    return (values @ directions).astype(np.float32)


def test_novelty_is_what_the_main_directions_of_known_photos_miss(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    novelty = Novelty.fit("patches", photos_of(500, rng), photos_of(200, rng), components=4)
    known = np.array([novelty(photo) for photo in photos_of(300, rng)])
    assert abs(known.mean()) < 0.2, "a photo like the known ones is typical"
    assert known.std() == pytest.approx(1, abs=0.2)
    odd = rng.normal(size=(50, 16)).astype(np.float32) * 2
    assert min(novelty(photo) for photo in odd) > known.max()
    x = (odd[0] - novelty.mean) / novelty.scale
    inside = sum((direction @ x) * direction for direction in novelty.components)
    error = np.sqrt(np.mean((x - inside) ** 2))
    assert novelty(odd[0]) == pytest.approx((error - novelty.typical) / novelty.spread, rel=1e-4)

    save_novelty(tmp_path, novelty)
    loaded = Novelty.load(tmp_path, {"patches": 16})
    assert loaded is not None
    assert loaded.view == "patches"
    assert loaded(odd[0]) == pytest.approx(novelty(odd[0]), rel=1e-2), "directions are kept in float16"
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (
        whole[:100],
        whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        whole.replace(b"patches", b"patchez"),
    ):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="haav calibrate"):
            Novelty.load(tmp_path, {"patches": 16, "patchez": 16})
    (tmp_path / FILE).write_bytes(whole)
    for widths in ({"patches": 15}, {"grid": 16}):
        with pytest.raises(CheckpointError, match="which the model does not read"):
            Novelty.load(tmp_path, widths)
    save_novelty(tmp_path, None)
    assert Novelty.load(tmp_path, {"patches": 16}) is None, "a model without it does not keep that of another"


def test_a_view_is_summarised_by_its_tokens_of_the_whole_photo() -> None:
    tokens = np.arange(6, dtype=np.float32).reshape(3, 2)
    boxes = np.array([[0, 0, 1, 1], [0, 0, 0.5, 1], [0.5, 0, 1, 1]], dtype=np.float32)
    assert summarise(tokens, boxes).tolist() == [0, 1]
    assert summarise(tokens, boxes[[1, 1, 2]]).tolist() == [2, 3], "none: the mean"
    assert summarise(tokens, None).tolist() == [2, 3]


def test_blank_pictures_are_the_same_for_a_seed_and_differ_among_themselves() -> None:
    first, again, other = blank_pictures(12), blank_pictures(12), blank_pictures(12, seed=1)
    pixels = [picture.tobytes() for picture in first]
    assert pixels == [picture.tobytes() for picture in again]
    assert pixels != [picture.tobytes() for picture in other]
    assert len(set(pixels)) > 9
    assert all(picture.mode == "RGB" and picture.size == (256, 256) for picture in first)
