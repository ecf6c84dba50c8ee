"""Photos with their captions, in memory or read when they are asked for."""

from __future__ import annotations

import random
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from haav.errors import ConfigError, unknown

SPLITS = ("train", "val", "test")
CHUNK = 4096
"""photos that are read at once when all are read"""
Rows = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Photo:
    id: str
    """the name under which its views are stored: a file name"""
    split: str
    captions: tuple[str, ...] = ()
    """by people; empty for an unlabelled photo"""
    coco_id: int | None = None
    """its number in COCO, if the file has it"""
    machine_captions: tuple[str, ...] = ()
    """by a captioning system (`by` in the file). Only training reads them, and only where it is told to."""


@dataclass(frozen=True)
class Columns:
    """What a choice of photos depends on, as arrays"""

    splits: NDArray[np.uint8]
    """places in `SPLITS`"""
    captions: NDArray[np.uint32]
    """numbers of captions by people"""
    machine_captions: NDArray[np.uint32]

    def rows(self, split: str, labelled: NDArray[np.uint32] | None = None, empty: bool = False) -> Rows:
        """Photos of a split, those with captions, or with `empty` those without. `labelled`: a column of captions"""
        chosen = self.splits == SPLITS.index(split)
        if labelled is not None:
            chosen &= (labelled == 0) if empty else (labelled > 0)
        return compact(np.flatnonzero(chosen))


class PhotoSequence(Sequence[Photo]):
    """Photos that are made when they are asked for."""

    @abstractmethod
    def take(self, rows: Rows) -> list[Photo]:
        """The photos of these rows, in this order"""

    def ids(self, rows: Rows) -> list[str]:
        return [photo.id for photo in self.take(rows)]

    def columns(self) -> Columns:
        return _columns(self)

    @overload
    def __getitem__(self, key: int) -> Photo: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Photo]: ...
    def __getitem__(self, key: int | slice) -> Photo | Sequence[Photo]:
        rows = range(len(self))[key]
        if isinstance(rows, range):
            return PhotoRows(self, compact(np.arange(rows.start, rows.stop, rows.step)))
        return self.take(np.array([rows]))[0]

    def __iter__(self) -> Iterator[Photo]:
        for rows in chunks(len(self)):
            yield from self.take(rows)

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same photos"""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class PhotoRows(PhotoSequence):
    """Some photos of a sequence, each as `change` has it."""

    def __init__(self, photos: Sequence[Photo], rows: Rows, change: Callable[[Photo], Photo] | None = None) -> None:
        """`change`: a function of a module, so that another process can be told; it leaves the id"""
        self.photos, self.rows, self.change = photos, rows, change

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Rows) -> list[Photo]:
        photos = take(self.photos, self.rows[rows])
        return photos if self.change is None else list(map(self.change, photos))

    def ids(self, rows: Rows) -> list[str]:
        if isinstance(self.photos, PhotoSequence):
            return self.photos.ids(self.rows[rows])
        return super().ids(rows)


class FewerCaptions(PhotoSequence):
    """Photos with some of the captions by people of the training photos."""

    def __init__(self, photos: Sequence[Photo], kept: NDArray[np.bool_], starts: NDArray[np.int64] | None) -> None:
        """`kept`: for each photo, or with `starts` for each caption; `starts`: of the captions of each photo"""
        self.photos, self.kept, self.starts = photos, kept, starts

    def __len__(self) -> int:
        return len(self.photos)

    def take(self, rows: Rows) -> list[Photo]:
        return [
            replace(photo, captions=self._captions(photo, row)) if photo.split == "train" else photo
            for photo, row in zip(take(self.photos, rows), rows.tolist(), strict=True)
        ]

    def _captions(self, photo: Photo, row: int) -> tuple[str, ...]:
        if self.starts is None:
            return photo.captions if self.kept[row] else ()
        start = self.starts[row]
        return tuple(text for index, text in enumerate(photo.captions) if self.kept[start + index])


@dataclass(frozen=True)
class Dataset:
    photos: Sequence[Photo]

    @cached_property
    def names_machines(self) -> bool:
        """Whether any of its captions names a captioning system as its author."""
        return bool(columns(self.photos).machine_captions.any())

    def split(self, name: str) -> Sequence[Photo]:
        if name not in SPLITS:
            raise ConfigError(unknown("split", name, SPLITS))
        if isinstance(self.photos, tuple):
            return tuple(photo for photo in self.photos if photo.split == name)
        return PhotoRows(self.photos, columns(self.photos).rows(name))

    def label_fraction(self, fraction: float, by: str = "photo", seed: int = 0) -> Dataset:
        """Keep the captions of a share of the training photos, or a share of the training captions. All photos stay.

        Fractions are nested: the captions kept for 0.1 are among those kept for 0.2.
        """
        if not 0 <= fraction <= 1:
            raise ConfigError(f"a label fraction is between 0 and 1, not {fraction}.")
        if by not in ("photo", "caption"):
            raise ConfigError(unknown("way to take a fraction", by, ("photo", "caption")))
        if fraction == 1:
            return self
        facts = columns(self.photos)
        labelled = facts.rows("train", facts.captions)
        names = PhotoRows(self.photos, labelled).ids(np.arange(len(labelled)))
        units, starts = array("Q"), None
        in_order = (labelled[place] for place in sorted(range(len(names)), key=names.__getitem__))
        if by == "photo":
            units.extend(map(int, in_order))
        else:
            starts = np.cumsum(facts.captions, dtype=np.int64) - facts.captions
            for row in in_order:
                units.extend(range(starts[row], starts[row] + int(facts.captions[row])))
        random.Random(seed).shuffle(units)
        kept = np.zeros(len(self.photos) if starts is None else int(facts.captions.sum()), bool)
        kept[np.array(units[: round(fraction * len(units))], np.int64)] = True
        fewer = FewerCaptions(self.photos, kept, starts)
        return Dataset(tuple(fewer) if isinstance(self.photos, tuple) else fewer)


def take(photos: Sequence[Photo], rows: Sequence[int] | Rows) -> list[Photo]:
    """The photos of these rows, in this order"""
    if isinstance(photos, PhotoSequence):
        return photos.take(np.asarray(rows, dtype=np.int64))
    return [photos[row] for row in rows]


def ids_of(photos: Sequence[Photo]) -> Iterator[str]:
    if not isinstance(photos, PhotoSequence):
        yield from (photo.id for photo in photos)
        return
    for rows in chunks(len(photos)):
        yield from photos.ids(rows)


def columns(photos: Sequence[Photo]) -> Columns:
    return photos.columns() if isinstance(photos, PhotoSequence) else _columns(photos)


def _columns(photos: Sequence[Photo]) -> Columns:
    splits, captions, machine = array("B"), array("I"), array("I")
    for photo in photos:
        splits.append(SPLITS.index(photo.split))
        captions.append(len(photo.captions))
        machine.append(len(photo.machine_captions))
    return Columns(np.array(splits, np.uint8), np.array(captions, np.uint32), np.array(machine, np.uint32))


def chunks(size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, size, CHUNK):
        yield np.arange(start, min(start + CHUNK, size))


def compact(rows: NDArray[np.int64]) -> Rows:
    """In as few bytes as they need"""
    return rows.astype(np.min_scalar_type(rows.max(initial=0)))
