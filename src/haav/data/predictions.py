"""Captions that a model wrote: files of them, and which photo of a data set each is of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from haav.data.annotations import MAX_BYTES, Photo, load_dataset, parse_json
from haav.errors import ConfigError, DataError, unknown
from haav.files import read_text, write_atomically

FORMATS = ("coco", "coco-server")


def load_predictions(path: str | Path) -> dict[str, str]:
    """COCO results `[{"image_id", "caption"}]`, the same as JSONL, or `{id: caption}`; `.gz` is fine."""
    path = Path(path)
    text = read_text(path, MAX_BYTES)
    try:
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            data: Any = [parse_json(line) for line in text.split("\n") if line.strip()]
        else:
            data = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not whole JSON: {error}.") from None
    if isinstance(data, dict):
        data = [{"image_id": name, "caption": caption} for name, caption in data.items()]
    if not isinstance(data, list):
        raise DataError(f'{path} must be a list of {{"image_id": …, "caption": …}} or {{id: caption}}.')
    captions: dict[str, str] = {}
    for number, row in enumerate(data, 1):
        name = (
            next((row[key] for key in ("image_id", "image", "id") if key in row), None)
            if isinstance(row, dict)
            else None
        )
        if not isinstance(name, (str, int)) or isinstance(name, bool) or not isinstance(row.get("caption"), str):
            raise DataError(f"{path}: entry {number} must have 'image_id' and a text 'caption', not {_short(row)}.")
        if str(name) in captions:
            raise DataError(f"{path}: '{name}' has more than one caption.")
        captions[str(name)] = row["caption"]
    return captions


def load_references(path: str | Path, split: str | None = None) -> tuple[Photo, ...]:
    """The photos of a split; a file with one split needs no name for it."""
    dataset = load_dataset(path, split or "train")
    splits = sorted({photo.split for photo in dataset.photos})
    if split is None and len(splits) > 1:
        raise ConfigError(f"{path} has the splits {', '.join(splits)}: say which with --split.")
    photos = dataset.photos if split is None else dataset.split(split)
    if not photos:
        where = f" in split '{split}', only in: {', '.join(splits)}" if split and splits else ""
        raise DataError(f"{path} has no photos{where}.")
    return photos


def load_objects(path: str | Path, photos: Sequence[Photo]) -> dict[str, tuple[str, ...]]:
    """`{id: [names]}`; a photo that is not named has none"""
    try:
        data = parse_json(read_text(Path(path), MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not whole JSON: {error}.") from None
    if not isinstance(data, dict) or not all(isinstance(names, list) for names in data.values()):
        raise DataError(f"{path} must be {{id: [names of what is in the photo]}}.")
    known = _by_id(data, photos)
    found = {known[name]: tuple(map(str, names)) for name, names in data.items() if name in known}
    if not found:
        raise DataError(f"{path} names none of the {len(photos):,} photos (first of its names: {_first(data)}).")
    return found


def save_predictions(path: str | Path, captions: Mapping[str, str], names: Mapping[str, str | int]) -> None:
    """COCO results, each photo under its name of `names`"""
    rows = [{"image_id": names[photo], "caption": caption} for photo, caption in captions.items()]
    write_atomically(Path(path), lambda file: file.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8"))


def names_for(form: str, photos: Sequence[Photo]) -> dict[str, str | int]:
    """What photos are called in a file: by `coco` their own names, by `coco-server` COCO's numbers"""
    if form not in FORMATS:
        raise ConfigError(unknown("format", form, FORMATS))
    if form == "coco":
        return {photo.id: photo.id for photo in photos}
    numbers = {photo.id: _coco_number(photo) for photo in photos}
    nameless = [name for name, number in numbers.items() if number is None]
    if nameless:
        raise DataError(
            f"the MS-COCO server takes numbers; {len(nameless):,} photos have none (first: {_first(nameless)}).\n"
            "  They come from 'cocoid' or 'id' of the annotations, or from a name like COCO_val2014_000000391895.jpg."
        )
    if len(set(numbers.values())) < len(numbers):
        raise DataError("two photos have the same number; the MS-COCO server takes one caption a number.")
    return {name: number for name, number in numbers.items() if number is not None}


def match(captions: Mapping[str, str], photos: Sequence[Photo]) -> dict[str, str]:
    """Captions by the photos' own ids, in the photos' order. Ids may be file names, with or without what follows the
    dot, or COCO's numbers; whichever fits most photos is meant. Missing and surplus ids are errors."""
    known = _by_id(captions, photos)
    surplus = [name for name in captions if name not in known]
    found = {known[name]: caption for name, caption in captions.items() if name in known}
    missing = [photo.id for photo in photos if photo.id not in found]
    problems = []
    if missing:
        problems.append(f"{len(missing):,} of {len(photos):,} photos have no caption (first: {_first(missing)})")
    if surplus:
        problems.append(f"{len(surplus):,} captions are of photos that have no references (first: {_first(surplus)})")
    if problems:
        raise DataError("; ".join(problems) + ".\n  Is it the right split? See --split.")
    return {photo.id: found[photo.id] for photo in photos}


def _by_id(given: Mapping[str, Any], photos: Sequence[Photo]) -> dict[str, str]:
    """The way of naming photos that most of the given names fit → the photos' own ids"""
    kinds = [
        {photo.id: photo.id for photo in photos},
        {str(photo.coco_id): photo.id for photo in photos if photo.coco_id is not None},
        {PurePath(photo.id).stem: photo.id for photo in photos},
        {str(number): photo.id for photo in photos if (number := _coco_number(photo)) is not None},
    ]
    clear = [kind for kind in kinds if len(kind) == len(photos)]  # a way that gives two photos one name is none
    return max(clear, key=lambda kind: len(kind.keys() & given.keys()))


def _coco_number(photo: Photo) -> int | None:
    """From the annotations, else from a name in COCO's own style"""
    if photo.coco_id is not None:
        return photo.coco_id
    named = re.fullmatch(r"(?:COCO_\w+_)?0*(\d{1,12})", PurePath(photo.id).stem)
    return int(named[1]) if named else None


def _first(names: Iterable[str], count: int = 3) -> str:
    return ", ".join(list(names)[:count])


def _short(row: Any) -> str:
    text = json.dumps(row, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
