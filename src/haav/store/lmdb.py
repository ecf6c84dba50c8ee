"""Views on disk in one LMDB file: one table per view, one record per photo.

Tokens are in half precision. Every record has a checksum. Every write is a transaction, so a killed process loses
only what it had not committed. Any number of processes may read at once; writers take turns.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import lmdb

from haav.errors import StoreError, unknown
from haav.files import json_of
from haav.store.lmdb_pages import Damage, NotLMDB, check_metas, check_pages
from haav.store.records import ViewManifest, pack, token_count, unpack
from haav.types import PhotoView, ViewSpec

MAP_BYTES = 1 << 40
"""address space, not disk: the file grows with its contents"""
MAX_VIEWS = 64
MANIFEST = "manifest"


@dataclass
class _Handle:
    env: Any
    writable: bool
    users: int = 0


_handles: dict[tuple[int, str], _Handle] = {}
_lock = Lock()
"""of the handles: threads may open and close the same store at once"""


class Store:
    """
    >>> store = Store("views")                     # doctest: +SKIP
    >>> store.get("grid", "cat.jpg").tokens.shape  # doctest: +SKIP
    torch.Size([81, 1280])
    """

    def __init__(self, path: str | Path, write: bool = False) -> None:
        self.path = Path(path)
        self.writable = write
        if write:
            _make_folder(self.path)
        elif not (self.path / "data.mdb").exists():
            raise StoreError(
                f"no store at {self.path}.\n  Make one with: haav extract --images FOLDER --store {self.path}"
            )
        self._env = self._open()
        self._tables: dict[str, Any] = {}

    def _open(self) -> Any:
        """LMDB allows one handle per file and process, so stores of the same path share it."""
        key = (os.getpid(), str(self.path.resolve()))
        with _lock:
            handle = _handles.get(key)
            if handle is None:
                handle = _handles[key] = _Handle(self._map(), self.writable)
            elif self.writable and not handle.writable:
                raise StoreError(f"store {self.path} is open for reading in this process; close it before writing.")
            handle.users += 1
            return handle.env

    def _map(self) -> Any:
        """LMDB trusts the file that it maps, and a damaged one would kill the process, so its pages are checked."""
        file = self.path / "data.mdb"
        try:
            check_metas(file)
            env = lmdb.open(
                str(self.path),
                map_size=MAP_BYTES,
                max_dbs=MAX_VIEWS,
                readonly=not self.writable,
                readahead=False,
                max_readers=512,
            )
            try:
                check_pages(file, env)
            except BaseException:
                env.close()
                raise
        except Damage as error:
            raise self._damaged(error) from None
        except OSError as error:
            raise StoreError(f"cannot open store {self.path}: {error.strerror}.") from None
        except (NotLMDB, lmdb.Error) as error:
            raise StoreError(f"cannot open store {self.path}: {error}.") from None
        return env

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """A read transaction. Its values point into the mapped file and are valid until it ends."""
        try:
            with self._env.begin(buffers=True) as transaction:
                yield transaction
        except (lmdb.Error, UnicodeDecodeError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception | str) -> StoreError:
        return StoreError(f"store {self.path} is damaged: {error}.\n  Delete it and run haav extract again.")

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process reopens the file: an LMDB handle must not cross a fork or a spawn."""
        return {"path": self.path, "writable": self.writable}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.writable = state["path"], state["writable"]
        self._env, self._tables = self._open(), {}

    def close(self) -> None:
        if self._env is None:
            return
        self._env = None
        key = (os.getpid(), str(self.path.resolve()))
        with _lock:
            handle = _handles[key]
            handle.users -= 1
            if not handle.users:
                del _handles[key]
                handle.env.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    @property
    def views(self) -> dict[str, ViewManifest]:
        table = self._table(MANIFEST)
        if table is None:
            return {}
        with self._read() as transaction:
            entries = [(bytes(name).decode(), bytes(value)) for name, value in transaction.cursor(db=table)]
        return {name: _read_manifest(value, self.path) for name, value in entries}

    def count(self, view: str) -> int:
        table = self._table(view)
        if table is None:
            return 0
        with self._read() as transaction:
            return int(transaction.stat(table)["entries"])

    def ids(self, view: str) -> list[str]:
        """Names of the photos that have a record, sorted. A photo that lacks the view has an empty record."""
        table = self._table(view)
        if table is None:
            return []
        with self._read() as transaction:
            return [bytes(key).decode() for key in transaction.cursor(db=table).iternext(keys=True, values=False)]

    def missing(self, view: str, ids: Iterable[str]) -> list[str]:
        table = self._table(view)
        if table is None:
            return list(ids)
        with self._read() as transaction:
            return [photo for photo in ids if not _has(transaction, table, photo)]

    def get(self, view: str, photo: str) -> PhotoView:
        table = self._required(view)
        with self._read() as transaction:
            value = transaction.get(_key(photo), db=table)
            if value is None:
                raise StoreError(f"store {self.path} has no view '{view}' of '{photo}'.")
            return unpack(value, f"{view} of '{photo}' in {self.path}")

    def get_many(self, view: str, photos: Sequence[str]) -> list[PhotoView]:
        """The records in the order of `photos`, read in one transaction."""
        table = self._required(view)
        with self._read() as transaction:
            records = []
            for photo in photos:
                value = transaction.get(_key(photo), db=table)
                if value is None:
                    raise StoreError(
                        f"store {self.path} has no view '{view}' of '{photo}' "
                        f"({len(self.missing(view, photos))} of {len(photos)} photos are missing)."
                    )
                records.append(unpack(value, f"{view} of '{photo}' in {self.path}"))
            return records

    def items(self, view: str) -> Iterator[tuple[str, PhotoView]]:
        for photo in self.ids(view):
            yield photo, self.get(view, photo)

    def info(self) -> dict[str, Any]:
        """Counts, sizes and origin of every view."""
        return {"path": str(self.path), "views": {view: self._view_info(view) for view in sorted(self.views)}}

    def _view_info(self, view: str) -> dict[str, Any]:
        manifest, table = self.views[view], self._required(view)
        with self._read() as transaction:
            try:
                sizes = [(len(value), token_count(value)) for _, value in transaction.cursor(db=table)]
            except (ValueError, KeyError, TypeError, IndexError, struct.error):
                raise StoreError(
                    f"a record of '{view}' in {self.path} is damaged.\n"
                    f"  Find out which: haav store verify {self.path} --view {view}"
                ) from None
        photos = len(sizes)
        return {
            "photos": photos,
            "empty": sum(tokens == 0 for _, tokens in sizes),
            "mean_tokens": round(sum(tokens for _, tokens in sizes) / max(photos, 1), 2),
            "bytes_per_photo": round(sum(size for size, _ in sizes) / max(photos, 1)),
            **asdict(manifest.spec),
            "fingerprint": manifest.fingerprint,
            "made_by": manifest.made_by,
            "licence": manifest.licence,
            "source": manifest.source,
        }

    def verify(self, view: str) -> Iterator[tuple[str, str | None]]:
        """Every photo of a view with the fault of its record, or None."""
        table, spec = self._required(view), self.views[view].spec
        for photo in self.ids(view):
            with self._read() as transaction:
                try:
                    value = transaction.get(_key(photo), db=table)
                    if value is None:
                        raise StoreError("it is listed, but cannot be found: the store's index is damaged.")
                    record = unpack(value, photo)
                except StoreError as error:
                    yield photo, str(error)
                    continue
            wrong = record.tokens.shape[1] != spec.dim or len(record.tokens) > spec.max_tokens
            shape = f"{tuple(record.tokens.shape)} instead of at most ({spec.max_tokens}, {spec.dim})"
            yield photo, shape if wrong else None

    # Writing

    def add_view(self, view: str, manifest: ViewManifest) -> None:
        """Register a view before its records are added. The same view by another extractor is an error."""
        if not re.fullmatch(r"[a-z][a-z0-9_]*", view) or view == MANIFEST:
            raise StoreError(f"'{view}' is not a name for a view. Use small letters, digits and '_', a letter first.")
        known = self.views.get(view)
        if known is not None and known.fingerprint != manifest.fingerprint:
            raise StoreError(
                f"view '{view}' in {self.path} was made by another extractor:\n"
                f"  in the store  {known.fingerprint}\n  now           {manifest.fingerprint}\n"
                f"  Use a new store, or take the old view out: haav store drop {self.path} --view {view}"
            )
        if known is None:
            value = json.dumps(asdict(manifest)).encode()
            self._table(view, create=True)
            self._put(MANIFEST, {view: value}, overwrite=True)

    def put(self, view: str, records: Mapping[str, PhotoView]) -> None:
        """Add all records or none. Existing records are not replaced."""
        self._put(view, {photo: pack(record) for photo, record in records.items()}, overwrite=False)

    def drop(self, view: str) -> None:
        table, manifest = self._required(view), self._table(MANIFEST)
        with self._write() as transaction:
            transaction.delete(view.encode(), db=manifest)
            transaction.drop(table)
        self._tables.pop(view)

    def _put(self, view: str, values: Mapping[str, bytes], overwrite: bool) -> None:
        table = self._table(view, create=True)
        with self._write() as transaction:
            for key, value in values.items():
                transaction.put(_key(key), value, db=table, overwrite=overwrite)

    @contextmanager
    def _write(self) -> Iterator[Any]:
        try:
            with self._env.begin(write=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise StoreError(
                f"cannot write to store {self.path}: {error}.\n"
                "  What was committed before is safe. Free some space, then run the same command again."
            ) from None

    def _table(self, view: str, create: bool = False) -> Any:
        if view not in self._tables:
            try:
                self._tables[view] = self._env.open_db(view.encode(), create=create and self.writable)
            except (lmdb.NotFoundError, lmdb.ReadonlyError):
                return None
            except lmdb.Error as error:
                raise self._damaged(error) from None
        return self._tables[view]

    def _required(self, view: str) -> Any:
        table = self._table(view) if view in self.views else None
        if table is None:
            raise StoreError(
                unknown("view", view, self.views) + f"\n  Add it with: haav extract --store {self.path} --views {view}"
            )
        return table


def _key(photo: str) -> bytes:
    """LMDB keys have at most 511 bytes."""
    key = photo.encode()
    if not key or len(key) > 511:
        raise StoreError(f"a photo's name must have 1 to 511 bytes; this one has {len(key)}: '{photo[:60]}…'.")
    return key


def _has(transaction: Any, table: Any, photo: str) -> bool:
    try:
        return transaction.get(_key(photo), db=table) is not None
    except (StoreError, UnicodeEncodeError):  # a name that no record can have
        return False


def _read_manifest(value: bytes, path: Path) -> ViewManifest:
    try:
        data = json_of(value)
        return ViewManifest(ViewSpec(**data.pop("spec")), **data)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise StoreError(f"the manifest of store {path} is damaged: {error}.") from None


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make store {path}: {error.strerror}.") from None
