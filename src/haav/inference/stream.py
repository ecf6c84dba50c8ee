"""Inputs and outputs of the captioning stream: items and results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from PIL import Image

from haav.errors import ImageError, printable
from haav.photos.images import MAX_BYTES, Picture
from haav.photos.sources import photos_of
from haav.types import Caption, PhotoView

STANDARD_INPUT = "-"


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


def find_items(
    paths: Iterable[str],
    read_stdin: Callable[[int], bytes],
    recursive: bool = True,
    note: Callable[[str], object] = lambda text: None,
) -> list[PhotoItem]:
    """Items of files, folders, tars, lists, patterns and `-`. A path that cannot be read becomes a failing item.

    A photo that is given by a relative and by an absolute path is one item. Without `recursive`, folders inside of
    folders are left out. `note` is told what else was left out, e.g. files that are not photos.
    """
    items: dict[str, PhotoItem] = {}
    for path in paths:
        if path == STANDARD_INPUT:
            items[path] = PhotoItem(path, cache(lambda: read_stdin(MAX_BYTES + 1)))  # can be read only once
            continue
        search = photos_of(path, recursive)
        for ref in search.photos:
            items.setdefault(whole_path(ref.place), PhotoItem(ref.place, ref.read))
        if search.note:
            note(f"{printable(path)}: {search.note}.")
        if not search.photos:
            items[path] = PhotoItem(path, _failing("no photo is there."))
    return list(items.values())


def whole_path(name: str) -> str:
    """The name of a photo from the root on, whatever the current folder is. `-` stays."""
    return name if name == STANDARD_INPUT else os.path.abspath(name)


def _failing(reason: str) -> Callable[[], bytes]:
    def read() -> bytes:
        raise ImageError(reason)

    return read
