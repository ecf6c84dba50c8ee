"""What goes into the stream of photos and what comes out: items, results, and files of captions that can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from haav.errors import DataError, ImageError
from haav.files import json_of, write_atomically
from haav.photos.images import MAX_BYTES, Picture
from haav.photos.sources import photos_of
from haav.types import Caption, PhotoView

STANDARD_INPUT = "-"
BEGINNING = b'{"image": '
MAX_LINE = 10_000_000


@dataclass(frozen=True)
class PhotoItem:
    """A photo to caption: what it is called, and how it is read"""

    name: str
    read: Callable[[], Picture]


@dataclass(frozen=True)
class CaptionedPhoto:
    """What became of a photo: its views and caption, or an error"""

    item: PhotoItem
    image: Image.Image | None = None
    """upright RGB"""
    views: Mapping[str, PhotoView] = field(default_factory=dict)
    caption: Caption | None = None
    error: ImageError | None = None

    @property
    def name(self) -> str:
        return self.item.name

    def to_json(self) -> dict[str, Any]:
        if self.caption is None:
            return {"image": self.name, "error": str(self.error)}
        return {"image": self.name, **self.caption.to_json()}


def find_items(paths: Iterable[str], read_stdin: Callable[[int], bytes]) -> list[PhotoItem]:
    """Files, folders, tars, lists, patterns, and `-`. What cannot be found or read is an item that fails."""
    items: dict[str, PhotoItem] = {}
    for path in paths:
        if path == STANDARD_INPUT:
            items[path] = PhotoItem(path, cache(lambda: read_stdin(MAX_BYTES + 1)))  # it comes once
            continue
        found, fault = photos_of(path)
        items |= {ref.place: PhotoItem(ref.place, ref.read) for ref in found}
        if fault or not found:
            items[path] = PhotoItem(path, _failing(fault or "no photo is there."))
    return list(items.values())


class CaptionFile:
    """A file of JSON lines that grows by whole batches and survives being cut off. Captions in it are not made again,
    photos that failed are tried again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.done: set[str] = set()
        """photos whose captions are in the file; standard input is another photo each time"""
        if self.path.exists():
            self._take_over()

    def add(self, rows: Sequence[CaptionedPhoto]) -> None:
        try:
            with open(self.path, "ab") as file:
                file.writelines(_line(row.to_json()) for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}.") from None

    def _take_over(self) -> None:
        """Check every line, then write the file anew if photos failed or its last line was cut off."""
        spoilt = False
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(_lines(file), 1):
                    row = self._row(line, number)
                    if row is None or "caption" not in row:
                        spoilt = True
                    elif row["image"] != STANDARD_INPUT:
                        self.done.add(str(row["image"]))
            if spoilt:
                write_atomically(self.path, self._copy_captions)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}.") from None

    def _copy_captions(self, copy: Path) -> None:
        with open(self.path, "rb") as old, open(copy, "wb") as new:
            for number, line in enumerate(_lines(old), 1):
                row = self._row(line, number)
                if row is not None and "caption" in row:
                    new.write(line)

    def _row(self, line: bytes, number: int) -> dict[str, Any] | None:
        """None: the line that was being written when a run was cut off"""
        begun = line.startswith(BEGINNING) or BEGINNING.startswith(line)
        if not line.endswith(b"\n") and begun:
            return None
        try:
            row: dict[str, Any] = json_of(line)
            row["image"]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{self.path}: line {number} is not a caption of haav. Name another file with --out."
            ) from None
        if not line.endswith(b"\n"):
            raise DataError(f"{self.path} does not end as a file of captions does. Name another file with --out.")
        return row


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """None is longer than a caption can be, so that whatever is named instead of a file of captions fits into memory"""
    return iter(lambda: file.readline(MAX_LINE), b"")


def _line(row: dict[str, Any]) -> bytes:
    # File names need not be UTF-8; escapes bring any of them there and back.
    return json.dumps(row).encode() + b"\n"


def _failing(reason: str) -> Callable[[], bytes]:
    def read() -> bytes:
        raise ImageError(reason)

    return read
