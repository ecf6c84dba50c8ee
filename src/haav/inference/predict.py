"""Run a model over stored views, and baselines that only retrieve sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.nn import functional as F

from haav.data.annotations import Photo
from haav.data.loader import ShuffledBatches, StoredPhotos, build_loader
from haav.errors import ConfigError, DataError, unknown
from haav.inference.captioner import Captioner
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
