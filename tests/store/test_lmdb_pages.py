"""Damaged stores are refused before LMDB follows them; every store that LMDB writes is accepted."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest
import torch

from haav.errors import StoreError
from haav.store.lmdb import Store
from haav.store.lmdb_pages import check_metas, check_pages
from haav.store.records import ViewManifest
from haav.types import PhotoView, ViewSpec

SIZE = 4096
READER = """
import json, os, sys, torch
from haav.errors import StoreError
from haav.store import Store, lmdb
from haav.types import PhotoView

if sys.argv[1] == "unchecked":
    lmdb.check_metas = lmdb.check_pages = lambda *_: None

def use(path, write):
    try:
        with Store(path, write=write) as store:
            for view in list(store.views):
                store.count(view)
                list(store.verify(view))
                if write:
                    for number in range(60):
                        store.put(view, {f"new {number} {k}": PhotoView(torch.zeros(k, 64)) for k in (1, 2, 90)})
                    store.drop(view)
        return "used"
    except (StoreError, lmdb.lmdb.Error) as error:
        return str(error)

for path in sys.argv[3:]:
    listen, say = os.pipe()
    child = os.fork()
    if not child:
        os.write(say, use(path, sys.argv[2] == "write").encode())
        os._exit(0)
    os.close(say)
    status = os.waitpid(child, 0)[1]
    said = os.read(listen, 10_000).decode()
    print(json.dumps(f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said))
"""


def outcomes(paths: list[Path], check: str, mode: str) -> list[str]:
    """What becomes of processes that use stores: a message, or the signal that killed one"""
    command = [sys.executable, "-c", READER, check, mode, *map(str, paths)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@dataclass
class File:
    """A store's file, read by hand"""

    data: bytearray

    def get(self, layout: str, position: int) -> int:
        return int(struct.unpack_from(layout, self.data, position)[0])

    def put(self, layout: str, position: int, *values: int) -> None:
        struct.pack_into(layout, self.data, position, *values)

    @property
    def meta(self) -> int:
        """Position of the newest meta, after the header of its page"""
        return max((16, SIZE + 16), key=lambda position: self.get("Q", position + 128))

    @property
    def last_page(self) -> int:
        return self.get("Q", self.meta + 120)

    def nodes(self, page: int) -> list[int]:
        """Positions of the nodes of a page"""
        start = page * SIZE
        count = (self.get("H", start + 12) - 16) // 2
        return [start + self.get("H", start + 16 + 2 * slot) for slot in range(count)]

    def value(self, node: int) -> int:
        return node + 8 + self.get("H", node + 6)

    @property
    def table(self) -> int:
        """Position of the record of the table 'v', the last of the main table"""
        return self.value(self.nodes(self.get("Q", self.meta + 24 + 48 + 40))[-1])

    @property
    def branch(self) -> int:
        """The root of the table"""
        return self.get("Q", self.table + 40)

    def child(self, index: int) -> int:
        return self.get("I", self.nodes(self.branch)[index])

    @property
    def leaf(self) -> int:
        return self.child(1)

    @property
    def big(self) -> int:
        """Position of the number of the first overflow run"""
        nodes = (node for index in range(len(self.nodes(self.branch))) for node in self.nodes(self.child(index)))
        return self.value(next(node for node in nodes if self.get("H", node + 4) == 1))

    @property
    def run(self) -> int:
        return self.get("Q", self.big)

    @property
    def free(self) -> int:
        """Position of the last list of free pages"""
        return self.value(self.nodes(self.get("Q", self.meta + 24 + 40))[-1])


Damaging = Callable[[File], None]
DAMAGE: dict[str, tuple[Damaging, str]] = {
    "a child out of range": (lambda f: f.put("I", f.nodes(f.branch)[1], 60_000), "leads to page 60,000 of"),
    "a child that is a meta": (lambda f: f.put("I", f.nodes(f.branch)[1], 1), "leads to page 1 of"),
    "a cycle": (lambda f: f.put("I", f.nodes(f.branch)[1], f.branch), "is of the wrong kind"),
    "a child twice": (lambda f: f.put("I", f.nodes(f.branch)[1], f.child(0)), "reaches a page twice"),
    "a child of another table": (
        lambda f: f.put("I", f.nodes(f.branch)[1], f.get("Q", f.meta + 24 + 48 + 40)),
        "value of an unknown kind",
    ),
    "another page's number": (lambda f: f.put("Q", f.leaf * SIZE, f.leaf + 1), "has another number"),
    "a leaf that says it is a branch": (lambda f: f.put("H", f.leaf * SIZE + 10, 1), "is of the wrong kind"),
    "a branch that says it is a leaf": (lambda f: f.put("H", f.branch * SIZE + 10, 2), "is of the wrong kind"),
    "a leaf of duplicates": (lambda f: f.put("H", f.leaf * SIZE + 10, 0x22), "is of the wrong kind"),
    "a page that was not written": (lambda f: f.put("H", f.leaf * SIZE + 10, 0x12), "is of the wrong kind"),
    "bounds that cross": (lambda f: f.put("H", f.leaf * SIZE + 12, 4000), "has wrong bounds"),
    "bounds outside of the page": (lambda f: f.put("H", f.leaf * SIZE + 14, 60_000), "has wrong bounds"),
    "an empty leaf": (lambda f: f.put("H", f.leaf * SIZE + 12, 16), "has wrong bounds"),
    "a branch with one child": (lambda f: f.put("H", f.branch * SIZE + 12, 18), "has wrong bounds"),
    "a node outside of its page": (lambda f: f.put("H", f.leaf * SIZE + 18, 65_000), "outside of its bounds"),
    "a node in the header": (lambda f: f.put("H", f.leaf * SIZE + 18, 2), "outside of its bounds"),
    "a node at the end of its page": (lambda f: f.put("H", f.leaf * SIZE + 18, SIZE - 4), "outside of its bounds"),
    "a node twice": (lambda f: f.put("H", f.leaf * SIZE + 18, f.get("H", f.leaf * SIZE + 16)), "overlap"),
    "a key that is too long": (lambda f: f.put("H", f.nodes(f.leaf)[0] + 6, 60_000), "a key that is too long"),
    "no key": (lambda f: f.put("H", f.nodes(f.leaf)[0] + 6, 0), "without a key"),
    "a value that is too long": (lambda f: f.put("I", f.nodes(f.leaf)[1], 2**31), "overlap, or leave a gap"),
    "a run's value that is too long": (lambda f: f.put("I", f.big - 3 - 8, 2**31), "a value leads to page"),
    "a value of duplicates": (lambda f: f.put("H", f.nodes(f.leaf)[1] + 4, 4), "value of an unknown kind"),
    "a run beyond the last page": (lambda f: f.put("Q", f.big, f.last_page + 9), "a value leads to page"),
    "a run that begins on the last page": (lambda f: f.put("Q", f.big, f.last_page), "a value leads to page"),
    "a run at the end of all numbers": (lambda f: f.put("Q", f.big, 2**64 - 1), "a value leads to page"),
    "a run on a leaf": (lambda f: f.put("Q", f.big, f.leaf), "is of the wrong kind"),
    "a run of another number": (lambda f: f.put("Q", f.run * SIZE, 5), "has another number"),
    "a run of no kind": (lambda f: f.put("H", f.run * SIZE + 10, 0), "is of the wrong kind"),
    "a run that is too long": (lambda f: f.put("I", f.run * SIZE + 12, 2**31), "a run of a wrong length"),
    "a run over other pages": (lambda f: f.put("I", f.run * SIZE + 12, 12), "two uses|records on"),
    "a run that is too short": (lambda f: f.put("I", f.run * SIZE + 12, 1), "a run of a wrong length"),
    "a table without levels": (lambda f: f.put("H", f.table + 6, 0), "cannot have 0 levels"),
    "a table of too many levels": (lambda f: f.put("H", f.table + 6, 200), "cannot have 200 levels"),
    "a level too many": (lambda f: f.put("H", f.table + 6, 3), "is of the wrong kind"),
    "a level too few": (lambda f: f.put("H", f.table + 6, 1), "is of the wrong kind"),
    "a table with duplicates": (lambda f: f.put("H", f.table + 4, 4), "has the flags 0x4"),
    "a table with integer keys": (lambda f: f.put("H", f.table + 4, 8), "has the flags 0x8"),
    "a table whose root is a meta": (lambda f: f.put("Q", f.table + 40, 0), "leads to page 0 of"),
    "a table without pages": (lambda f: f.put("Q", f.table + 40, 2**64 - 1), "has no pages, but a size"),
    "a table of too many records": (lambda f: f.put("Q", f.table + 32, 10**9), "not 1,000,000,000 on"),
    "a table's record of 20 bytes": (lambda f: f.put("I", f.table - 1 - 8, 20), "overlap, or leave a gap"),
    "main table with duplicates": (lambda f: f.put("H", f.meta + 72 + 4, 4), "the table of tables has the flags 0x4"),
    "free list with duplicates": (lambda f: f.put("H", f.meta + 24 + 4, 12), "its free list has the flags 0xc"),
    "a free list without end": (lambda f: f.put("Q", f.free, 200_000), "a list of 200,000 free pages in"),
    "a free page out of range": (lambda f: f.put("Q", f.free + 8, 10**6), "is not in order"),
    "a free page twice": (lambda f: f.put("Q", f.free + 8, f.get("Q", f.free + 16)), "is not in order"),
    "a free page in use": (lambda f: f.put("QQ", f.free, 1, f.leaf), "has two uses"),
    "free pages of the future": (lambda f: f.put("Q", f.free - 8, 10**6), "transactions out of order"),
    "pages of 2 GB": (lambda f: f.put("I", 40, 2**31), "its second page is missing|its pages cannot have"),
    "pages without bytes": (lambda f: f.put("I", 40, 0), "is not a meta page|cannot have"),
    "metas of different pages": (lambda f: f.put("I", SIZE + 40, 8192), "its pages cannot have 4,096 and 8,192"),
    "too many pages": (lambda f: f.put("Q", f.meta + 120, 2**60), "it cannot have"),
    "too few pages": (lambda f: f.put("Q", f.meta + 120, 3), "leads to page"),
    "a transaction on the wrong page": (
        lambda f: f.put("Q", f.meta + 128, f.get("Q", f.meta + 128) + 3),
        "transaction .* is on page",
    ),
    "a meta of no kind": (lambda f: f.put("H", SIZE + 10, 0), "page 1 is not a meta page"),
    "another version": (lambda f: f.put("I", 20, 3), "version 3 of LMDB's format; haav reads version 1"),
    "another magic": (lambda f: f.put("I", 16, 3), "data.mdb is not an LMDB file"),
    "half of the file": (lambda f: f.data.__delitem__(slice(len(f.data) // 2, None)), "bytes of"),
    "one page": (lambda f: f.data.__delitem__(slice(SIZE, None)), "its second page is missing"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A store with a branch, overflow runs and free pages"""
    path = tmp_path_factory.mktemp("whole")
    with Store(path, write=True) as store:
        store.add_view("v", ViewManifest(ViewSpec(64, 90), "net"))
        for start in range(0, 120, 10):
            sizes = {f"{number:03d}": 90 if number % 8 == 5 else 2 for number in range(start, start + 10)}
            store.put("v", {name: PhotoView(torch.ones(size, 64)) for name, size in sizes.items()})
    return (path / "data.mdb").read_bytes()


@pytest.fixture(scope="module")
def damaged(whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, (damage, _) in DAMAGE.items():
        file = File(bytearray(whole))
        damage(file)
        assert file.data != whole, name
        paths[name] = tmp_path_factory.mktemp("damaged")
        (paths[name] / "data.mdb").write_bytes(file.data)
    return paths


@pytest.fixture(scope="module", params=["read", "write"])
def refusals(request: pytest.FixtureRequest, damaged: dict[str, Path]) -> dict[str, str]:
    return dict(zip(damaged, outcomes(list(damaged.values()), "checked", request.param), strict=True))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_lmdb_follows_it(damage: str, refusals: dict[str, str]) -> None:
    assert re.search(DAMAGE[damage][1], refusals[damage]), refusals[damage]
    assert re.match(r"store .* is damaged: |cannot open store ", refusals[damage])


def test_without_the_check_lmdb_kills_the_process(damaged: dict[str, Path], whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(whole)
    deadly = ["a cycle", "a branch with one child", "a run that begins on the last page", "half of the file"]
    paths = [tmp_path, *(damaged[name] for name in deadly)]
    assert outcomes(paths, "unchecked", "read") == ["used", *(f"signal {number}" for number in (6, 6, 7, 7))]
    assert outcomes([tmp_path], "checked", "write") == ["used"]


def check(path: Path, env: lmdb.Environment) -> None:
    check_metas(path / "data.mdb")
    check_pages(path / "data.mdb", env)


@pytest.mark.parametrize("seed", range(16))
def test_every_store_that_lmdb_writes_is_accepted(tmp_path: Path, seed: int) -> None:
    """Also what `Store` does not do: records deleted, replaced within a transaction, long readers, aborts"""
    rng = random.Random(seed)
    sizes = [(0, 50), (0, 3_000), (1_000, 20_000), (0, 90_000), (1_900, 2_200)][seed % 5]
    keys = [bytes(rng.choices(b"abc/._01\x00\xff", k=rng.randint(1, (8, 40, 511)[seed % 3]))) for _ in range(600)]
    readers = []
    with lmdb.open(str(tmp_path / "s"), map_size=1 << 34, max_dbs=64, sync=False) as env:
        check(tmp_path / "s", env)
        for _ in range(40):
            if rng.random() < 0.1:
                readers.append(env.begin())
            if readers and rng.random() < 0.15:
                readers.pop(0).abort()
            table = env.open_db(f"view{rng.randrange(12)}".encode())
            with env.begin(write=True) as transaction:
                if rng.random() < 0.15:
                    transaction.drop(table, delete=rng.random() < 0.5)
                else:
                    for _ in range(rng.choice((1, 20, 200))):
                        key = rng.choice(keys)
                        transaction.put(key, bytes(rng.randint(*sizes)), db=table)
                        if rng.random() < 0.1:
                            transaction.put(key, bytes(rng.randint(*sizes) // 2), db=table)
                        if rng.random() < 0.2:
                            transaction.delete(rng.choice((key, rng.choice(keys))), db=table)
                if rng.random() < 0.1:
                    transaction.abort()
            check(tmp_path / "s", env)
        for reader in readers:
            reader.abort()
        (tmp_path / "copy").mkdir()
        env.copy(str(tmp_path / "copy"), compact=True)
    with lmdb.open(str(tmp_path / "copy"), map_size=1 << 34) as env:
        check(tmp_path / "copy", env)


def test_a_file_may_end_before_its_last_page(tmp_path: Path) -> None:
    """LMDB does not write pages that a transaction took and gave back."""
    with lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=4) as env:
        table = env.open_db(b"view")
        for number in range(4):
            with env.begin(write=True) as transaction:
                transaction.put(f"{number}".encode(), bytes(9_000), db=table)
        with env.begin(write=True) as transaction:
            transaction.put(b"x", bytes(90_000), db=table)
            transaction.delete(b"x", db=table)
        assert (tmp_path / "data.mdb").stat().st_size < (env.info()["last_pgno"] + 1) * SIZE
        check(tmp_path, env)


WRITER = """
import lmdb, random, sys
env, rng = lmdb.open(sys.argv[1], map_size=1 << 34, max_dbs=4, sync=False), random.Random(0)
table = env.open_db(b"view")
while True:
    with env.begin(write=True) as transaction:
        for _ in range(20):
            transaction.put(b"%d" % rng.randrange(20_000), bytes(rng.choice((100, 9_000))), db=table)
            transaction.delete(b"%d" % rng.randrange(20_000), db=table)
    print(transaction, flush=True)
"""


def test_a_store_is_accepted_while_another_process_writes_and_after_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            for _ in range(50):
                writer.stdout.readline()
            threading.Thread(target=writer.stdout.read, daemon=True).start()
            with lmdb.open(str(tmp_path), map_size=1 << 34, readonly=True, max_dbs=4) as env:
                first = env.info()["last_txnid"]
                for _ in range(60):
                    check(tmp_path, env)
                assert env.info()["last_txnid"] > first + 60
        finally:
            writer.kill()
    for write in (False, True):
        Store(tmp_path, write=write).close()


def test_a_new_store_is_accepted_while_another_process_makes_it(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"")
    with Store(tmp_path, write=True) as store:
        assert store.views == {}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").mkdir()
    with pytest.raises(StoreError, match="cannot open store .*: Is a directory"):
        Store(tmp_path)
