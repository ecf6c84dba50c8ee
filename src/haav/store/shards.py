"""A store as WebDataset shards: plain tar files that a cluster streams.

Each photo is one sample. `KEY.VIEW.haav` members hold the store's own records, checksums included. `KEY.json` holds the
photo's name. `index.json` lists the views and the photos of each shard. Shards hold data only, no code.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from haav.errors import StoreError, unknown
from haav.files import json_of, write_atomically
from haav.photos.remote import is_remote
from haav.store.lmdb import Store
from haav.store.records import ViewManifest, pack, unpack
from haav.store.shard_cache import ShardCache
from haav.types import PhotoView, ViewSpec

SUFFIX = "haav"
INDEX, FORMAT = "index.json", "haav-shards-1"
WINDOW = 2
"""number of shards whose photos are shuffled together"""


def write_shards(store: Store, views: Sequence[str], out: Path, shard_size: int = 1000) -> int:
    """Write the photos that have all of the views, in order of name. Returns the number of shards."""
    ids = store.ids(views[0]) if views else []
    for view in views[1:]:
        known = set(store.ids(view))
        ids = [photo for photo in ids if photo in known]
    if not ids:
        raise StoreError(f"no photo of {store.path} has all of the views {', '.join(views) or '(none)'}.")
    if shard_size < 1:
        raise StoreError(f"a shard has at least 1 photo, not {shard_size}.")
    out.mkdir(parents=True, exist_ok=True)
    count = -(-len(ids) // shard_size)
    # Shards of even size: a small last one would waste an epoch.
    cuts = [len(ids) * shard // count for shard in range(count + 1)]
    parts = list(pairwise(cuts))
    groups = [(_name(shard), ids[start:end]) for shard, (start, end) in enumerate(parts)]
    index = index_of({view: store.views[view] for view in views}, groups)
    for shard, (start, end) in enumerate(parts):
        final = out / _name(shard)
        partial = final.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            for row, photo in enumerate(ids[start:end], start):
                add_sample(tar, f"{row:09d}", photo, {view: store.get(view, photo) for view in views})
        os.replace(partial, final)
    write_atomically(out / INDEX, lambda path: path.write_text(json.dumps(index), encoding="utf-8"))
    return count


def index_of(views: Mapping[str, ViewManifest], shards: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """What `index.json` holds. `shards`: the file of each, and its photos"""
    return {
        "format": FORMAT,
        "views": {name: asdict(manifest) for name, manifest in views.items()},
        "shards": [{"file": file, "ids": list(ids)} for file, ids in shards],
    }


def add_sample(tar: tarfile.TarFile, key: str, photo: str, views: Mapping[str, PhotoView]) -> None:
    """Add a photo to a shard. `key`: its name there, unlike that of any other sample"""
    add_member(tar, f"{key}.json", json.dumps({"id": photo}).encode())
    for name, view in views.items():
        add_member(tar, f"{key}.{name}.{SUFFIX}", pack(view))


class ShardStore:
    """A read-only store over shards.

    Shards are read whole, and the last few are kept in memory. Reading photos in the order of `ShardedBatches`, in
    batches smaller than a shard, reads each shard once per epoch.
    """

    def __init__(self, folder: str | Path, kept: int = 2 * WINDOW) -> None:
        """`folder`: a path, or an address whose shards are fetched when they are read"""
        self.path = str(folder).rstrip("/")
        self.kept = kept
        self._cache = ShardCache(self.path) if is_remote(self.path) else None
        try:
            index = json_of(self._cache.read(INDEX) if self._cache else (Path(self.path) / INDEX).read_bytes())
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']!r}")
            self.files = [str(entry["file"]) for entry in index["shards"]]
            self.groups = [tuple(map(str, entry["ids"])) for entry in index["shards"]]
            self.views = {name: _manifest(entry) for name, entry in index["views"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{self.path}/{INDEX} is damaged: {error}.") from None
        if any(Path(file).name != file for file in self.files):
            raise StoreError(f"{self.path}/{INDEX} names shards outside its folder.")
        self._shard = {photo: shard for shard, ids in enumerate(self.groups) for photo in ids}
        self._read: OrderedDict[int, dict[str, dict[str, PhotoView]]] = OrderedDict()

    def ids(self, view: str) -> list[str]:
        return list(self._shard) if view in self.views else []

    def missing(self, view: str, ids: Iterable[str]) -> list[str]:
        return [photo for photo in ids if view not in self.views or photo not in self._shard]

    def get_many(self, view: str, photos: Sequence[str]) -> list[PhotoView]:
        """The records in the order of `photos`."""
        if view not in self.views:
            raise StoreError(unknown("view", view, self.views))
        missing = self.missing(view, photos)
        if missing:
            raise StoreError(
                f"store {self.path} has no view '{view}' of '{missing[0]}' "
                f"({len(missing)} of {len(photos)} photos are missing)."
            )
        return [self._photo(photo)[view] for photo in photos]

    def in_order(self, photos: Iterable[str]) -> list[str]:
        """The photos sorted by shard. Reading them in this order reads each shard once."""
        return sorted(photos, key=lambda photo: self._shard.get(photo, -1))

    def _photo(self, photo: str) -> dict[str, PhotoView]:
        shard = self._shard[photo]
        if shard not in self._read:
            while len(self._read) >= self.kept:
                self._read.popitem(last=False)
            self._read[shard] = self._load(self.files[shard])
        self._read.move_to_end(shard)
        views = self._read[shard].get(photo)
        if views is None:
            raise StoreError(f"{self.path}/{self.files[shard]} lacks '{photo}', which {INDEX} says it has.")
        return views

    def _load(self, file: str) -> dict[str, dict[str, PhotoView]]:
        if self._cache is None:
            return dict(read_shard(Path(self.path) / file))
        try:
            return dict(read_shard(self._cache.fetch(file)))
        except StoreError:
            return dict(read_shard(self._cache.fetch(file)))  # another process made room in between


def open_store(path: str | Path) -> Store | ShardStore:
    """A view store, or a folder of shards."""
    return ShardStore(path) if is_remote(str(path)) or (Path(path) / INDEX).exists() else Store(path)


def _manifest(entry: Mapping[str, Any]) -> ViewManifest:
    return ViewManifest(**{**entry, "spec": ViewSpec(**entry["spec"])})


def _name(shard: int) -> str:
    return f"shard-{shard:06d}.tar"


def read_shard(path: Path) -> Iterator[tuple[str, dict[str, PhotoView]]]:
    """The photos of a shard with their views."""
    try:
        yield from _read(path)
    except (OSError, tarfile.TarError, ValueError, KeyError) as error:
        raise StoreError(f"{path} is not a whole shard: {error}.") from None


def _read(path: Path) -> Iterator[tuple[str, dict[str, PhotoView]]]:
    current, photo = "", ""
    views: dict[str, PhotoView] = {}
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            file = tar.extractfile(member)
            data = file.read() if file else b""
            if key != current:
                if current:
                    yield photo, views
                current, photo, views = key, "", {}
            if suffix == "json":
                photo = json_of(data)["id"]
            else:
                views[suffix.removesuffix(f".{SUFFIX}")] = unpack(data, f"{member.name} in {path}")
    if current:
        yield photo, views


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
