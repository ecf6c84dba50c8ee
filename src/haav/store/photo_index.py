"""Finds photos by name through arrays in a file, which all processes of a machine share: 16 bytes per photo.

The file has two rows of 64-bit numbers: the hashes of all names, sorted, and the place of each photo, counted over
all shards. Names are not kept. What is found by its hash has to be compared with the name that is stored with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from haav.errors import StoreError

CHUNK = 1 << 16
"""names that are hashed and looked up at once"""
Hashes = NDArray[np.uint64]


class RepeatedName(Exception):
    def __init__(self, name: str, first: int, second: int) -> None:
        super().__init__(name)
        self.name, self.first, self.second = name, first, second


class PhotoIndex:
    def __init__(self, rows: Hashes, salt: int = 0) -> None:
        """`rows`: hashes and places; `salt`: of the hashes"""
        self.rows, self.salt = rows, salt

    @classmethod
    def of(cls, names: Callable[[], Iterable[str]]) -> PhotoIndex:
        """`names`: gives all names in their order, each time that it is called. A repeated name is a RepeatedName."""
        for salt in count():
            hashes = _hash_all(names(), salt)
            twice = repeated(hashes)
            if not len(twice):
                order = np.argsort(hashes)
                return cls(np.stack([hashes[order], order.astype("<u8")]), salt)
            refuse_repeated(names(), twice, salt)  # else two names have one hash: take others
        raise AssertionError

    @classmethod
    def load(cls, path: Path, salt: int, photos: int) -> PhotoIndex:
        """Map the file. Raises StoreError if it does not have as many photos."""
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise StoreError(f"{path} is damaged: {error}.") from None
        if rows.dtype != np.dtype("<u8") or rows.shape != (2, photos):
            raise StoreError(f"{path} is damaged: it has {rows.dtype} {rows.shape}, not uint64 {(2, photos)}.")
        return cls(rows.view(np.ndarray), salt)

    def save(self, path: Path) -> None:
        with open(path, "wb") as file:
            np.save(file, self.rows)

    def places(self, names: Iterable[str]) -> NDArray[np.int64]:
        """The place of each photo, or -1"""
        hashes, places = self.rows
        waiting, parts = iter(names), [np.zeros(0, np.int64)]
        while chunk := list(islice(waiting, CHUNK)):
            wanted = hash_names(chunk, self.salt)
            nearest = np.minimum(np.searchsorted(hashes, wanted), max(len(hashes) - 1, 0))
            if len(hashes):
                parts.append(np.where(hashes[nearest] == wanted, places[nearest].astype(np.int64), -1))
            else:
                parts.append(np.full(len(chunk), -1))
        return np.concatenate(parts)


def hash_names(names: Iterable[str], salt: int = 0) -> Hashes:
    key = salt.to_bytes(8, "little")
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, salt=key).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8")


def repeated(hashes: Hashes) -> Hashes:
    """Hashes that occur more than once"""
    ordered = np.sort(hashes)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def refuse_repeated(names: Iterable[str], hashes: Hashes, salt: int = 0) -> None:
    """Raise RepeatedName if two of the names with these hashes are equal."""
    first: dict[str, int] = {}
    waiting, start = iter(names), 0
    while chunk := list(islice(waiting, CHUNK)):
        for offset in np.flatnonzero(np.isin(hash_names(chunk, salt), hashes)).tolist():
            known = first.setdefault(chunk[offset], start + offset)
            if known != start + offset:
                raise RepeatedName(chunk[offset], known, start + offset)
        start += len(chunk)


def _hash_all(names: Iterable[str], salt: int) -> Hashes:
    hashes, waiting = array("Q"), iter(names)
    while chunk := list(islice(waiting, CHUNK)):
        hashes.frombytes(hash_names(chunk, salt).tobytes())
    return np.frombuffer(hashes, np.uint64).astype("<u8", copy=False)
