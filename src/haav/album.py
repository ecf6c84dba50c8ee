"""Any number of photos to lines of JSON: in small batches, past bad pictures, and on from where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from haav.captioner import Captioner
from haav.errors import DataError, ImageError
from haav.files import write_atomically
from haav.images import load_image
from haav.sources import photos_of
from haav.types import Caption


@dataclass(frozen=True)
class Item:
    """A photo to caption: what it is called, and how its bytes are had"""

    name: str
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Captioned:
    name: str
    caption: Caption | None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        if self.caption is None:
            return {"image": self.name, "error": self.error}
        return {"image": self.name, **self.caption.to_json()}


def find_items(paths: Iterable[str], read_stdin: Callable[[], bytes]) -> list[Item]:
    """Files, folders, tars, lists, patterns, and `-`. What does not exist is found out when it is read."""
    items: dict[str, Item] = {}
    for path in paths:
        if path == "-":
            found = [Item("-", read_stdin)]
        else:
            try:
                found = [Item(ref.place, ref.read) for ref in photos_of(path)]
            except DataError as error:
                found = [Item(path, _failing(str(error)))]
            if not found:
                found = [Item(path, _failing("no photo is there."))]
        items |= {item.name: item for item in found}
    return list(items.values())


def caption_all(captioner: Captioner, items: Iterable[Item], batch: int, **options: Any) -> Iterator[Captioned]:
    """In order. `options`: as `Captioner.caption` takes them"""
    waiting = iter(items)
    while part := list(islice(waiting, batch)):
        images: dict[str, Image.Image] = {}
        errors: dict[str, str] = {}
        for item in part:
            try:
                images[item.name] = load_image(item.read())
            except ImageError as error:
                errors[item.name] = str(error)
        captions = dict(zip(images, captioner.caption(list(images.values()), **options), strict=True))
        for item in part:
            yield Captioned(item.name, captions.get(item.name), errors.get(item.name, ""))


class CaptionFile:
    """A file of JSON lines that grows by whole batches and survives being cut off. Captions in it are not made again,
    photos that failed are tried again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        kept = [row for row in self._rows() if "caption" in row]
        self.done = {str(row["image"]) for row in kept}
        if self.path.exists():
            lines = "".join(map(_line, kept))
            write_atomically(self.path, lambda file: file.write_text(lines, encoding="utf-8"))

    def add(self, rows: Sequence[Captioned]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(_line(row.to_json()) for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}.") from None

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}.") from None
        # Behind the last line break lies nothing, or a line that was being written when a run was cut off.
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                row["image"]
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"{self.path}: line {number} is not a caption of haav. Name another file with --out."
                ) from None
            yield row


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _failing(reason: str) -> Callable[[], bytes]:
    def read() -> bytes:
        raise ImageError(reason)

    return read
