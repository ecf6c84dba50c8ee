"""Fit the confidence of words and captions on photos with reference captions, and on pictures that show nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from haav.config import ConfidenceConfig
from haav.data.annotations import Photo
from haav.errors import DataError, HaavError
from haav.evaluate.cider import Cider
from haav.evaluate.ptb import tokenize
from haav.generate.consensus import Consensus
from haav.inference.captioner import Captioner
from haav.inference.confidence import (
    area_under_curve,
    caption_confidence,
    caption_features,
    confidence,
    confidences,
    fit,
    fit_logistic,
    reliability,
)
from haav.inference.novelty import Novelty, summarise
from haav.photos.blank import blank_pictures
from haav.store import Store
from haav.store.shards import ShardStore
from haav.types import Caption, PhotoView
from haav.views import views_that_give

BLANKS = 64
"""pictures that show nothing, whose captions are wrong whatever they say"""
TRAIN_PHOTOS = 4000
"""training photos that a new picture is compared with"""
FAMILIAR = 0.995
"""share of the val photos that count as familiar"""


@dataclass(frozen=True)
class Calibration:
    confidence: ConfidenceConfig
    novelty: Novelty | None
    report: dict[str, float | int | None]


@dataclass(frozen=True)
class _Case:
    """What is known about a caption, and how good it is."""

    caption: Caption
    agreement: float | None
    novelty: float | None
    used: float
    """share of its words that people used; 0 for a picture that shows nothing"""


def calibrate(
    captioner: Captioner,
    store: Store | ShardStore,
    train: Sequence[Photo],
    val: Sequence[Photo],
    captions: Mapping[str, Caption],
) -> Calibration:
    """`captions`: of the val photos. Errors are measured on photos that the curves were not fitted on."""
    val = [photo for photo in val if photo.captions and photo.id in captions]
    words, report = fit_words(captions, val)
    view = captioner.views[0]
    novelty = _fit_novelty(store, view, train, val)
    cases = [_case_of(captioner, store, photo, captions[photo.id], words, novelty) for photo in val]
    blanks = _blank_cases(captioner, words, novelty)
    agreements = [case.agreement for case in cases if case.agreement is not None]
    novelties = [case.novelty for case in cases if case.novelty is not None]
    words = replace(
        words,
        typical_agreement=float(np.mean(agreements)) if agreements else 0.0,
        unfamiliar_above=max(float(np.quantile(novelties, FAMILIAR)), 1e-6) if novelties else 0.0,
    )
    settings = _fit_captions(words, [*cases, *blanks])
    good = _above_median(val, captions)
    held_out = np.zeros(len(cases))
    for fold in (0, 1):
        other = _fit_captions(words, [*cases[1 - fold :: 2], *blanks[1 - fold :: 2]])
        held_out[fold::2] = _caption_confidences(cases[fold::2], other)
    plain = [np.mean([word.confidence for word in case.caption.words] or [0.0]) for case in cases]
    sure_of_blanks = _caption_confidences(blanks, settings)
    report |= {
        "captions": len(cases),
        "calibration error of captions": reliability(held_out, [case.used for case in cases])[0],
        "area under the curve, caption is good": area_under_curve(held_out, good),
        "area under the curve by the words alone": area_under_curve(plain, good),
        "blank pictures": len(blanks),
        "confidence of photos": float(held_out.mean()),
        "confidence of blank pictures": float(sure_of_blanks.mean()) if len(blanks) else None,
        "blank pictures flagged": _flagged(blanks, settings),
        "photos flagged": _flagged(cases, settings),
    }
    return Calibration(settings, novelty, report)


def fit_words(
    captions: Mapping[str, Caption], photos: Sequence[Photo]
) -> tuple[ConfidenceConfig, dict[str, float | int | None]]:
    """Fit the confidence of words to whether people used the word for the same photo."""
    words: list[tuple[int, float, bool]] = []
    for index, photo in enumerate(photo for photo in photos if photo.captions):
        used = _used_words(photo)
        said = [(word.logprob, tokenize(word.text)) for word in captions[photo.id].words]
        words += [(index % 2, logprob, used.issuperset(tokens)) for logprob, tokens in said if tokens]
    if not words:
        raise DataError("nothing to calibrate on: no photo has both a caption and references.")
    half, logprobs, hits = (np.array(column) for column in zip(*words, strict=True))
    if len(set(half.tolist())) < 2:
        raise DataError("calibration fits on some photos and tests on others: it needs at least two with references.")
    held_out = np.zeros(len(words))
    for fold in (0, 1):
        held_out[half == fold] = confidences(logprobs[half == fold], fit(logprobs[half != fold], hits[half != fold]))
    return fit(logprobs, hits), {
        "words": len(words),
        "used by people": float(hits.mean()),
        "calibration error of the probabilities": reliability(np.exp(logprobs), hits)[0],
        "calibration error of the confidence": reliability(held_out, hits)[0],
    }


def _used_words(photo: Photo) -> set[str]:
    return {token for text in photo.captions for token in tokenize(text)}


def _fit_novelty(store: Store | ShardStore, view: str, train: Sequence[Photo], val: Sequence[Photo]) -> Novelty | None:
    """None without training photos to compare with."""
    step = max(1, len(train) // TRAIN_PHOTOS)
    known = _summaries(store, view, train[::step][:TRAIN_PHOTOS])
    return Novelty.fit(view, known, _summaries(store, view, val)) if len(known) > 1 else None


def _summaries(store: Store | ShardStore, view: str, photos: Sequence[Photo]) -> NDArray[np.float32]:
    rows = [_summary(stored) for photo in photos for stored in store.get_many(view, [photo.id]) if len(stored.tokens)]
    return np.stack(rows) if rows else np.zeros((0, 0), np.float32)


def _summary(view: PhotoView) -> NDArray[np.float32]:
    return summarise(view.tokens.float().numpy(), None if view.boxes is None else view.boxes.float().numpy())


def _case_of(
    captioner: Captioner,
    store: Store | ShardStore,
    photo: Photo,
    caption: Caption,
    words: ConfidenceConfig,
    novelty: Novelty | None,
) -> _Case:
    names = [*views_that_give("sentences", captioner.views)[:1], *([novelty.view] if novelty else [])]
    views = {name: store.get_many(name, [photo.id])[0] for name in names}
    used = _used_words(photo)
    said = [tokens for tokens in (tokenize(word.text) for word in caption.words) if tokens]
    share = float(np.mean([used.issuperset(tokens) for tokens in said])) if said else 0.0
    return _case(captioner, caption, views, words, novelty, share)


def _blank_cases(captioner: Captioner, words: ConfidenceConfig, novelty: Novelty | None) -> list[_Case]:
    """Captions of pictures that show nothing. Empty if the model cannot look at pictures, e.g. for want of a bridge."""
    pictures = blank_pictures(BLANKS)
    try:
        extracted = captioner.extract(pictures[:1])
    except HaavError:
        return []
    cases = []
    for start in range(0, len(pictures), 8):
        extracted = captioner.extract(pictures[start : start + 8])
        captions = captioner.caption_extracted(extracted)
        for row, caption in enumerate(captions):
            views = {name: views[row] for name, views in extracted.items()}
            cases.append(_case(captioner, caption, views, words, novelty, 0.0))
    return cases


def _case(
    captioner: Captioner,
    caption: Caption,
    views: Mapping[str, PhotoView],
    words: ConfidenceConfig,
    novelty: Novelty | None,
    used: float,
) -> _Case:
    calibrated = tuple(replace(word, confidence=confidence(word.logprob, words)) for word in caption.words)
    agreement = None
    for name in views_that_give("sentences", views)[:1]:
        told = (views[name].labels or ())[: captioner.config.decode.consensus_of]
        if told:
            (agreement,) = Consensus(captioner.vocabulary)([[word.text for word in caption.words]], told)
    strange = None
    if novelty is not None and len(views[novelty.view].tokens):
        strange = novelty(_summary(views[novelty.view]))
    return _Case(replace(caption, words=calibrated), agreement, strange, used)


def _fit_captions(words: ConfidenceConfig, cases: Sequence[_Case]) -> ConfidenceConfig:
    features = [caption_features(case.caption, case.agreement, case.novelty, words) for case in cases]
    weights = fit_logistic(features, [case.used for case in cases], [0.0, 1.0, 0.0, 0.0])
    offset, slope, agreement, novelty = map(float, weights)
    return replace(words, caption_offset=offset, caption_slope=slope, agreement=agreement, novelty=novelty)


def _caption_confidences(cases: Sequence[_Case], settings: ConfidenceConfig) -> NDArray[np.float64]:
    return np.array([caption_confidence(case.caption, case.agreement, case.novelty, settings) for case in cases])


def _above_median(photos: Sequence[Photo], captions: Mapping[str, Caption]) -> NDArray[np.bool_]:
    """Whether the CIDEr of each caption is above the median."""
    cider = Cider([[" ".join(tokenize(text)).split() for text in photo.captions] for photo in photos])
    said = [" ".join(tokenize(captions[photo.id].text)).split() for photo in photos]
    scores = cider.score(np.arange(len(photos)), said)
    return np.asarray(scores > np.median(scores))


def _flagged(cases: Sequence[_Case], settings: ConfidenceConfig) -> float | None:
    if not cases or not settings.unfamiliar_above:
        return None
    return float(np.mean([(case.novelty or 0.0) > settings.unfamiliar_above for case in cases]))
