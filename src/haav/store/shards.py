"""A store as WebDataset shards: plain tar files that a cluster streams.

Each photo is one sample. `KEY.VIEW.haav` members hold the store's own records, checksums included. `KEY.json` holds the
photo's name. `index.json` lists the views and the shards. An array beside it finds the shard of a photo. Shards hold
data only, no code.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from haav.errors import StoreError, printable, unknown
from haav.files import json_of, write_atomically
from haav.photos.remote import is_remote
from haav.store.layered import LayeredStore
from haav.store.lmdb import Store
from haav.store.photo_index import PhotoIndex, RepeatedName
from haav.store.records import ViewManifest, pack, unpack
from haav.store.shard_cache import ShardCache
from haav.types import PhotoView, ViewSpec

SUFFIX = "haav"
INDEX, FORMAT = "index.json", "haav-shards-2"
FORMAT_WITH_IDS = "haav-shards-1"
"""whose index lists the names of all photos"""
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
    for shard, (start, end) in enumerate(parts):
        final = out / _name(shard)
        partial = final.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            for row, photo in enumerate(ids[start:end], start):
                add_sample(tar, f"{row:09d}", photo, {view: store.get(view, photo) for view in views})
        os.replace(partial, final)
    sizes = {_name(shard): end - start for shard, (start, end) in enumerate(parts)}
    write_index(
        lambda name, file: _place(file, out / name), {view: store.views[view] for view in views}, sizes, lambda: ids
    )
    return count


def write_index(
    write: Callable[[str, Path], None],
    views: Mapping[str, ViewManifest],
    shards: Mapping[str, int],
    names: Callable[[], Iterable[str]],
) -> None:
    """Write the index of shards, `index.json` last.

    `write`: puts a file beside the shards, under a name; `shards`: file → photos, complete when the names have been
    read; `names`: gives the names of the photos of all shards in order, each time that it is called. Two photos with
    one name are a StoreError.
    """
    try:
        photos = PhotoIndex.of(names)
    except RepeatedName as error:
        files = list(shards)
        first, second = (files[shard] for shard in _shards_of([error.first, error.second], list(shards.values())))
        raise StoreError(f"two photos are called '{printable(error.name)}': in {first} and {second}.") from None
    with tempfile.TemporaryDirectory(prefix="haav-index-") as folder:
        array, index = Path(folder, "array"), Path(folder, "index")
        photos.save(array)
        with open(array, "rb") as file:
            digest = sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        # Named by its content: `index.json` never meets the array of another one.
        name = f"index-{digest.hexdigest()[:16]}.npy"
        facts = {
            "format": FORMAT,
            "views": {view: asdict(manifest) for view, manifest in views.items()},
            "shards": [{"file": file, "photos": size} for file, size in shards.items()],
            "photos": {"file": name, "salt": photos.salt},
        }
        index.write_text(json.dumps(facts), encoding="utf-8")
        write(name, array)
        write(INDEX, index)


def _place(file: Path, target: Path) -> None:
    write_atomically(target, lambda path: shutil.copyfile(file, path))


def _shards_of(places: Sequence[int] | NDArray[np.int64], sizes: Sequence[int]) -> NDArray[np.int64]:
    """The shard of each place, -1 of place -1"""
    ends = np.cumsum(sizes, dtype=np.int64)
    return np.where(np.asarray(places) < 0, -1, np.searchsorted(ends, places, side="right"))


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
            listed = index["format"] == FORMAT_WITH_IDS
            if index["format"] not in (FORMAT, FORMAT_WITH_IDS):
                raise ValueError(f"its format is {index['format']!r}")
            self.files = [str(entry["file"]) for entry in index["shards"]]
            self.views = {name: _manifest(entry) for name, entry in index["views"].items()}
            if listed:
                groups = [list(map(str, entry["ids"])) for entry in index["shards"]]
                self.sizes = list(map(len, groups))
                self._index = PhotoIndex.of(lambda: chain.from_iterable(groups))
                array, salt = None, 0
            else:
                self.sizes = [int(entry["photos"]) for entry in index["shards"]]
                array, salt = str(index["photos"]["file"]), int(index["photos"]["salt"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{self.path}/{INDEX} is damaged: {error}.") from None
        except RepeatedName as error:
            raise StoreError(f"{self.path}/{INDEX} is damaged: it names '{printable(error.name)}' twice.") from None
        if any(Path(file).name != file for file in (*self.files, *([array] if array else []))):
            raise StoreError(f"{self.path}/{INDEX} names shards outside its folder.")
        if array is not None:
            self._index = self._map(array, salt)
        self._read: OrderedDict[int, dict[str, dict[str, PhotoView]]] = OrderedDict()

    def __reduce__(self) -> tuple[type[ShardStore], tuple[str, int]]:
        """Another process maps the index itself."""
        return ShardStore, (self.path, self.kept)

    def _map(self, name: str, salt: int) -> PhotoIndex:
        if self._cache is not None:
            with suppress(FileNotFoundError):  # another process made room in between
                return PhotoIndex.load(self._cache.fetch(name), salt, sum(self.sizes))
        try:
            path = Path(self.path) / name if self._cache is None else self._cache.fetch(name)
            return PhotoIndex.load(path, salt, sum(self.sizes))
        except OSError as error:
            raise StoreError(f"{self.path}/{name} cannot be read: {error.strerror}.") from None

    def ids(self, view: str) -> list[str]:
        """Names of all photos, in order. Reads all shards."""
        if view not in self.views:
            return []
        return [photo for file in self.files for photo in self._load(file)]

    def places(self, ids: Iterable[str]) -> NDArray[np.int64]:
        """The place of each photo, counted over all shards, or -1. Names with the same hash have the same place."""
        places = self._index.places(ids)
        if len(places) and places.max() >= sum(self.sizes):
            raise StoreError(f"the index of {self.path} is damaged: it has places beyond the last photo.")
        return places

    def missing(self, view: str, ids: Iterable[str]) -> list[str]:
        ids = list(ids)
        return ids if view not in self.views else [ids[row] for row in np.flatnonzero(self.places(ids) < 0)]

    def get_many(self, view: str, photos: Sequence[str]) -> list[PhotoView]:
        """The records in the order of `photos`."""
        if view not in self.views:
            raise StoreError(unknown("view", view, self.views))
        shards = _shards_of(self.places(photos), self.sizes)
        missing = np.flatnonzero(shards < 0)
        if len(missing):
            raise StoreError(
                f"store {self.path} has no view '{view}' of '{photos[missing[0]]}' "
                f"({len(missing)} of {len(photos)} photos are missing)."
            )
        return [self._photo(photo, shard)[view] for photo, shard in zip(photos, shards.tolist(), strict=True)]

    def in_order(self, photos: Iterable[str]) -> list[str]:
        """The photos sorted by shard. Reading them in this order reads each shard once."""
        photos = list(photos)
        shards = _shards_of(self.places(photos), self.sizes)
        return [photos[row] for row in np.argsort(shards, kind="stable").tolist()]

    def groups(self, ids: Iterable[str]) -> list[NDArray[np.unsignedinteger]]:
        """The rows of `ids` in each shard that has any, in the order of the shard."""
        places = self.places(ids)
        order = np.argsort(places, kind="stable")
        cuts = np.searchsorted(places[order], np.cumsum([0, *self.sizes]))
        rows = order.astype(np.min_scalar_type(len(order)))
        return [rows[start:end] for start, end in pairwise(cuts.tolist()) if end > start]

    def _photo(self, photo: str, shard: int) -> dict[str, PhotoView]:
        if shard not in self._read:
            while len(self._read) >= self.kept:
                self._read.popitem(last=False)
            self._read[shard] = self._load(self.files[shard])
        self._read.move_to_end(shard)
        views = self._read[shard].get(photo)
        if views is None:
            raise StoreError(f"{self.path}/{self.files[shard]} lacks '{photo}', which the index says it has.")
        return views

    def _load(self, file: str) -> dict[str, dict[str, PhotoView]]:
        if self._cache is None:
            return dict(read_shard(Path(self.path) / file))
        try:
            return dict(read_shard(self._cache.fetch(file)))
        except StoreError:
            return dict(read_shard(self._cache.fetch(file)))  # another process made room in between


def open_store(path: str | Path) -> Store | ShardStore:
    """A view store, a folder of shards, or two stores with a comma: views of the second replace those of the first."""
    if "," in str(path) and not is_remote(str(path)) and not Path(path).exists():
        below, _, over = str(path).partition(",")
        return LayeredStore(below, over)
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
