from __future__ import annotations

import json
import os
import pickle
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from haav.data.annotations import Photo
from haav.data.loader import StoredPhotos
from haav.errors import StoreError
from haav.store import Store, ViewManifest, open_store, photo_index
from haav.store.photo_index import PhotoIndex, RepeatedName, hash_names
from haav.store.shards import FORMAT_WITH_IDS, WINDOW, ShardStore, read_shard, write_index, write_shards
from haav.types import PhotoView, ViewSpec

NAMES = [f"{index}.jpg" for index in range(23)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of 5 or 6 photos"""
    with Store(tmp_path / "store", write=True) as store:
        store.add_view("things", ViewManifest(ViewSpec(2, 1), "toy"))
        store.put("things", {name: PhotoView(torch.full((1, 2), float(index))) for index, name in enumerate(NAMES)})
        write_shards(store, ["things"], tmp_path / "shards", shard_size=6)
    return tmp_path / "shards"


def with_ids(folder: Path) -> Path:
    """Replace the index by one of earlier versions, which lists the names of all photos."""
    index = json.loads((folder / "index.json").read_text())
    shards = [
        {"file": entry["file"], "ids": [photo for photo, _ in read_shard(folder / entry["file"])]}
        for entry in index["shards"]
    ]
    index = {"format": FORMAT_WITH_IDS, "views": index["views"], "shards": shards}
    (folder / "index.json").write_text(json.dumps(index))
    for array in folder.glob("*.npy"):
        array.unlink()
    return folder


@given(names=st.lists(st.text(max_size=6), unique=True), others=st.lists(st.text(max_size=6)))
@settings(max_examples=100, deadline=None)
def test_every_name_is_found_at_its_place_and_no_other(names: list[str], others: list[str]) -> None:
    index = PhotoIndex.of(lambda: names)
    wanted = {name: place for place, name in enumerate(names)}
    assert index.places([*names, *others]).tolist() == [wanted.get(name, -1) for name in (*names, *others)]


def test_names_with_one_hash_get_another_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(names: list[str], salt: int = 0) -> np.ndarray:
        return hash_names(names, salt) % (5 if salt < 3 else 1 << 63)

    monkeypatch.setattr(photo_index, "hash_names", few)
    index = PhotoIndex.of(lambda: NAMES)
    assert index.salt == 3
    assert index.places(NAMES).tolist() == list(range(len(NAMES)))
    with pytest.raises(RepeatedName) as caught:
        PhotoIndex.of(lambda: [*NAMES, "7.jpg"])
    assert (caught.value.name, caught.value.first, caught.value.second) == ("7.jpg", 7, 23)


def test_two_photos_with_one_name_are_refused_and_nothing_is_written() -> None:
    written: list[str] = []
    names = ["a", "b", "c", "a"]
    with pytest.raises(StoreError, match=r"two photos are called 'a': in 0.tar and 2.tar"):
        write_index(lambda name, _: written.append(name), {}, {"0.tar": 1, "1.tar": 2, "2.tar": 1}, lambda: names)
    assert not written


def test_the_index_is_written_last_and_names_its_array(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    assert [entry["photos"] for entry in index["shards"]] == [5, 6, 6, 6]
    (array,) = folder.glob("*.npy")
    assert index["photos"]["file"] == array.name
    order: list[str] = []
    write_index(lambda name, _: order.append(name), {}, {"0.tar": 1}, lambda: ["a"])
    assert order[-1] == "index.json"


def test_an_index_that_lists_the_names_is_still_read(folder: Path) -> None:
    new, old = open_store(folder), open_store(with_ids(folder))
    assert isinstance(new, ShardStore)
    assert isinstance(old, ShardStore)
    assert (old.files, old.sizes, old.views) == (new.files, new.sizes, new.views)
    assert old.ids("things") == new.ids("things") == sorted(NAMES)
    assert old.places(NAMES).tolist() == new.places(NAMES).tolist()
    assert torch.equal(old.get_many("things", ["7.jpg"])[0].tokens, torch.full((1, 2), 7.0))


def test_a_store_in_another_process_maps_the_index_itself(folder: Path) -> None:
    store = open_store(folder)
    data = pickle.dumps(store)
    assert len(data) < 500
    copy = pickle.loads(data)  # noqa: S301
    assert copy.in_order(NAMES) == store.in_order(NAMES)


def test_a_name_that_only_the_index_knows_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(folder)
    known = hash_names(["7.jpg"])
    monkeypatch.setattr(photo_index, "hash_names", lambda names, salt=0: np.repeat(known, len(names)))
    with pytest.raises(StoreError, match=r"lacks 'stranger.jpg', which the index says it has"):
        store.get_many("things", ["stranger.jpg"])


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "other", "places"])
def test_a_damaged_array_is_named(folder: Path, damage: str) -> None:
    (array,) = folder.glob("*.npy")
    if damage == "gone":
        array.unlink()
    elif damage == "other":
        np.save(array, np.zeros((2, 3), np.uint64))
    elif damage == "places":
        rows = np.load(array)
        rows[1] += 100
        np.save(array, rows)
    else:
        os.truncate(array, 0 if damage == "empty" else 200)
    with pytest.raises(StoreError, match=r"is damaged|cannot be read"):
        open_store(folder).get_many("things", ["7.jpg"])


def test_an_array_outside_the_folder_is_refused(folder: Path) -> None:
    index = folder / "index.json"
    (array,) = folder.glob("*.npy")
    index.write_text(index.read_text().replace(array.name, f"../{array.name}"))
    with pytest.raises(StoreError, match="outside its folder"):
        open_store(folder)


def old_order(shards: list[list[str]], ids: list[str], batch: int, seed: int, readers: int) -> list[list[int]]:
    """The batches of an epoch as earlier versions made them, from lists of names"""
    rows = {photo: row for row, photo in enumerate(ids)}
    groups = [group for shard in shards if (group := [rows[photo] for photo in shard if photo in rows])]
    rng = random.Random(f"{seed}-0")
    shuffled = list(groups)
    rng.shuffle(shuffled)
    lanes = []
    for reader in range(readers):
        own, lane = shuffled[reader::readers], []
        for start in range(0, len(own), WINDOW):
            mixed = [row for shard in own[start : start + WINDOW] for row in shard]
            rng.shuffle(mixed)
            lane += mixed
        lanes.append(lane)
    parts = [end - start for start, end in pairwise(batch * reader // readers for reader in range(readers + 1))]
    steps = sum(sorted(map(len, groups))[: len(groups) // readers]) // max(parts)
    return [
        [row for lane, part in zip(lanes, parts, strict=True) for row in lane[step * part : (step + 1) * part]]
        for step in range(steps)
    ]


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_batches_of_shards_come_in_the_order_of_earlier_versions(folder: Path, readers: int) -> None:
    store = open_store(folder)
    assert isinstance(store, ShardStore)
    ids = random.Random(1).sample(NAMES, 19)
    photos = StoredPhotos(store, ["things"], [Photo(name, "train") for name in ids], vocabulary=None)
    shards = [[photo for photo, _ in read_shard(folder / file)] for file in store.files]
    assert list(photos.shuffled(4, 5, readers)) == old_order(shards, ids, 4, 5, readers)


def test_batches_of_a_store_come_in_the_order_of_earlier_versions(folder: Path) -> None:
    with Store(folder.parent / "store") as store:
        photos = StoredPhotos(store, ["things"], [Photo(name, "train") for name in NAMES], vocabulary=None)
        order = list(range(len(NAMES)))
        random.Random("5-0").shuffle(order)
        assert [row for batch in photos.shuffled(4, 5) for row in batch] == order[:20]
