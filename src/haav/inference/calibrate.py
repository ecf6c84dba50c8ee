"""Fit the confidence of words and captions on photos with reference captions, and on pictures that show nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from haav.config import ConfidenceConfig
from haav.data.annotations import Photo
from haav.errors import CheckpointError, DataError, ViewError
from haav.evaluate.cider import Cider
from haav.evaluate.ptb import tokenize
from haav.inference.caption import agreements_of
from haav.inference.captioner import Captioner
from haav.inference.confidence import (
    area_under_curve,
    caption_confidence,
    caption_features,
    confidence,
    fit,
    fit_logistic,
    reliability,
)
from haav.inference.novelty import Novelty, summarise
from haav.photos.blank import blank_pictures
from haav.store import Store
from haav.store.shards import ShardStore
from haav.types import Caption, PhotoView, Word
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
class Case:
    """What is known about a caption, and which of its words people used."""

    caption: Caption
    used: Mapping[int, bool]
    """whether people used the word at a position; marks that are not words have none"""
    agreement: float | None = None
    novelty: float | None = None

    @property
    def share(self) -> float:
        return float(np.mean(list(self.used.values()))) if self.used else 0.0

    def words(self, settings: ConfidenceConfig) -> tuple[Word, ...]:
        """The words of the caption with their confidence"""
        return tuple(replace(word, confidence=confidence(word.logprob, settings)) for word in self.caption.words)

    def confidence(self, settings: ConfidenceConfig) -> float:
        return caption_confidence(self.words(settings), self.agreement, self.novelty, settings)


def calibrate(
    captioner: Captioner,
    store: Store | ShardStore,
    train: Sequence[Photo],
    val: Sequence[Photo],
    captions: Mapping[str, Caption],
) -> Calibration:
    """Fit the confidence of a model. `captions`: of the val photos"""
    val = [photo for photo in val if photo.captions and photo.id in captions]
    novelty = _fit_novelty(store, captioner.views[0], train, val)
    cases = [_case_of(captioner, store, photo, captions[photo.id], novelty) for photo in val]
    blanks = _blank_cases(captioner, novelty)
    settings = fit_confidence(cases, blanks)
    return Calibration(settings, novelty, held_out_report(cases, blanks, _above_median(val, captions)))


def fit_confidence(cases: Sequence[Case], blanks: Sequence[Case]) -> ConfidenceConfig:
    """`blanks`: captions of pictures that show nothing, which are wrong whatever they say"""
    words = [(case.caption.words[place].logprob, used) for case in cases for place, used in case.used.items()]
    if not words:
        raise DataError("nothing to calibrate on: no photo has both a caption and references.")
    settings = fit(*zip(*words, strict=True))
    agreements = [case.agreement for case in cases if case.agreement is not None]
    novelties = [case.novelty for case in cases if case.novelty is not None]
    settings = replace(
        settings,
        typical_agreement=float(np.mean(agreements)) if agreements else 0.0,
        unfamiliar_above=max(float(np.quantile(novelties, FAMILIAR)), 1e-6) if novelties else 0.0,
    )
    together = [*cases, *blanks]
    features = [caption_features(case.words(settings), case.agreement, case.novelty, settings) for case in together]
    weights = fit_logistic(features, [case.share for case in together], [0.0, 1.0, 0.0, 0.0])
    offset, slope, agreement, unlike = map(float, weights)
    return replace(settings, caption_offset=offset, caption_slope=slope, agreement=agreement, novelty=unlike)


def held_out_report(
    cases: Sequence[Case], blanks: Sequence[Case], good: NDArray[np.bool_]
) -> dict[str, float | int | None]:
    """Errors on photos and blank pictures that the curves were not fitted on: each half is judged by the other.

    `good`: whether the caption of each case is good
    """
    if len(cases) < 2:
        raise DataError("calibration fits on some photos and tests on others: it needs at least two with references.")
    words: list[tuple[float, float, bool]] = []
    by_caption, by_words = np.zeros(len(cases)), np.zeros(len(cases))
    of_blanks: list[float] = []
    flagged: list[bool] = []
    blanks_flagged: list[bool] = []
    halves = (blanks[: len(blanks) // 2], blanks[len(blanks) // 2 :])
    for fold in (0, 1):
        settings = fit_confidence(cases[1 - fold :: 2], halves[1 - fold])
        for index in range(fold, len(cases), 2):
            case, judged = cases[index], cases[index].words(settings)
            words += [(judged[place].logprob, judged[place].confidence, used) for place, used in case.used.items()]
            by_caption[index] = case.confidence(settings)
            by_words[index] = np.mean([word.confidence for word in judged] or [0.0])
            flagged.append(_is_unfamiliar(case, settings))
        of_blanks += [case.confidence(settings) for case in halves[fold]]
        blanks_flagged += [_is_unfamiliar(case, settings) for case in halves[fold]]
    logprobs, confidences, hits = (np.array(column) for column in zip(*words, strict=True))
    return {
        "words": len(words),
        "used by people": float(hits.mean()),
        "calibration error of the probabilities": reliability(np.exp(logprobs), hits)[0],
        "calibration error of the confidence": reliability(confidences, hits)[0],
        "captions": len(cases),
        "calibration error of captions": reliability(by_caption, [case.share for case in cases])[0],
        "area under the curve, caption is good": area_under_curve(by_caption, good),
        "area under the curve by the words alone": area_under_curve(by_words, good),
        "confidence of photos": float(by_caption.mean()),
        "photos flagged": float(np.mean(flagged)),
        "blank pictures": len(blanks),
        "confidence of blank pictures": float(np.mean(of_blanks)) if blanks else None,
        "blank pictures flagged": float(np.mean(blanks_flagged)) if blanks else None,
    }


def used_words(caption: Caption, photo: Photo) -> dict[int, bool]:
    """Whether people used each word of a caption for the photo, by its position"""
    by_people = {token for text in photo.captions for token in tokenize(text)}
    tokens = {place: tokenize(word.text) for place, word in enumerate(caption.words)}
    return {place: by_people.issuperset(parts) for place, parts in tokens.items() if parts}


def _is_unfamiliar(case: Case, settings: ConfidenceConfig) -> bool:
    return case.novelty is not None and 0 < settings.unfamiliar_above < case.novelty


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
    captioner: Captioner, store: Store | ShardStore, photo: Photo, caption: Caption, novelty: Novelty | None
) -> Case:
    names = [*views_that_give("sentences", captioner.views)[:1], *([novelty.view] if novelty else [])]
    views = {name: store.get_many(name, [photo.id])[0] for name in names}
    return _case(captioner, caption, views, novelty, used_words(caption, photo))


def _blank_cases(captioner: Captioner, novelty: Novelty | None) -> list[Case]:
    """Captions of pictures that show nothing. Empty if the model cannot look at pictures, e.g. for want of a bridge."""
    if captioner.extractors is None:
        return []
    try:
        for view in captioner.views:
            captioner.extractors.extractor(view)
    except (ViewError, CheckpointError):
        return []
    cases = []
    pictures = blank_pictures(BLANKS)
    for start in range(0, len(pictures), 8):
        extracted = captioner.extract(pictures[start : start + 8])
        captions = captioner.caption_extracted(extracted)
        for row, caption in enumerate(captions):
            views = {name: views[row] for name, views in extracted.items()}
            unused = dict.fromkeys(range(len(caption.words)), False)
            cases.append(_case(captioner, caption, views, novelty, unused))
    return cases


def _case(
    captioner: Captioner,
    caption: Caption,
    views: Mapping[str, PhotoView],
    novelty: Novelty | None,
    used: Mapping[int, bool],
) -> Case:
    sentences: Sequence[str] = ()
    for name in views_that_give("sentences", views)[:1]:
        sentences = views[name].labels or ()
    [agreement] = agreements_of([caption], sentences, captioner.vocabulary, captioner.config.decode)
    unlike = None
    if novelty is not None and len(views[novelty.view].tokens):
        unlike = novelty(_summary(views[novelty.view]))
    return Case(caption, used, agreement, unlike)


def _above_median(photos: Sequence[Photo], captions: Mapping[str, Caption]) -> NDArray[np.bool_]:
    """Whether the CIDEr of each caption is above the median."""
    cider = Cider([[" ".join(tokenize(text)).split() for text in photo.captions] for photo in photos])
    said = [" ".join(tokenize(captions[photo.id].text)).split() for photo in photos]
    scores = cider.score(np.arange(len(photos)), said)
    return np.asarray(scores > np.median(scores))
