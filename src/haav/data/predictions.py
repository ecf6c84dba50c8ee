"""Reads and writes files of generated captions, and matches them to the photos of a data set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from haav.data.annotations import MAX_BYTES, Photo, load_dataset, parse_json
from haav.errors import ConfigError, DataError, unknown
from haav.files import read_text, write_atomically

FORMATS = ("coco", "coco-server")


@dataclass(frozen=True)
class Predictions:
    """Captions of a file by the names of its photos."""

    path: Path
    captions: dict[str, str]
    failed: dict[str, str]
    """photos that `haav caption` could not caption, and why"""


def read_predictions(path: str | Path) -> Predictions:
    """COCO results `[{"image_id", "caption"}]`, the same as JSONL, or `{id: caption}`; `.gz` is fine.

    What `haav caption --out` writes is JSONL, whatever its name.
    """
    path = Path(path)
    captions: dict[str, str] = {}
    failed: dict[str, str] = {}
    for index, row in enumerate(_rows(path), 1):
        name = (
            next((row[key] for key in ("image_id", "image", "id") if key in row), None)
            if isinstance(row, dict)
            else None
        )
        named = isinstance(name, (str, int)) and not isinstance(name, bool)
        if named and "caption" not in row and isinstance(row.get("error"), str):
            failed[str(name)] = row["error"]
            continue
        if not named or not isinstance(row.get("caption"), str):
            raise DataError(f"{path}: entry {index} must have 'image_id' and a text 'caption', not {_short(row)}.")
        if str(name) in captions:
            raise DataError(f"{path}: '{name}' has more than one caption.")
        captions[str(name)] = row["caption"]
    return Predictions(path, captions, {name: error for name, error in failed.items() if name not in captions})


def _rows(path: Path) -> list[Any]:
    text = read_text(path, MAX_BYTES)
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        if path.name.removesuffix(".gz").endswith(".jsonl") or _is_row(lines[0] if lines else ""):
            return [parse_json(line) for line in lines]
        data = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not whole JSON: {error}.") from None
    if isinstance(data, dict):
        return [{"image_id": name, "caption": caption} for name, caption in data.items()]
    if not isinstance(data, list):
        raise DataError(f'{path} must be a list of {{"image_id": …, "caption": …}} or {{id: caption}}.')
    return data


def _is_row(line: str) -> bool:
    """Whether the line is a photo of `haav caption`. Its file may have any name."""
    try:
        row = parse_json(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "image" in row and ("caption" in row or "error" in row)


def load_references(path: str | Path, split: str | None = None) -> Sequence[Photo]:
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


def match(captions: Mapping[str, str], photos: Sequence[Photo], by: str | None = None) -> dict[str, str]:
    """Captions by photo id, in the order of `photos`. Missing and surplus captions are errors.

    `by`: one of `MATCH_BY`. By default, the naming scheme that fits most photos is taken.
    """
    known = _by_id(captions, photos, by)
    surplus = [name for name in captions if name not in known]
    matched: dict[str, str] = {}
    for name, photo in known.items():
        if photo in matched:
            first = next(other for other in known if known[other] == photo)
            raise DataError(f"'{first}' and '{name}' both match the photo '{photo}'. Choose another --match-by.")
        matched[photo] = captions[name]
    missing = [photo.id for photo in photos if photo.id not in matched]
    problems = []
    if missing:
        problems.append(f"{len(missing):,} of {len(photos):,} photos have no caption (first: {_first(missing)})")
    if surplus:
        problems.append(f"{len(surplus):,} captions are of photos that have no references (first: {_first(surplus)})")
    if problems:
        raise DataError("; ".join(problems) + ".\n  Is it the right split? See --split and --match-by.")
    return {photo.id: matched[photo.id] for photo in photos}


def without_failed(
    files: Sequence[Predictions], photos: Sequence[Photo], by: str | None = None, skip: bool = False
) -> tuple[list[dict[str, str]], list[Photo]]:
    """The captions of each file, and the photos. With `skip`, photos that failed in one file are left out of all.

    Without it, they are an error.
    """
    if not skip:
        for file in files:
            _refuse_failed(file)
        return [file.captions for file in files], list(photos)
    ids = [_by_id({**file.captions, **file.failed}, photos, by) for file in files]
    failed = {known[name] for file, known in zip(files, ids, strict=True) for name in file.failed if name in known}
    captions = [
        {name: text for name, text in file.captions.items() if known.get(name) not in failed}
        for file, known in zip(files, ids, strict=True)
    ]
    kept = [photo for photo in photos if photo.id not in failed]
    if not kept:
        raise DataError(f"{files[0].path}: all {len(photos):,} photos failed, so there is nothing to score.")
    return captions, kept


def _refuse_failed(predictions: Predictions) -> None:
    if predictions.failed:
        name, error = next(iter(predictions.failed.items()))
        raise DataError(
            f"{predictions.path}: {len(predictions.failed):,} photos failed and have no caption "
            f"(first: {name}: {error}).\n"
            "  Caption them again, or leave them out with --skip-failed."
        )


Scheme = tuple[Callable[[Photo], str | None], Callable[[str], str | None]]
"""what a photo of the references, and a name in a file of captions, are compared by"""


def _by_id(names: Mapping[str, Any], photos: Sequence[Photo], by: str | None = None) -> dict[str, str]:
    """Name → photo id, by the naming scheme `by`, or by the one that fits most of `names`."""
    if by is not None and by not in MATCH_BY:
        raise ConfigError(unknown("scheme", by, MATCH_BY))
    best: dict[str, str] = {}
    for of_photo, of_name in (MATCH_BY[by],) if by else SCHEMES:
        photo_ids = {key: photo.id for photo in photos if (key := of_photo(photo)) is not None}
        if len(photo_ids) < len(photos):  # a scheme must name every photo uniquely
            if by:
                raise DataError(f"--match-by {by} does not tell all photos of the references apart.")
            continue
        found = {name: photo_ids[key] for name in names if (key := of_name(name)) in photo_ids}
        if len(set(found.values())) > len(set(best.values())):
            best = found
    return best


def _coco_number(photo: Photo) -> int | None:
    """From the annotations, else from a file name in COCO's style."""
    return photo.coco_id if photo.coco_id is not None else _number(photo.id)


def _number(name: str) -> int | None:
    matched = re.fullmatch(r"(?:COCO_\w+_)?0*(\d{1,12})", _stem(name))
    return int(matched[1]) if matched else None


def _stem(name: str) -> str:
    """The file name without folders and ending"""
    path = PurePath(name)
    return path.stem if re.fullmatch(r"\.[A-Za-z]\w{1,4}", path.suffix) else path.name


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


MATCH_BY: dict[str, Scheme] = {
    "name": (lambda photo: PurePath(photo.id).name, lambda name: PurePath(name).name),
    "stem": (lambda photo: _stem(photo.id).lstrip("0"), lambda name: _stem(name).lstrip("0")),
    "id": (lambda photo: _text(_coco_number(photo)), lambda name: _text(_number(name))),
}
"""by file name without folders; also without ending and leading zeros; by COCO's number"""
SCHEMES: tuple[Scheme, ...] = (
    (lambda photo: photo.id, str),
    (lambda photo: _text(photo.coco_id), str),
    (lambda photo: PurePath(photo.id).stem, str),
    *MATCH_BY.values(),
)
"""schemes to choose from, the strictest first"""


def _first(names: Iterable[str], count: int = 3) -> str:
    return ", ".join(list(names)[:count])


def _short(row: Any) -> str:
    text = json.dumps(row, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
