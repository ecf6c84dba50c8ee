"""Inputs and outputs of the captioning stream: items, results, and resumable files of captions."""

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
    """A photo to caption: its name, and a function that reads it."""

    name: str
    read: Callable[[], Picture]


@dataclass(frozen=True)
class CaptionedPhoto:
    """The result for a photo: its views and caption, or an error."""

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
    """Items of files, folders, tars, lists, patterns and `-`. A path that cannot be read becomes a failing item."""
    items: dict[str, PhotoItem] = {}
    for path in paths:
        if path == STANDARD_INPUT:
            items[path] = PhotoItem(path, cache(lambda: read_stdin(MAX_BYTES + 1)))  # can be read only once
            continue
        refs, fault = photos_of(path)
        items |= {ref.place: PhotoItem(ref.place, ref.read) for ref in refs}
        if fault or not refs:
            items[path] = PhotoItem(path, _failing(fault or "no photo is there."))
    return list(items.values())


class CaptionFile:
    """A file of JSON lines that is appended to by batches and survives interruption.

    Photos that have a caption in it are skipped. Photos that failed are tried again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.done: set[str] = set()
        """photos with a caption in the file; standard input never counts, as its photo may differ"""
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
        """Check every line. Rewrite the file if photos failed or if its last line is incomplete."""
        spoilt = False
        try:
            with open(self.path, "rb") as file:
                for line_number, line in enumerate(_lines(file), 1):
                    row = self._row(line, line_number)
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
            for line_number, line in enumerate(_lines(old), 1):
                row = self._row(line, line_number)
                if row is not None and "caption" in row:
                    new.write(line)

    def _row(self, line: bytes, line_number: int) -> dict[str, Any] | None:
        """The row of a line, or None for an incomplete last line of an interrupted run"""
        begun = line.startswith(BEGINNING) or BEGINNING.startswith(line)
        if not line.endswith(b"\n") and begun:
            return None
        try:
            row: dict[str, Any] = json_of(line)
            row["image"]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{self.path}: line {line_number} is not a caption of haav. Name another file with --out."
            ) from None
        if not line.endswith(b"\n"):
            raise DataError(f"{self.path} does not end as a file of captions does. Name another file with --out.")
        return row


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of bounded length, so that a wrong file, with any content, fits into memory"""
    return iter(lambda: file.readline(MAX_LINE), b"")


def _line(row: dict[str, Any]) -> bytes:
    # File names need not be valid UTF-8. ASCII escapes preserve all of them.
    return json.dumps(row).encode() + b"\n"


def _failing(reason: str) -> Callable[[], bytes]:
    def read() -> bytes:
        raise ImageError(reason)

    return read
