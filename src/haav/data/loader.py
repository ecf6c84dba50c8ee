"""Batches of stored views, read ahead by worker processes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from haav.data.collate import collate
from haav.data.dataset import Photo, ids_of, take
from haav.errors import StoreError
from haav.provenance import MadeBy, check_made_by
from haav.store import Store
from haav.store.shards import WINDOW, ShardStore
from haav.text import Vocabulary
from haav.types import Batch


class StoredPhotos(torch.utils.data.Dataset[Any]):
    """Photos with their views in a store and their captions as word ids. An item is a whole batch.

    What a batch needs is read when it is fetched, so that the photos need not be in memory.
    """

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
        self.photos = photos
        self.vocabulary, self.max_words = vocabulary, max_words
        self.weights = weights
        self.groups: list[NDArray[np.unsignedinteger]] | None = None
        """rows of each shard, if the store has shards"""
        self._check_views()
        manifests = store.views
        fingerprints = {view: manifests[view].made_by for view in self.views if view in manifests}
        check_made_by(made_by or {}, fingerprints, f"that of {store.path}")

    def __len__(self) -> int:
        return len(self.photos)

    def __getstate__(self) -> dict[str, Any]:
        """A worker process is told the rows of its batches."""
        return self.__dict__ | {"groups": None}

    @property
    def ids(self) -> Iterator[str]:
        return ids_of(self.photos)

    def shuffled(self, batch: int, seed: int, readers: int = 1) -> ShuffledBatches | ShardedBatches:
        """Shuffled full batches of all photos, in an order that suits the store."""
        if self.groups is None:
            return ShuffledBatches(len(self), batch, seed, drop_last=True)
        return ShardedBatches(self.groups, batch, seed, readers, WINDOW)

    def __getitem__(self, rows: Sequence[int]) -> Batch:
        photos = take(self.photos, rows)
        ids = [photo.id for photo in photos]
        return collate(
            ids,
            {view: self.store.get_many(view, ids) for view in self.views},
            None if self.vocabulary is None else [self._encode(photo, self.vocabulary) for photo in photos],
            weights=None if self.weights is None else [self.weights[row] for row in rows],
        )

    def _encode(self, photo: Photo, vocabulary: Vocabulary) -> list[list[int]]:
        """Captions as <bos>, at most `max_words` words, and <eos> only where the caption was not cut"""
        return [vocabulary.encode(text)[: self.max_words + 2] for text in photo.captions]

    def _check_views(self) -> None:
        """Find the photos in the store. It is an error if a view of one is missing."""
        store = self.store
        if isinstance(store, ShardStore):
            self.groups = store.groups(self.ids)
            if sum(map(len, self.groups)) == len(self) and all(view in store.views for view in self.views):
                return
        for view in self.views:
            missing = store.missing(view, self.ids)
            if missing:
                raise StoreError(
                    f"view '{view}' is missing for {len(missing):,} of {len(self):,} photos (first: {missing[0]}).\n"
                    f"  Finish it with: haav extract --store {store.path} --views {view} --images …"
                )


class ShuffledBatches(Sampler[list[int]]):
    """Batches of row indices, reshuffled every epoch. The order depends only on the seed and the epoch."""

    def __init__(self, size: int, batch: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False) -> None:
        self.size, self.batch, self.seed, self.shuffle, self.drop_last = size, batch, seed, shuffle, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = array("I" if self.size < 1 << 32 else "Q", range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}-{self.epoch}").shuffle(order)
        for step in range(len(self)):
            yield order[step * self.batch : (step + 1) * self.batch].tolist()


class ShardedBatches(Sampler[list[int]]):
    """Batches of row indices for photos in shards. Shards come in random order; the photos of a few are mixed.

    Each of `readers` processes has its own shards, so that no shard is read twice. A batch consists of one consecutive
    part per reader, cut as `distributed.share` cuts it.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int] | NDArray[np.unsignedinteger]],
        batch: int,
        seed: int,
        readers: int,
        window: int,
    ) -> None:
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

    def _mixed(self, shards: Sequence[Sequence[int] | NDArray[np.unsignedinteger]], rng: random.Random) -> array[int]:
        order = array("I" if sum(map(len, self.groups)) < 1 << 32 else "Q")
        for start in range(0, len(shards), self.window):
            rows = np.concatenate(shards[start : start + self.window]).tolist()
            rng.shuffle(rows)
            order.extend(rows)
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
