"""A model over stored photos: captions for scoring, and how sure to be of their words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from haav.calibrate import confidences, fit, reliability
from haav.captioner import Captioner
from haav.config import ConfidenceConfig
from haav.data.annotations import Photo
from haav.data.loader import ShuffledBatches, StoredPhotos, build_loader
from haav.errors import DataError
from haav.evaluate.ptb import tokenize
from haav.store import Store
from haav.types import Caption, Progress, quiet


def predict(
    captioner: Captioner, store: Store, photos: Sequence[Photo], batch: int = 50, progress: Progress = quiet
) -> Iterator[tuple[str, Caption]]:
    """Photo and caption, in order; the views are read from the store."""
    stored = StoredPhotos(store, captioner.views, photos, vocabulary=None)
    done = 0
    for part in build_loader(stored, ShuffledBatches(len(stored), batch, shuffle=False), workers=0):
        yield from zip(part.ids, captioner.caption_views(part.views), strict=True)
        done += len(part.ids)
        progress(done, len(stored))


def calibrate(captions: Mapping[str, Caption], photos: Sequence[Photo]) -> tuple[ConfidenceConfig, dict[str, float]]:
    """Fit confidence to whether people used the word of the same photo; the error is that of photos not fitted to."""
    words: list[tuple[int, float, bool]] = []
    for number, photo in enumerate(photos):
        used = {token for text in photo.captions for token in tokenize(text)}
        if used:
            said = captions[photo.id].words
            words += [(number % 2, word.logprob, used.issuperset(tokenize(word.text))) for word in said]
    if not words:
        raise DataError("nothing to calibrate on: no photo has both a caption and references.")
    half, logprobs, hits = (np.array(column) for column in zip(*words, strict=True))
    before, errors = [], []
    for held_out in (0, 1):
        test, rest = half == held_out, half != held_out
        settings = fit(logprobs[rest], hits[rest]) if rest.any() else ConfidenceConfig()
        before.append(reliability(np.exp(logprobs[test]), hits[test])[0])
        errors.append(reliability(confidences(logprobs[test], settings), hits[test])[0])
    return fit(logprobs, hits), {
        "words": len(words),
        "used by people": float(hits.mean()),
        "calibration error of the probabilities": float(np.mean(before)),
        "calibration error of the confidence": float(np.mean(errors)),
    }


def with_confidence(captioner: Captioner, settings: ConfidenceConfig) -> Captioner:
    return Captioner(captioner.model, replace(captioner.config, confidence=settings), captioner.vocabulary)
