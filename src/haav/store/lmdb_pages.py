"""The pages of an LMDB file, checked before LMDB follows them.

LMDB maps its file and trusts it: a damaged page sends it to a wrong address, and the process dies. So the B+trees of
a store (free list, main table, one table per view) are walked here with plain reads. Every page that LMDB can reach
must have its own number and a valid header, be filled by its nodes, and lead to pages of the file only. No page may
be reached twice. The order of keys is not checked: LMDB then misses a record, but does not crash.

The format is that of LMDB 0.9 (data version 1) on a 64-bit machine. Tables have no flags: `Store` has no use for
sorted duplicates or integer keys, so their kinds of pages are refused.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_PAGE = np.dtype([("number", "u8"), ("padding", "u2"), ("flags", "u2"), ("lower", "u2"), ("upper", "u2")])
_RUN = np.dtype([("number", "u8"), ("padding", "u2"), ("flags", "u2"), ("pages", "u4")])
_TABLE = struct.Struct("=IHHQQQQQ")
_META = struct.Struct(f"=QHHI II QQ {_TABLE.size}s{_TABLE.size}s QQ")
"""a page's header; magic, version; address, size of the map; free list, main table; last page, transaction"""
MAGIC, VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
BIG, TABLE = 1, 2
"""flags of a node: its value is in an overflow run; its value is a table"""
INTEGER_KEYS = 8
ENVIRONMENT = 0x4001
"""flags of the environment, which LMDB keeps with those of the free list"""
HEADER, NODE = 16, 8
METAS = 2
NO_PAGE = 2**64 - 1
MAX_DEPTH, MAX_KEY = 32, 511
ADDRESSES = 2**46
"""more bytes than that cannot be mapped"""
BATCH = 1024
"""pages in memory at once"""
ATTEMPTS = 20

Ints = npt.NDArray[np.int64]


class Damage(Exception):
    """What is wrong with the file."""


class NotLMDB(Exception):
    """The file is not one of LMDB, or of another version."""


@dataclass(frozen=True)
class _Table:
    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


@dataclass(frozen=True)
class _Meta:
    """The store after one transaction. Its file has two of them, which transactions replace in turn."""

    page_size: int
    free: _Table
    main: _Table
    last_page: int
    transaction: int


@dataclass(frozen=True)
class _Nodes:
    """The nodes of a batch of pages, in the order of their keys."""

    pages: npt.NDArray[np.uint8]
    """all bytes of the batch, which the positions refer to"""
    page: Ints
    """the number of each node's page"""
    flags: Ints
    key: Ints
    """position of the key"""
    key_size: Ints
    size: Ints
    """bytes of a leaf's value; the lower half of the number of a branch's child"""

    def numbers_at(self, positions: Ints) -> npt.NDArray[np.uint64]:
        """Of eight bytes each, which need not be aligned"""
        selected = self.pages[positions[:, None] + np.arange(8)]
        return np.asarray(selected.view(np.uint64)[:, 0])


def check_metas(file: Path) -> None:
    """Check what LMDB reads when it opens a file. A new store has no file yet, or an empty one."""
    if not file.exists():
        return
    with open(file, "rb", buffering=0) as opened:
        before = None
        while data := _read_metas(opened.fileno()):
            try:
                _parse_metas(data)
                return
            except (Damage, NotLMDB):
                # Another process may have been creating the store, or committing.
                if data == before:
                    raise
            before = data
            time.sleep(0.02)


def check_pages(file: Path, env: Any) -> None:
    """Check all pages that a transaction can reach.

    `env` has opened the file, but followed none of its pages. Its read transaction keeps writers in other processes
    from reusing pages while they are checked.
    """
    fault = Damage("its lock file is that of another store")
    with open(file, "rb", buffering=0) as opened:
        for _ in range(ATTEMPTS):
            with env.begin() as transaction:
                number = transaction.id()
                data = _read_metas(opened.fileno())
                try:
                    # LMDB, too, finds the meta of a transaction by its parity.
                    meta = _parse_metas(data)[number % METAS]
                    if meta.transaction == number:
                        _Walk(opened.fileno(), meta).check()
                        return
                except Damage as error:
                    fault = error
                    # Where a file system is mounted read-only there are no locks, and writers elsewhere reuse pages.
                    if _read_metas(opened.fileno()) == data:
                        break
    raise fault


def _read_metas(descriptor: int) -> bytes:
    first = os.pread(descriptor, _META.size, 0)
    if len(first) < _META.size:
        return first
    page_size = _TABLE.unpack(_META.unpack(first)[8])[0]
    return first + os.pread(descriptor, _META.size, page_size)


def _parse_metas(data: bytes) -> tuple[_Meta, _Meta]:
    if len(data) < _META.size or _META.unpack_from(data)[4] != MAGIC:
        raise NotLMDB("data.mdb is not an LMDB file")
    version = _META.unpack_from(data)[5]
    if version != VERSION:
        raise NotLMDB(f"data.mdb is in version {version} of LMDB's format; haav reads version {VERSION}")
    if len(data) < METAS * _META.size:
        raise Damage("its second page is missing")
    metas = _parse_meta(data, 0), _parse_meta(data, 1)
    sizes = [meta.page_size for meta in metas]
    if sizes[0] != sizes[1] or not 512 <= sizes[0] <= 32768 or sizes[0] & (sizes[0] - 1):
        raise Damage(f"its pages cannot have {sizes[0]:,} and {sizes[1]:,} bytes")
    newest = int(metas[0].transaction < metas[1].transaction)
    if metas[newest].transaction % METAS != newest:
        raise Damage(f"transaction {metas[newest].transaction} is on page {newest}")
    if metas[newest].last_page * sizes[0] >= ADDRESSES:
        raise Damage(f"it cannot have {metas[newest].last_page:,} pages")
    return metas


def _parse_meta(data: bytes, page: int) -> _Meta:
    number, _, flags, _, magic, version, _, _, free, main, last_page, transaction = _META.unpack_from(
        data, page * _META.size
    )
    if (number, flags, magic, version) != (page, META, MAGIC, VERSION):
        raise Damage(f"page {page} is not a meta page")
    table = _Table(*_TABLE.unpack(free))
    return _Meta(table.padding, table, _Table(*_TABLE.unpack(main)), last_page, transaction)


class _Walk:
    """Pages by plain reads: no file can crash them."""

    def __init__(self, descriptor: int, meta: _Meta) -> None:
        self.descriptor = descriptor
        self.meta = meta
        self.page_size = meta.page_size
        self.end = meta.last_page + 1
        self.file_size = os.fstat(descriptor).st_size
        self.firsts: list[Ints] = []
        self.lengths: list[Ints] = []

    def check(self) -> None:
        self.check_free_list()
        for name, table in self.check_main():
            for _ in self.leaves(name, table):
                pass
        self.check_disjoint()

    def check_main(self) -> list[tuple[str, _Table]]:
        """The tables it lists"""
        tables = []
        for nodes in self.leaves("of tables", self.meta.main, allowed=(0, BIG, TABLE)):
            for node in np.flatnonzero(nodes.flags == TABLE).tolist():
                start = int(nodes.key[node])
                value = start + int(nodes.key_size[node])
                name = bytes(nodes.pages[start:value]).decode(errors="replace")
                if nodes.size[node] != _TABLE.size:
                    raise Damage(f"the record of table '{name}' has {nodes.size[node]} bytes")
                tables.append((f"'{name}'", _Table(*_TABLE.unpack(bytes(nodes.pages[value : value + _TABLE.size])))))
        return tables

    def check_free_list(self) -> None:
        """Which pages each transaction freed. A writer reuses them, and relies on their order."""
        flags, last = self.meta.free.flags & ~ENVIRONMENT, 0
        if flags != INTEGER_KEYS:
            raise Damage(f"its free list has the flags {flags:#x}")
        for nodes in self.leaves("of free pages", self.meta.free):
            _require(nodes.key_size == 8, nodes.page, "has a key that is not a transaction")
            transactions = nodes.numbers_at(nodes.key)
            ordered = transactions > np.append(np.uint64(last), transactions[:-1])
            _require(ordered & (transactions <= self.meta.transaction), nodes.page, "has transactions out of order")
            last = int(transactions[-1])
            for node in range(len(nodes.page)):
                self.claim_free(nodes, node)

    def claim_free(self, nodes: _Nodes, node: int) -> None:
        position, size = int(nodes.key[node]) + 8, int(nodes.size[node])
        value = bytes(nodes.pages[position : position + size])
        if nodes.flags[node] & BIG:
            first = int(nodes.numbers_at(nodes.key[node : node + 1] + 8)[0])
            value = os.pread(self.descriptor, size, first * self.page_size + HEADER)
        page = int(nodes.page[node])
        if size % 8 or not 8 <= size == len(value):
            raise Damage(f"page {page} has a list of free pages of {size} bytes")
        listed = np.frombuffer(value, np.uint64)
        # LMDB may leave room at the end of a list.
        if listed[0] >= len(listed):
            raise Damage(f"page {page} has a list of {listed[0]:,} free pages in {size} bytes")
        free = listed[1 : 1 + int(listed[0])]
        if len(free):
            if free.min() < METAS or free.max() >= self.end or (free[1:] >= free[:-1]).any():
                raise Damage(f"page {page} has a list of free pages that is not in order")
            self.claim(free.astype(np.int64))

    def claim(self, firsts: Ints, lengths: Ints | None = None) -> None:
        self.firsts.append(firsts)
        self.lengths.append(np.ones_like(firsts) if lengths is None else lengths)

    def check_disjoint(self) -> None:
        if not self.firsts:
            return
        firsts, lengths = np.concatenate(self.firsts), np.concatenate(self.lengths)
        order = np.argsort(firsts, kind="stable")
        firsts, lengths = firsts[order], lengths[order]
        _require(firsts[1:] >= (firsts + lengths)[:-1], firsts[1:], "has two uses")

    def leaves(self, name: str, table: _Table, allowed: tuple[int, ...] = (0, BIG)) -> Iterator[_Nodes]:
        """The leaves of a table, batch by batch, after their checks"""
        free = table is self.meta.free
        if table.flags and not free:
            raise Damage(f"the table {name} has the flags {table.flags:#x}")
        if table.root == NO_PAGE:
            if any(astuple(table)[2:-1]):
                raise Damage(f"the table {name} has no pages, but a size")
            return
        if not 1 <= table.depth <= MAX_DEPTH:
            raise Damage(f"the table {name} cannot have {table.depth} levels")
        branches = leaves = overflow = entries = 0
        pages = np.array([table.root], np.uint64)
        for level in range(table.depth, 0, -1):
            numbers = self.in_file(pages, f"the table {name}")
            if len(np.unique(numbers)) < len(numbers):
                raise Damage(f"the table {name} reaches a page twice")
            self.claim(numbers)
            children = []
            for start in range(0, len(numbers), BATCH):
                batch = numbers[start : start + BATCH]
                if level > 1:
                    # LMDB asserts that a branch has two children, except in the free list.
                    nodes = self.read_nodes(batch, BRANCH, 1 if free else 2)
                    children.append((nodes.size + (nodes.flags << 32)).astype(np.uint64))
                    continue
                nodes = self.read_nodes(batch, LEAF, 1)
                _require(np.isin(nodes.flags, allowed), nodes.page, "has a value of an unknown kind")
                overflow += self.check_runs(nodes)
                entries += len(nodes.page)
                yield nodes
            if level > 1:
                branches += len(numbers)
                pages = np.concatenate(children)
            else:
                leaves += len(numbers)
        if (branches, leaves, overflow, entries) != (table.branches, table.leaves, table.overflow, table.entries):
            raise Damage(
                f"the table {name} has {entries:,} records on {branches:,} + {leaves:,} + {overflow:,} pages, not "
                f"{table.entries:,} on {table.branches:,} + {table.leaves:,} + {table.overflow:,}"
            )

    def in_file(self, pages: npt.NDArray[np.uint64], origin: str, lengths: Ints | int = 1) -> Ints:
        """The same numbers, of pages or runs that exist"""
        inside = (pages >= METAS) & (pages < self.end)
        if not inside.all():
            raise Damage(f"{origin} leads to page {pages[~inside][0]:,} of {self.end:,}")
        numbers = pages.astype(np.int64)
        end = int((numbers + lengths).max())
        if end > self.end:
            raise Damage(f"{origin} leads to page {end - 1:,} of {self.end:,}")
        # LMDB does not write pages that a transaction took and gave back, so a file may end before its last page.
        if end * self.page_size > self.file_size:
            raise Damage(f"it has {self.file_size:,} bytes of {self.end * self.page_size:,}")
        return numbers

    def read(self, numbers: Ints, size: int) -> bytes:
        """The first bytes of pages"""
        descriptor, offsets = self.descriptor, (numbers * self.page_size).tolist()
        # The disk then works on all of them at once: four times as fast if nothing is in memory.
        for offset in sorted(offsets):
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        data = b"".join([os.pread(descriptor, size, offset) for offset in offsets])
        if len(data) != size * len(numbers):
            raise Damage("it became shorter")
        return data

    def read_nodes(self, numbers: Ints, kind: int, least: int) -> _Nodes:
        size = self.page_size
        data = np.frombuffer(self.read(numbers, size), np.uint8)
        words = data.view(np.uint16)
        head = data.reshape(-1, size)[:, :HEADER].copy().view(_PAGE)[:, 0]
        _require(head["number"] == numbers.astype(np.uint64), numbers, "has another number")
        _require(head["flags"] == kind, numbers, "is of the wrong kind")
        lower, upper = head["lower"].astype(np.int64), head["upper"].astype(np.int64)
        counts = (lower - HEADER) // 2
        bounded = (lower % 2 == 0) & (counts >= least) & (lower <= upper) & (upper <= size)
        _require(bounded, numbers, "has wrong bounds")

        row = np.repeat(np.arange(len(numbers)), counts)
        page, base = numbers[row], row * size
        slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = words[(base + HEADER) // 2 + slot].astype(np.int64)
        inside = (offset % 2 == 0) & (offset >= upper[row]) & (offset <= size - NODE)
        _require(inside, page, "has a record outside of its bounds")

        position = base + offset
        low, high, flags, key_size = (words[position // 2 + field].astype(np.int64) for field in range(4))
        value_size = low + (high << 16)
        _require(key_size <= MAX_KEY, page, "has a key that is too long")
        length = NODE + key_size
        if kind == LEAF:
            _require(key_size > 0, page, "has a record without a key")
            length += np.where(flags & BIG, 8, value_size)
        # Nodes are as close as even addresses allow, from the end of a page down to its upper bound.
        order = np.argsort(position)
        begin = position[order]
        end = begin + (length + length % 2)[order]
        last = np.append(row[1:] != row[:-1], True)
        following = np.where(last, base + size, np.append(begin[1:], 0))
        first = np.append(True, last[:-1])
        filled = (end == following) & (~first | (begin == base + upper[row]))
        _require(filled, page, "has records that overlap, or leave a gap")
        return _Nodes(data, page, flags, position + NODE, key_size, value_size)

    def check_runs(self, nodes: _Nodes) -> int:
        """Values that are too large for a leaf are in runs of pages, of which the first has a header. Their pages"""
        big = np.flatnonzero(nodes.flags & BIG)
        if not len(big):
            return 0
        pages = nodes.numbers_at((nodes.key + nodes.key_size)[big])
        needed = (HEADER - 1 + nodes.size[big]) // self.page_size + 1
        firsts = self.in_file(pages, "a value", needed)
        head = np.frombuffer(self.read(firsts, HEADER), _RUN)
        _require(head["number"] == pages, firsts, "has another number")
        _require(head["flags"] == OVERFLOW, firsts, "is of the wrong kind")
        # A run keeps its length if its value is replaced by a smaller one.
        lengths = head["pages"].astype(np.int64)
        _require((lengths >= needed) & (firsts + lengths <= self.end), firsts, "begins a run of a wrong length")
        self.claim(firsts, lengths)
        return int(lengths.sum())


def _require(fine: npt.NDArray[np.bool_], pages: Ints, fault: str) -> None:
    if not fine.all():
        raise Damage(f"page {pages[~fine][0]} {fault}")
