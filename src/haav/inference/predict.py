"""Run a model over stored views: captions for scoring, and calibration of their confidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch.nn import functional as F

from haav.config import ConfidenceConfig
from haav.data.annotations import Photo
from haav.data.loader import ShuffledBatches, StoredPhotos, build_loader
from haav.errors import ConfigError, DataError, unknown
from haav.evaluate.ptb import tokenize
from haav.inference.captioner import Captioner
from haav.inference.confidence import confidences, fit, reliability
from haav.inference.options import CaptionOptions
from haav.store import Store
from haav.store.shards import ShardStore
from haav.types import Batch, Caption, Progress, quiet
from haav.views import views_that_give


def predict(
    captioner: Captioner,
    store: Store | ShardStore,
    photos: Sequence[Photo],
    batch: int = 50,
    progress: Progress = quiet,
    seed: int | None = None,
) -> Iterator[tuple[str, Caption]]:
    """Yield (photo, caption) from stored views, in order, or in the order of the shards. `seed`: of samples"""
    if batch < 1:
        raise ConfigError(f"a batch has at least 1 photo, not {batch}.")
    if isinstance(store, ShardStore):
        by_id = {photo.id: photo for photo in photos}
        photos = [by_id[photo] for photo in store.in_order(by_id)]
    stored = StoredPhotos(store, captioner.views, photos, vocabulary=None, made_by=captioner.config.made_by)
    loader = build_loader(stored, ShuffledBatches(len(stored), batch, shuffle=False), workers=0)

    def work(part: Batch, seed: int | None) -> list[tuple[str, Caption]]:
        return list(zip(part.ids, captioner.caption_views(part.views, seed=seed), strict=True))

    done = 0
    for captions in captioner.side_by_side(work, loader, CaptionOptions(seed=seed)):
        yield from captions
        done += len(captions)
        progress(done, len(stored))


BASELINES = ("nearest", "consensus")


def sentence_view(store: Store | ShardStore) -> str:
    """The view with retrieved sentences that has the fewest crops: the whole photo, if there is such a view"""
    manifests = store.views
    names = views_that_give("sentences", sorted(manifests))
    if not names:
        raise ConfigError(f"{store.path} has no view to take sentences from, such as text_whole.")
    return min(names, key=lambda name: manifests[name].spec.indices.get("crop", 1))


def retrieved(store: Store | ShardStore, photos: Sequence[Photo], baseline: str) -> Iterator[tuple[str, str]]:
    """Retrieval baselines without a captioning model, as (photo, sentence).

    "nearest" is the nearest sentence. "consensus" is the retrieved sentence that is most similar to all the others.
    """
    if baseline not in BASELINES:
        raise ConfigError(unknown("baseline", baseline, BASELINES))
    name = sentence_view(store)
    for photo in photos:
        (view,) = store.get_many(name, [photo.id])
        if not view.labels:
            raise DataError(f"{store.path} has no sentences of {photo.id}: its {name} was imported without them.")
        alike = F.normalize(view.tokens.float(), dim=1) @ F.normalize(view.tokens.float(), dim=1).T
        yield photo.id, view.labels[0 if baseline == "nearest" else int(alike.sum(dim=1).argmax())]


def calibrate(captions: Mapping[str, Caption], photos: Sequence[Photo]) -> tuple[ConfidenceConfig, dict[str, float]]:
    """Fit confidence to whether people used the word for the same photo. The error is measured on held-out photos."""
    words: list[tuple[int, float, bool]] = []
    for index, photo in enumerate(photos):
        used = {token for text in photo.captions for token in tokenize(text)}
        if used:
            said = captions[photo.id].words
            known = [(word.logprob, tokenize(word.text)) for word in said]
            words += [(index % 2, logprob, used.issuperset(tokens)) for logprob, tokens in known if tokens]
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
