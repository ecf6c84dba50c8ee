"""Several data sets as one training set: captions by people or by captioning systems, photos without captions, and
data that a model knows already.

A setting like `coco.json.gz,more.json.gz:machine:0.5,flickr.json.gz:photos` names data sets with their roles and
weights. A photo named by several of them is one photo with the captions of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from haav.data.annotations import Dataset, Photo, load_dataset
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
    train: tuple[Photo, ...]
    """photos with captions of any author, in `captions`"""
    weights: tuple[tuple[float, ...], ...] | None
    """of the captions of each photo of `train`; None: 1 each"""
    references: Mapping[str, tuple[str, ...]]
    """captions by people of the photos of `train`: the vocabulary and rewards come from these only"""
    unlabelled: tuple[Photo, ...]
    """training photos without captions"""
    val: tuple[Photo, ...]
    """val photos with captions by people"""
    base: tuple[Photo, ...] = ()
    """training photos that the model to start from knows, used to keep it from forgetting"""

    @property
    def sentences(self) -> Iterator[str]:
        """Captions that the vocabulary is made of: those by people, or all if there are none by people."""
        groups = self.references.values() if self.references else (photo.captions for photo in self.train)
        return chain.from_iterable(groups)

    def with_references_only(self) -> Mixture:
        """The photos that people have captioned, with those captions only. The others become unlabelled."""
        known = [photo for photo in self.train if photo.id in self.references]
        others = tuple(Photo(photo.id, "train") for photo in self.train if photo.id not in self.references)
        train = tuple(replace(photo, captions=self.references[photo.id]) for photo in known)
        return replace(self, train=train, weights=None, unlabelled=self.unlabelled + others)


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
    splits: dict[str, str] = {}
    captions: dict[str, list[str]] = {}
    weights: dict[str, list[float]] = {}
    references: dict[str, tuple[str, ...]] = {}
    val: dict[str, Photo] = {}
    base: dict[str, Photo] = {}
    for source in sources:
        dataset = load_dataset(source.path)
        if source.role == "human":
            dataset = dataset.label_fraction(label_fraction, label_by, seed)
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
        references,
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
