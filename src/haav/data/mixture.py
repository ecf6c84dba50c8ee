"""Several data sets as one training set: captions by people or by captioning systems, photos without captions, and
data that a model knows already.

A setting like `coco.json.gz,more.json.gz:machine:0.5,flickr.json.gz:photos` names data sets with their roles and
weights. A photo named by several of them is one photo with the captions of all. The photos of one data set are read
when they are asked for. Those of several are merged in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from haav.data.annotations import load_dataset
from haav.data.dataset import Dataset, Photo, PhotoRows, columns
from haav.errors import ConfigError, DataError, unknown

ROLES = ("human", "machine", "photos", "base")


@dataclass(frozen=True)
class Source:
    """A data set and how it is used."""

    path: str
    role: str = "human"
    """human: its captions by people; machine: its captions by captioning systems (all of its captions if it names no
    author); photos: no captions; base: captions by people that the model to start from knows already"""
    weight: float = 1.0
    """of its captions in the cross-entropy"""


@dataclass(frozen=True)
class Mixture:
    train: Sequence[Photo]
    """photos with captions of any author, in `captions`"""
    weights: Sequence[tuple[float, ...]] | None
    """of the captions of each photo of `train`; None: 1 each"""
    by_people: Sequence[Photo]
    """photos of `train` that people have captioned, with those captions: the vocabulary and rewards come from these"""
    unlabelled: Sequence[Photo]
    """training photos without captions"""
    val: Sequence[Photo]
    """val photos with captions by people"""
    base: Sequence[Photo] = ()
    """training photos that the model to start from knows, used to keep it from forgetting"""

    @property
    def references(self) -> dict[str, tuple[str, ...]]:
        """Captions by people of the photos of `train`, in memory"""
        return {photo.id: photo.captions for photo in self.by_people}

    @property
    def sentences(self) -> Iterator[str]:
        """Captions that the vocabulary is made of: those by people, or all if there are none by people."""
        return (text for photo in self.by_people or self.train for text in photo.captions)

    def with_references_only(self) -> Mixture:
        """The photos that people have captioned, with those captions only. The others become unlabelled."""
        if self.by_people is self.train:
            return replace(self, weights=None)
        references = self.references
        others = (Photo(photo.id, "train") for photo in self.train if photo.id not in references)
        known = tuple(Photo(photo.id, "train", references[photo.id]) for photo in self.train if photo.id in references)
        return replace(self, train=known, weights=None, unlabelled=(*self.unlabelled, *others))


class SameWeight(Sequence[tuple[float, ...]]):
    """One weight for all captions of the photos."""

    def __init__(self, photos: Sequence[Photo], weight: float) -> None:
        self.photos, self.weight = photos, weight

    def __len__(self) -> int:
        return len(self.photos)

    @overload
    def __getitem__(self, key: int) -> tuple[float, ...]: ...
    @overload
    def __getitem__(self, key: slice) -> SameWeight: ...
    def __getitem__(self, key: int | slice) -> tuple[float, ...] | SameWeight:
        if isinstance(key, slice):
            return SameWeight(self.photos[key], self.weight)
        return (self.weight,) * len(self.photos[key].captions)

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        return ((self.weight,) * len(photo.captions) for photo in self.photos)


def parse_sources(text: str) -> tuple[Source, ...]:
    """PATH[:ROLE[:WEIGHT]], several with commas."""
    return tuple(_parse_source(item.strip()) for item in text.split(",") if item.strip())


def _parse_source(item: str) -> Source:
    path, *rest = item.split(":")
    if len(rest) > 2 or not path:
        raise ConfigError(f"data.dataset takes PATH[:ROLE[:WEIGHT]], several with commas, not '{item}'.")
    role = rest[0] if rest else "human"
    if role not in ROLES:
        raise ConfigError(f"data.dataset '{item}': " + unknown("role", role, ROLES))
    try:
        weight = float(rest[1]) if len(rest) == 2 else 1.0
    except ValueError:
        weight = -1.0
    if not 0 < weight <= 1000:
        raise ConfigError(f"data.dataset '{item}': a weight is a number above 0 and at most 1000, not '{rest[1]}'.")
    if role == "base" and len(rest) == 2:
        raise ConfigError(f"data.dataset '{item}': base data has no weight. Use --train.keep_weight.")
    return Source(path, role, weight)


def load_mixture(
    sources: Sequence[Source], label_fraction: float = 1.0, label_by: str = "photo", seed: int = 0
) -> Mixture:
    """`label_fraction`, `label_by`, `seed`: the share of labels that is kept in each data set with human captions"""

    def load(source: Source) -> Dataset:
        dataset = load_dataset(source.path)
        return dataset.label_fraction(label_fraction, label_by, seed) if source.role == "human" else dataset

    return choose(sources[0], load(sources[0])) if len(sources) == 1 else merge(sources, map(load, sources))


def choose(source: Source, dataset: Dataset) -> Mixture:
    """The photos of one data set, read when they are asked for"""
    photos, facts = dataset.photos, columns(dataset.photos)

    if source.role == "base":
        return Mixture((), None, (), (), (), PhotoRows(photos, facts.rows("train", facts.captions)))
    if source.role == "photos":
        return Mixture((), None, (), PhotoRows(photos, facts.rows("train"), _bare), ())
    by_system = source.role == "machine" and dataset.names_machines
    labelled = facts.machine_captions if by_system else facts.captions
    train = PhotoRows(photos, facts.rows("train", labelled), _by_system if by_system else _by_people)
    weights = SameWeight(train, source.weight) if source.weight != 1 and train else None
    unlabelled = PhotoRows(photos, facts.rows("train", labelled, empty=True), _bare)
    if source.role == "machine":
        return Mixture(train, weights, (), unlabelled, ())
    return Mixture(train, weights, train, unlabelled, PhotoRows(photos, facts.rows("val", facts.captions)))


def _bare(photo: Photo) -> Photo:
    return Photo(photo.id, photo.split)


def _by_people(photo: Photo) -> Photo:
    return Photo(photo.id, photo.split, photo.captions)


def _by_system(photo: Photo) -> Photo:
    return Photo(photo.id, photo.split, photo.machine_captions)


def merge(sources: Sequence[Source], datasets: Iterable[Dataset]) -> Mixture:
    """The photos of several data sets, in memory"""
    splits: dict[str, str] = {}
    captions: dict[str, list[str]] = {}
    weights: dict[str, list[float]] = {}
    references: dict[str, tuple[str, ...]] = {}
    val: dict[str, Photo] = {}
    base: dict[str, Photo] = {}
    for source, dataset in zip(sources, datasets, strict=True):
        for photo in dataset.photos:
            if splits.setdefault(photo.id, photo.split) != photo.split:
                raise DataError(
                    f"'{photo.id}' is in split {splits[photo.id]} of one data set and in {photo.split} of "
                    f"{Path(source.path).name}."
                )
            if source.role == "base":
                if photo.split == "train" and photo.captions:
                    base[photo.id] = photo
                continue
            if photo.split == "val" and source.role == "human" and photo.captions:
                val[photo.id] = photo
            if photo.split != "train":
                continue
            texts = _texts(photo, source, dataset)
            captions.setdefault(photo.id, []).extend(texts)
            weights.setdefault(photo.id, []).extend([source.weight] * len(texts))
            if source.role == "human" and texts:
                references[photo.id] = references.get(photo.id, ()) + texts
    train = tuple(Photo(name, "train", tuple(texts)) for name, texts in captions.items() if texts)
    uneven = any(weight != 1 for row in weights.values() for weight in row)
    return Mixture(
        train,
        tuple(tuple(weights[photo.id]) for photo in train) if uneven else None,
        tuple(Photo(name, "train", texts) for name, texts in references.items()),
        tuple(Photo(name, "train") for name, texts in captions.items() if not texts),
        tuple(val.values()),
        tuple(base.values()),
    )


def _texts(photo: Photo, source: Source, dataset: Dataset) -> tuple[str, ...]:
    if source.role == "photos":
        return ()
    if source.role == "human":
        return photo.captions
    return photo.machine_captions if dataset.names_machines else photo.captions
