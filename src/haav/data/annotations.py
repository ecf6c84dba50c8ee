"""Reads photos, splits and captions from common annotation formats."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from haav.data.dataset import SPLITS, Dataset, Photo, columns
from haav.data.mapped import ARROW, MappedPhotos
from haav.errors import DataError, unknown
from haav.files import read_text
from haav.photos.sources import SUFFIXES

__all__ = ["SPLITS", "Dataset", "Photo", "check_dataset", "load_dataset"]
MAX_BYTES = 2_000_000_000
HUMAN = "human"
"""`by` of a caption that a person wrote; any other name is that of a captioning system"""


def load_dataset(path: str | Path, split: str = "train") -> Dataset:
    """Karpathy JSON, COCO captions JSON, JSON `{image: [captions]}`, CSV or JSONL with `image, caption[, split][, by]`,
    a folder with captions.txt, or the `.arrow` file that `convert` makes of one of these.

    The photos of an `.arrow` file are read when they are asked for, those of other files at once. `split` is the split
    of photos in formats without splits. Text files may be gzipped (`.gz`). A data set without a photo is
    an error.
    """
    path = Path(path)
    dataset = _load(path, split)
    if not dataset.photos:
        raise DataError(f"{path} names no photo. Was it written completely?")
    return dataset


def _load(path: Path, split: str) -> Dataset:
    if path.is_dir():
        return _folder(path, split)
    if path.suffix == ARROW:
        return Dataset(MappedPhotos(path))
    name = path.name.removesuffix(".gz")
    text = read_text(path, MAX_BYTES)
    if not text.strip():
        raise DataError(f"{path} is empty. Was it written completely?")
    try:
        if name.endswith(".csv"):
            rows: Iterable[Any] = csv.DictReader(io.StringIO(text))
            return _table(rows, path, split)
        if name.endswith(".jsonl"):
            return _table([parse_json(line) for line in text.split("\n") if line.strip()], path, split)
        data = parse_json(text)
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{path} is not whole {name.rsplit('.')[-1].upper()}: {error}.") from None
    if isinstance(data, dict) and isinstance(data.get("annotations"), list):
        return _coco(data, path, split)
    if isinstance(data, dict) and isinstance(data.get("images"), list):
        if any(isinstance(image, dict) and "file_name" in image for image in data["images"][:1]):
            return _coco({**data, "annotations": []}, path, split)  # a test set: photos without captions
        return _karpathy(data, path)
    if isinstance(data, dict) and all(isinstance(texts, list) for texts in data.values()):
        rows = [
            {"image": name, "caption": text.get("caption") if isinstance(text, dict) else text}
            for name, texts in data.items()
            for text in texts or [""]
        ]
        return _table(rows, path, split)
    raise DataError(
        f"{path} is neither Karpathy's JSON ('images' with 'sentences') nor COCO's ('annotations') "
        "nor {image: [captions]}."
    )


@dataclass
class Captions:
    """The captions of a photo, by author."""

    human: list[str] = field(default_factory=list)
    machine: list[str] = field(default_factory=list)

    def add(self, text: str, author: object) -> None:
        """`author`: what the file says in `by`. Only "human", or nothing at all, means a person.

        A blank text is no caption.
        """
        if text.strip():
            (self.human if author in (None, "", HUMAN) else self.machine).append(text.strip())


def _karpathy(data: dict[str, Any], path: Path) -> Dataset:
    photos = []
    for index, image in enumerate(data["images"]):
        try:
            name = image["filename"]
            split = "train" if image["split"] == "restval" else image["split"]
            captions = Captions()
            for sentence in image.get("sentences") or ():
                captions.add(sentence["raw"], sentence.get("by"))
            coco_id = image.get("cocoid")
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: image {index} lacks {error}.") from None
        coco_id = coco_id if isinstance(coco_id, int) else None
        human, machine = tuple(captions.human), tuple(captions.machine)
        photos.append(Photo(str(name), _split(str(split), path), human, coco_id, machine))
    return _unique(photos, path)


def _coco(data: dict[str, Any], path: Path, split: str) -> Dataset:
    try:
        names = {image["id"]: str(image["file_name"]) for image in data["images"]}
        captions = {name: Captions() for name in names.values()}
        for annotation in data["annotations"]:
            captions[names[annotation["image_id"]]].add(annotation["caption"], HUMAN)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not COCO captions JSON: {error} is missing.") from None
    coco_ids = {name: coco_id for coco_id, name in names.items()}
    split = _split(split, path)
    return _unique([Photo(name, split, tuple(texts.human), coco_ids[name]) for name, texts in captions.items()], path)


@dataclass(frozen=True)
class Row:
    """A row of a table, checked"""

    image: str
    split: str
    caption: str
    author: object


def checked_rows(rows: Iterable[Any], path: Path, split: str) -> Iterator[Row]:
    for index, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not row.get("image"):
            columns = sorted(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f"{path}: row {index} has no 'image' (it has {columns}). Columns: image, caption[, split][, by]."
            )
        image = str(row["image"])
        row_split = _split(str(row.get("split") or split), path)
        caption = row.get("caption")
        if not isinstance(caption, (str, type(None))):
            raise DataError(f"{path}: row {index} ('{image}') must have a text as caption, not {str(caption)[:60]}.")
        yield Row(image, row_split, caption or "", row.get("by"))


def photo_of(rows: Sequence[Row], path: Path) -> Photo:
    """The photo that all of the rows are of"""
    first, captions = rows[0], Captions()
    for row in rows:
        if row.split != first.split:
            raise DataError(f"{path}: '{first.image}' is in two splits, {first.split} and {row.split}.")
        captions.add(row.caption, row.author)
    return Photo(first.image, first.split, tuple(captions.human), machine_captions=tuple(captions.machine))


def _table(rows: Iterable[Any], path: Path, split: str) -> Dataset:
    of_photo: dict[str, list[Row]] = {}
    for row in checked_rows(rows, path, split):
        of_photo.setdefault(row.image, []).append(row)
    return Dataset(tuple(photo_of(rows, path) for rows in of_photo.values()))


def _folder(path: Path, split: str) -> Dataset:
    """captions.txt has `name<TAB>caption`, `name,caption` or Flickr's `name#0<TAB>caption`.

    Pictures that it does not list are unlabelled.
    """
    pictures = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES)
    captions = {file.relative_to(path).as_posix(): Captions() for file in pictures}
    for line_number, line in enumerate(read_text(path / "captions.txt", MAX_BYTES).splitlines(), 1):
        if not line.strip() or line.lower().replace(" ", "") == "image,caption":
            continue
        image, separator, caption = line.partition("\t" if "\t" in line else ",")
        image = image.split("#")[0].strip()
        if not separator or image not in captions:
            raise DataError(
                f"{path / 'captions.txt'}: line {line_number} names no picture of the folder: '{line[:60]}'."
            )
        captions[image].add(caption, HUMAN)
    return Dataset(tuple(Photo(image, split, tuple(texts.human)) for image, texts in captions.items()))


def _unique(photos: Sequence[Photo], path: Path) -> Dataset:
    """Merges a photo listed twice in one split. A photo in two splits is an error: scores would mean nothing."""
    merged: dict[str, Photo] = {}
    for photo in photos:
        known = merged.get(photo.id)
        if known is not None and known.split != photo.split:
            raise DataError(f"{path}: '{photo.id}' is in two splits, {known.split} and {photo.split}.")
        if known is not None:
            photo = replace(
                photo,
                captions=known.captions + photo.captions,
                machine_captions=known.machine_captions + photo.machine_captions,
            )
        merged[photo.id] = photo
    return Dataset(tuple(merged.values()))


def _split(name: str, path: Path) -> str:
    if name not in SPLITS:
        raise DataError(f"{path}: " + unknown("split", name, SPLITS))
    return name


def parse_json(text: str) -> Any:
    """Parses JSON. A repeated key is an error: its second value would silently win."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        merged = dict(pairs)
        if len(merged) < len(pairs):
            repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ValueError(f"'{repeated}' stands there more than once")
        return merged

    return json.loads(text, object_pairs_hook=unique)


@dataclass(frozen=True)
class Check:
    """What `haav dataset` reports."""

    photos: dict[str, int]
    captions: dict[str, int]
    captions_per_photo: dict[int, int]
    machine_captions: int
    """captions by captioning systems, which are counted nowhere else"""
    unlabelled: int
    missing: tuple[str, ...]
    """named by the annotations, not found among the pictures"""
    surplus: int
    """pictures that no annotation names"""
    duplicates: tuple[tuple[str, str], ...]
    """pairs of names with the same bytes"""
    shared: tuple[tuple[str, str], ...]
    """those of the pairs whose splits differ, which is an error"""


def check_dataset(dataset: Dataset, pictures: dict[str, str] | None = None) -> Check:
    """`pictures`: name → digest of the bytes, if the pictures are available"""
    splits = {photo.id: photo.split for photo in dataset.photos} if pictures is not None else {}
    missing: tuple[str, ...] = ()
    duplicates: list[tuple[str, str]] = []
    surplus = 0
    if pictures is not None:
        missing = tuple(name for name in splits if name not in pictures)
        surplus = sum(name not in splits for name in pictures)
        first: dict[str, str] = {}
        for name in (name for name in pictures if name in splits):
            other = first.setdefault(pictures[name], name)
            if other != name:
                duplicates.append((other, name))
    facts = columns(dataset.photos)
    by_split = {name: facts.captions[facts.rows(name)] for name in SPLITS}
    numbers, counts = np.unique(facts.captions, return_counts=True)
    return Check(
        photos={name: len(own) for name, own in by_split.items() if len(own)},
        captions={name: int(own.sum()) for name, own in by_split.items() if own.any()},
        captions_per_photo=dict(zip(numbers.tolist(), counts.tolist(), strict=True)),
        machine_captions=int(facts.machine_captions.sum()),
        unlabelled=int((facts.captions == 0).sum()),
        missing=missing,
        surplus=surplus,
        duplicates=tuple(duplicates),
        shared=tuple((a, b) for a, b in duplicates if splits[a] != splits[b]),
    )
