"""Shards at an address, kept in a folder of this machine up to a size. Processes of a machine share the folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from haav.cache import cache_home
from haav.errors import StoreError, printable
from haav.photos.remote import describe, filesystem

GIGABYTES = "HAAV_SHARD_CACHE_GB"
DEFAULT = 20.0


def cache_limit() -> int:
    """Bytes that shards may take on this machine, from the environment"""
    text = os.environ.get(GIGABYTES, str(DEFAULT))
    try:
        return int(1e9 * float(text))
    except ValueError:
        raise StoreError(f"{GIGABYTES} is a number of gigabytes, not '{printable(text)}'.") from None


class ShardCache:
    """The least recently used shards make room for new ones. A shard that is being read stays until it is closed."""

    def __init__(self, address: str, folder: Path | None = None, most: int | None = None) -> None:
        self.address = address.rstrip("/")
        home = folder or cache_home() / "shards"
        self.folder = home / hashlib.sha256(self.address.encode()).hexdigest()[:16]
        self.most = cache_limit() if most is None else most

    def read(self, name: str) -> bytes:
        """A small file, which is not kept"""
        system, path = filesystem(self.address)
        try:
            data: bytes = system.cat_file(f"{path}/{name}")
            return data
        except Exception as error:  # each file system has errors of its own
            raise StoreError(f"{printable(self.address)}/{name} cannot be read: {describe(error)}") from None

    def fetch(self, name: str) -> Path:
        """The local copy of a shard"""
        copy = self.folder / name
        if not copy.exists():
            self._download(name, copy)
        with suppress(OSError):
            os.utime(copy)
        return copy

    def _download(self, name: str, copy: Path) -> None:
        system, path = filesystem(self.address)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(system.size(f"{path}/{name}") or 0)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{name}.")
            os.close(handle)
            try:
                system.get_file(f"{path}/{name}", temporary)
                os.replace(temporary, copy)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except Exception as error:
            raise StoreError(f"{printable(self.address)}/{name} cannot be fetched: {describe(error)}") from None

    def _make_room(self, size: int) -> None:
        kept = []
        for file in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process made room too
                status = file.stat()
                kept.append((status.st_mtime_ns, status.st_size, file))
        free = self.most - size - sum(length for _, length, _ in kept)
        for _, length, file in sorted(kept):
            if free >= 0:
                return
            file.unlink(missing_ok=True)
            free += length
