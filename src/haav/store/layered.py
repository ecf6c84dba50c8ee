"""A store whose views replace those of another: a large view need not be copied where only a small one differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from haav.errors import StoreError
from haav.store.lmdb import Store
from haav.store.records import ViewManifest
from haav.types import PhotoView


class LayeredStore(Store):
    """Reads a view from `over` if that store has it, otherwise from the store at `path`."""

    def __init__(self, path: str | Path, over: str | Path) -> None:
        super().__init__(path)
        self.over = Store(over)

    @property
    def views(self) -> dict[str, ViewManifest]:
        return super().views | self.over.views

    def count(self, view: str) -> int:
        return self.over.count(view) if view in self.over.views else super().count(view)

    def ids(self, view: str) -> list[str]:
        return self.over.ids(view) if view in self.over.views else super().ids(view)

    def missing(self, view: str, ids: Iterable[str]) -> list[str]:
        return self.over.missing(view, ids) if view in self.over.views else super().missing(view, ids)

    def get(self, view: str, photo: str) -> PhotoView:
        return self.over.get(view, photo) if view in self.over.views else super().get(view, photo)

    def get_many(self, view: str, photos: Sequence[str]) -> list[PhotoView]:
        return self.over.get_many(view, photos) if view in self.over.views else super().get_many(view, photos)

    def put(self, view: str, records: object) -> None:
        raise StoreError(f"{self.path} is read together with {self.over.path}; write to one of them.")

    def close(self) -> None:
        super().close()
        self.over.close()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"over": self.over}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.over = state["over"]
