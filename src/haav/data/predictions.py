"""Reads and writes files of generated captions, and matches them to the photos of a data set."""

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
    for index, row in enumerate(data, 1):
        name = (
            next((row[key] for key in ("image_id", "image", "id") if key in row), None)
            if isinstance(row, dict)
            else None
        )
        if not isinstance(name, (str, int)) or isinstance(name, bool) or not isinstance(row.get("caption"), str):
            raise DataError(f"{path}: entry {index} must have 'image_id' and a text 'caption', not {_short(row)}.")
        if str(name) in captions:
            raise DataError(f"{path}: '{name}' has more than one caption.")
        captions[str(name)] = row["caption"]
    return captions


def load_references(path: str | Path, split: str | None = None) -> tuple[Photo, ...]:
    """The photos of a split. `split` may be omitted if the file has only one."""
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
    """Reads `{id: [names]}`. Photos that the file does not list are left out."""
    try:
        data = parse_json(read_text(Path(path), MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not whole JSON: {error}.") from None
    if not isinstance(data, dict) or not all(isinstance(names, list) for names in data.values()):
        raise DataError(f"{path} must be {{id: [names of what is in the photo]}}.")
    known = _by_id(data, photos)
    objects = {known[name]: tuple(map(str, names)) for name, names in data.items() if name in known}
    if not objects:
        raise DataError(f"{path} names none of the {len(photos):,} photos (first of its names: {_first(data)}).")
    return objects


def save_predictions(path: str | Path, captions: Mapping[str, str], names: Mapping[str, str | int]) -> None:
    """Writes COCO results. `names`: photo id → its name in the file."""
    rows = [{"image_id": names[photo], "caption": caption} for photo, caption in captions.items()]
    write_atomically(Path(path), lambda file: file.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8"))


def names_for(form: str, photos: Sequence[Photo]) -> dict[str, str | int]:
    """Photo id → its name in a file: with `coco` the id itself, with `coco-server` its coco_id in COCO."""
    if form not in FORMATS:
        raise ConfigError(unknown("format", form, FORMATS))
    if form == "coco":
        return {photo.id: photo.id for photo in photos}
    coco_ids = {photo.id: _coco_number(photo) for photo in photos}
    nameless = [name for name, coco_id in coco_ids.items() if coco_id is None]
    if nameless:
        raise DataError(
            f"the MS-COCO server takes numbers; {len(nameless):,} photos have none (first: {_first(nameless)}).\n"
            "  They come from 'cocoid' or 'id' of the annotations, or from a name like COCO_val2014_000000391895.jpg."
        )
    if len(set(coco_ids.values())) < len(coco_ids):
        raise DataError("two photos have the same number; the MS-COCO server takes one caption per number.")
    return {name: coco_id for name, coco_id in coco_ids.items() if coco_id is not None}


def match(captions: Mapping[str, str], photos: Sequence[Photo]) -> dict[str, str]:
    """Captions by photo id, in the order of `photos`.

    The keys of `captions` may be file names, with or without the ending, or COCO's numbers. The form that fits most
    photos is taken. Missing and surplus ids are errors.
    """
    known = _by_id(captions, photos)
    surplus = [name for name in captions if name not in known]
    matched = {known[name]: caption for name, caption in captions.items() if name in known}
    missing = [photo.id for photo in photos if photo.id not in matched]
    problems = []
    if missing:
        problems.append(f"{len(missing):,} of {len(photos):,} photos have no caption (first: {_first(missing)})")
    if surplus:
        problems.append(f"{len(surplus):,} captions are of photos that have no references (first: {_first(surplus)})")
    if problems:
        raise DataError("; ".join(problems) + ".\n  Is it the right split? See --split.")
    return {photo.id: matched[photo.id] for photo in photos}


def _by_id(names: Mapping[str, Any], photos: Sequence[Photo]) -> dict[str, str]:
    """Name → photo id, by the naming scheme that fits most of `names`."""
    schemes = [
        {photo.id: photo.id for photo in photos},
        {str(photo.coco_id): photo.id for photo in photos if photo.coco_id is not None},
        {PurePath(photo.id).stem: photo.id for photo in photos},
        {str(coco_id): photo.id for photo in photos if (coco_id := _coco_number(photo)) is not None},
    ]
    unique = [scheme for scheme in schemes if len(scheme) == len(photos)]  # a scheme must name every photo uniquely
    return max(unique, key=lambda scheme: len(scheme.keys() & names.keys()))


def _coco_number(photo: Photo) -> int | None:
    """From the annotations, else from a file name in COCO's style."""
    if photo.coco_id is not None:
        return photo.coco_id
    matched = re.fullmatch(r"(?:COCO_\w+_)?0*(\d{1,12})", PurePath(photo.id).stem)
    return int(matched[1]) if matched else None


def _first(names: Iterable[str], count: int = 3) -> str:
    return ", ".join(list(names)[:count])


def _short(row: Any) -> str:
    text = json.dumps(row, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
