"""Batches of stored views, read ahead by worker processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from haav.data.annotations import Photo
from haav.data.collate import collate
from haav.errors import StoreError
from haav.provenance import MadeBy, check_made_by
from haav.store import Store
from haav.store.shards import WINDOW, ShardStore
from haav.text import Vocabulary
from haav.types import Batch


class StoredPhotos(torch.utils.data.Dataset[Any]):
    """Photos with their views in a store and their captions as word ids. An item is a whole batch."""

    def __init__(
        self,
        store: Store | ShardStore,
        views: Sequence[str],
        photos: Sequence[Photo],
        vocabulary: Vocabulary | None,
        max_words: int = 20,
        made_by: MadeBy | None = None,
        weights: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """`vocabulary`: None leaves captions out; `made_by`: the extractors that the model accepts; `weights`: of the
        captions of each photo in the loss (default: 1 each)"""
        self.store = store
        self.views = tuple(views)
        self.photos = tuple(photos)
        self.ids = tuple(photo.id for photo in photos)
        self.vocabulary = vocabulary
        self.captions = None
        if vocabulary is not None:
            encoded = ([vocabulary.encode(text) for text in photo.captions] for photo in photos)
            # <bos>, at most `max_words` words, and <eos> only where the caption was not cut
            self.captions = [[words[: max_words + 2] for words in photo] for photo in encoded]
        self.weights = None if weights is None else tuple(weights)
        for view in self.views:
            missing = store.missing(view, self.ids)
            if missing:
                raise StoreError(
                    f"view '{view}' is missing for {len(missing):,} of {len(self.ids):,} photos "
                    f"(first: {missing[0]}).\n"
                    f"  Finish it with: haav extract --store {store.path} --views {view} --images …"
                )
        manifests = store.views
        fingerprints = {view: manifests[view].made_by for view in self.views if view in manifests}
        check_made_by(made_by or {}, fingerprints, f"that of {store.path}")

    def __len__(self) -> int:
        return len(self.photos)

    def shuffled(self, batch: int, seed: int, readers: int = 1) -> ShuffledBatches | ShardedBatches:
        """Shuffled full batches of all photos, in an order that suits the store."""
        if isinstance(self.store, Store):
            return ShuffledBatches(len(self), batch, seed, drop_last=True)
        rows = {photo: row for row, photo in enumerate(self.ids)}
        groups = [[rows[photo] for photo in shard if photo in rows] for shard in self.store.groups]
        return ShardedBatches([group for group in groups if group], batch, seed, readers, WINDOW)

    def __getitem__(self, rows: Sequence[int]) -> Batch:
        ids = [self.ids[row] for row in rows]
        views = {view: self.store.get_many(view, ids) for view in self.views}
        return collate(
            ids,
            views,
            None if self.captions is None else [self.captions[row] for row in rows],
            weights=None if self.weights is None else [self.weights[row] for row in rows],
        )


class ShuffledBatches(Sampler[list[int]]):
    """Batches of row indices, reshuffled every epoch. The order depends only on the seed and the epoch."""

    def __init__(self, size: int, batch: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False) -> None:
        self.size, self.batch, self.seed, self.shuffle, self.drop_last = size, batch, seed, shuffle, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}-{self.epoch}").shuffle(order)
        for step in range(len(self)):
            yield order[step * self.batch : (step + 1) * self.batch]


class ShardedBatches(Sampler[list[int]]):
    """Batches of row indices for photos in shards. Shards come in random order; the photos of a few are mixed.

    Each of `readers` processes has its own shards, so that no shard is read twice. A batch consists of one consecutive
    part per reader, cut as `distributed.share` cuts it.
    """

    def __init__(self, groups: Sequence[Sequence[int]], batch: int, seed: int, readers: int, window: int) -> None:
        """`groups`: the rows of each shard; `window`: the number of shards that are mixed"""
        if readers > len(groups):
            raise StoreError(f"{readers} processes need at least as many shards, and there are {len(groups)}.")
        self.groups, self.seed, self.window = groups, seed, window
        cuts = [batch * reader // readers for reader in range(readers + 1)]
        self.parts = [end - start for start, end in pairwise(cuts)]
        self.epoch = 0
        if not len(self):
            raise StoreError(
                f"{sum(map(len, groups))} photos in {len(groups)} shards are too few for a batch of {batch}."
            )

    def __len__(self) -> int:
        """Full batches per epoch. Readers get other shards every epoch, so this is the fewest that any could have."""
        fewest = sorted(len(group) for group in self.groups)[: len(self.groups) // len(self.parts)]
        return sum(fewest) // max(self.parts)

    def __iter__(self) -> Iterator[list[int]]:
        rng = random.Random(f"{self.seed}-{self.epoch}")
        shards = list(self.groups)
        rng.shuffle(shards)
        lanes = [self._mixed(shards[reader :: len(self.parts)], rng) for reader in range(len(self.parts))]
        for step in range(len(self)):
            yield [
                row
                for lane, part in zip(lanes, self.parts, strict=True)
                for row in lane[step * part : (step + 1) * part]
            ]

    def _mixed(self, shards: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
        order: list[int] = []
        for start in range(0, len(shards), self.window):
            rows = [row for shard in shards[start : start + self.window] for row in shard]
            rng.shuffle(rows)
            order += rows
        return order


def build_loader(
    photos: StoredPhotos, batches: Sampler[list[int]], workers: int = 1, pin: bool = torch.cuda.is_available()
) -> DataLoader[Any]:
    """Reads ahead in `workers` spawned processes (0: in this process). Memory is pinned if there is a GPU."""
    return DataLoader(
        photos,
        sampler=batches,  # each "sample" is a whole batch: one transaction, one collation
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        prefetch_factor=4 if workers else None,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # else every pass would draw from the global generator, whose state is resumed
        pin_memory=pin,
    )


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    captions = None if batch.captions is None else batch.captions.to(device, non_blocking=True)
    weights = None if batch.weights is None else batch.weights.to(device, non_blocking=True)
    return Batch(batch.ids, {name: view.to(device) for name, view in batch.views.items()}, captions, weights)
