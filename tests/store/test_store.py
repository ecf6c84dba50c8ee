from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from haav.errors import StoreError
from haav.store import lmdb
from haav.store.lmdb import Store
from haav.store.records import ViewManifest, pack, unpack
from haav.store.shards import ShardStore, open_store, read_shard, write_shards
from haav.types import PhotoView, ViewSpec

SPEC = ViewSpec(dim=4, max_tokens=6, indices={"rank": 6}, boxes=True)


def photo(tokens: int = 3, value: float = 0.5) -> PhotoView:
    return PhotoView(
        torch.full((tokens, 4), value),
        {"rank": torch.arange(tokens)},
        torch.rand(tokens, 4),
        tuple(f"thing {index} é" for index in range(tokens)),
    )


def filled(path: Path, names: tuple[str, ...] = ("b.jpg", "a.jpg")) -> Store:
    store = Store(path, write=True)
    store.add_view("things", ViewManifest(SPEC, "net-1", "MIT"))
    store.put("things", {name: photo(value=index + 0.5) for index, name in enumerate(names)})
    return store


def same(one: PhotoView, other: PhotoView) -> bool:
    return (
        torch.equal(one.tokens.half(), other.tokens.half())
        and one.indices.keys() == other.indices.keys()
        and all(torch.equal(one.indices[name], other.indices[name]) for name in one.indices)
        and (one.boxes is None) == (other.boxes is None)
        and (one.boxes is None or torch.equal(one.boxes, other.boxes))
        and one.labels == other.labels
    )


@given(tokens=st.integers(0, 5), dim=st.integers(1, 7), boxes=st.booleans(), label=st.text(max_size=9))
@settings(max_examples=100, deadline=None)
def test_a_record_survives_the_way_to_bytes_and_back(tokens: int, dim: int, boxes: bool, label: str) -> None:
    view = PhotoView(
        torch.randn(tokens, dim),
        {"rank": torch.arange(tokens)},
        torch.rand(tokens, 4) if boxes else None,
        (label,) * tokens if label else None,
    )
    assert same(unpack(pack(view), "it"), view)


@given(offset=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_is_noticed(offset: int, value: int) -> None:
    record = bytearray(pack(photo()))
    offset %= len(record)
    if record[offset] == value:
        return
    record[offset] = value
    with pytest.raises(StoreError, match="damaged|cannot be read"):
        unpack(bytes(record), "it")


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_store_error(data: bytes) -> None:
    with pytest.raises(StoreError):
        unpack(data, "it")


def test_huge_values_are_clipped_instead_of_becoming_infinite() -> None:
    assert unpack(pack(PhotoView(torch.full((1, 1), 1e9))), "it").tokens.isfinite().all()


def test_what_is_put_can_be_read_by_another(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        again = pickle.loads(pickle.dumps(store))  # noqa: S301  (as a spawned worker gets it)
        assert again.ids("things") == ["a.jpg", "b.jpg"]
        assert again.get("things", "b.jpg").tokens[0, 0] == 0.5
        assert [view.tokens[0, 0].item() for view in again.get_many("things", ["a.jpg", "b.jpg"])] == [1.5, 0.5]
        assert again.views["things"].spec == SPEC
        assert again.missing("things", ["c.jpg", "a.jpg"]) == ["c.jpg"]


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        store.put("things", {"a.jpg": photo(value=9.0), "c.jpg": photo()})
        assert store.get("things", "a.jpg").tokens[0, 0] == 1.5
        assert store.count("things") == 3


def test_a_changed_extractor_is_noticed(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        store.add_view("things", ViewManifest(SPEC, "net-1"))
        with pytest.raises(StoreError, match=r"another extractor:\n  in the store  net-1\n  now           net-2"):
            store.add_view("things", ViewManifest(SPEC, "net-2"))
        store.drop("things")
        store.add_view("things", ViewManifest(SPEC, "net-2"))
        assert store.count("things") == 0


def test_adding_a_view_leaves_the_others_alone(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        before = {name: pack(view) for name, view in store.items("things")}
        store.add_view("more", ViewManifest(ViewSpec(2, 1), "net-9"))
        store.put("more", {"a.jpg": PhotoView(torch.zeros(1, 2))})
        assert {name: pack(view) for name, view in store.items("things")} == before
        assert set(store.views) == {"things", "more"}


def test_mistakes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Store(tmp_path / "none")
    with filled(tmp_path / "s") as store:
        with pytest.raises(StoreError, match="has no view 'things' of 'z.jpg'"):
            store.get("things", "z.jpg")
        with pytest.raises(StoreError, match=r"\(1 of 2 photos are missing\)"):
            store.get_many("things", ["a.jpg", "z.jpg"])
        with pytest.raises(StoreError, match=r"unknown view 'thing'\. Did you mean 'things'"):
            store.get("thing", "a.jpg")
        for name in ("manifest", "", "Big View"):
            with pytest.raises(StoreError, match="is not a name for a view"):
                store.add_view(name, ViewManifest(SPEC, "net-1"))
        with pytest.raises(StoreError, match="1 to 511 bytes"):
            store.put("things", {"x" * 600: photo()})
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot make store"):
        Store(tmp_path / "file" / "s", write=True)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "data.mdb").write_bytes(b"not lmdb" * 1000)
    with pytest.raises(StoreError, match="cannot open store"):
        Store(tmp_path / "bad")


def test_verify_finds_damage_in_the_file(tmp_path: Path) -> None:
    filled(tmp_path).close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    position = data.find(b"thing 2")
    data[position] ^= 0xFF
    (tmp_path / "data.mdb").write_bytes(data)
    with Store(tmp_path) as store:
        faults = {name: fault for name, fault in store.verify("things") if fault}
    assert len(faults) == 1
    assert "checksum does not match" in next(iter(faults.values()))


def test_names_that_are_no_text_are_damage(tmp_path: Path) -> None:
    filled(tmp_path).close()
    data = (tmp_path / "data.mdb").read_bytes()
    (tmp_path / "data.mdb").write_bytes(data.replace(b"things", b"\xff\xffings"))
    with Store(tmp_path) as store, pytest.raises(StoreError, match="is damaged: 'utf-8' codec"):
        store.info()


def test_info_counts_photos_that_lack_the_view(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        store.put("things", {"none.jpg": photo(tokens=0)})
        info = store.info()["views"]["things"]
        assert (info["photos"], info["empty"], info["mean_tokens"]) == (3, 1, 2.0)


WRITER = """
import sys, torch
from haav.store import Store, ViewManifest
from haav.types import PhotoView, ViewSpec
store = Store(sys.argv[1], write=True)
store.add_view("v", ViewManifest(ViewSpec(64, 50), "net"))
for number in range(10**6):
    store.put("v", {f"{number:07d}-{k}": PhotoView(torch.full((50, 64), float(k))) for k in range(20)})
    print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    """A writer is killed at an arbitrary moment; what it had reported is there, whole, and all-or-nothing."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(5 + seed):
        acknowledged = int(writer.stdout.readline())
    time.sleep(0.01 * seed)
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait()
    acknowledged = int(rest[-1]) if rest else acknowledged
    with Store(tmp_path, write=True) as store:
        names = store.ids("v")
        assert len(names) % 20 == 0
        assert len(names) >= 20 * (acknowledged + 1)
        assert not [fault for _, fault in store.verify("v") if fault]
        store.put("v", {"after": PhotoView(torch.zeros(1, 64))})


def test_shards_hold_what_the_store_holds(tmp_path: Path) -> None:
    with filled(tmp_path / "s", tuple(f"{index}.jpg" for index in range(7))) as store:
        assert write_shards(store, ["things"], tmp_path / "out", shard_size=3) == 3
        shards = sorted((tmp_path / "out").glob("*.tar"))
        assert [file.name for file in shards] == [f"shard-00000{index}.tar" for index in range(3)]
        found = dict(pair for file in shards for pair in read_shard(file))
        assert sorted(found) == store.ids("things")
        assert all(same(views["things"], store.get("things", name)) for name, views in found.items())
        with pytest.raises(StoreError, match="no photo"):
            write_shards(store, [], tmp_path / "none")


def test_a_folder_of_shards_is_read_like_a_store(tmp_path: Path) -> None:
    names = tuple(f"{index}.jpg" for index in range(7))
    with filled(tmp_path / "s", names) as store:
        write_shards(store, ["things"], tmp_path / "out", shard_size=3)
        shards = open_store(tmp_path / "out")
        assert isinstance(shards, ShardStore)
        assert shards.views == store.views
        assert shards.ids("things") == store.ids("things")
        assert shards.missing("things", ["0.jpg", "nobody"]) == ["nobody"]
        assert shards.missing("other", ["0.jpg"]) == ["0.jpg"]
        wanted = ["5.jpg", "0.jpg", "6.jpg"]
        found = zip(shards.get_many("things", wanted), store.get_many("things", wanted), strict=True)
        assert all(same(one, other) for one, other in found)


def test_photos_and_views_that_shards_lack_are_named(tmp_path: Path) -> None:
    with filled(tmp_path / "s") as store:
        write_shards(store, ["things"], tmp_path / "out")
    shards = open_store(tmp_path / "out")
    with pytest.raises(StoreError, match=r"out has no view 'things' of 'nobody.jpg' \(1 of 2 photos are missing\)"):
        shards.get_many("things", ["a.jpg", "nobody.jpg"])
    with pytest.raises(StoreError, match=r"unknown view 'thngs'\. Did you mean 'things'"):
        shards.get_many("thngs", ["a.jpg"])


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    with filled(tmp_path / "s", ("a.jpg", "b.jpg")) as store:
        write_shards(store, ["things"], tmp_path / "out", shard_size=1)
    shard = tmp_path / "out" / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    shards = open_store(tmp_path / "out")
    assert len(shards.get_many("things", ["a.jpg"])) == 1
    with pytest.raises(StoreError, match="shard-000001.tar"):
        shards.get_many("things", ["b.jpg"])
    index = tmp_path / "out" / "index.json"
    index.write_text(index.read_text().replace("shard-000001.tar", "../../secret.tar"))
    with pytest.raises(StoreError, match="outside its folder"):
        open_store(tmp_path / "out")
    index.write_text("{}")
    with pytest.raises(StoreError, match=r"index.json is damaged"):
        open_store(tmp_path / "out")


def test_shards_are_even_and_have_photos(tmp_path: Path) -> None:
    with filled(tmp_path / "s", tuple(f"{index}.jpg" for index in range(7))) as store:
        write_shards(store, ["things"], tmp_path / "out", shard_size=6)
        assert open_store(tmp_path / "out").sizes == [3, 4]
        assert open_store(tmp_path / "out").in_order(["6.jpg", "0.jpg"]) == ["0.jpg", "6.jpg"]
        with pytest.raises(StoreError, match="at least 1 photo, not 0"):
            write_shards(store, ["things"], tmp_path / "none", shard_size=0)


def test_views_of_a_second_store_replace_those_of_the_first(tmp_path: Path) -> None:
    below, over = filled(tmp_path / "below", ("a.jpg", "b.jpg")), filled(tmp_path / "over", ("a.jpg",))
    with below, over:
        assert not same(below.get("things", "a.jpg"), over.get("things", "a.jpg"))
        kept = [below.get("things", "b.jpg")]
    with Store(tmp_path / "below", write=True) as below:
        below.add_view("more", below.views["things"])
        below.put("more", {"b.jpg": kept[0]})
    with Store(tmp_path / "over", write=True) as over:
        over.add_view("extra", over.views["things"])
        over.put("extra", {"a.jpg": kept[0]})
    both = open_store(f"{tmp_path / 'below'},{tmp_path / 'over'}")
    assert set(both.views) == {"things", "more", "extra"}
    assert (both.count("things"), both.count("more")) == (1, 1)
    assert both.ids("things") == ["a.jpg"]
    assert both.missing("things", ["a.jpg", "b.jpg"]) == ["b.jpg"]
    again = pickle.loads(pickle.dumps(both))  # noqa: S301
    with Store(tmp_path / "over") as over:
        for store in (both, again):
            assert same(store.get_many("things", ["a.jpg"])[0], over.get("things", "a.jpg"))
            assert same(store.get("things", "a.jpg"), over.get("things", "a.jpg"))
            assert same(store.get_many("more", ["b.jpg"])[0], kept[0])
            assert same(store.get("extra", "a.jpg"), kept[0])
    with pytest.raises(StoreError, match="write to one of them"):
        both.put("things", {})
    both.close()
    again.close()


def test_threads_may_open_a_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "views").close()
    check = lmdb.check_pages

    def slowly(*args: object) -> None:  # as the pages of a large store are
        time.sleep(0.2)
        check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(lmdb, "check_pages", slowly)

    def read(_: int) -> PhotoView:
        with Store(tmp_path / "views") as store:
            return store.get("things", "a.jpg")

    with ThreadPoolExecutor(4) as executor:
        one, *others = executor.map(read, range(4))
    assert all(same(one, other) for other in others)
