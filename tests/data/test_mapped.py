from __future__ import annotations

import csv
import gc
import gzip
import json
import os
import pickle
import random
import signal
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from haav.cli.main import main
from haav.data import convert as converting
from haav.data import mapped
from haav.data.annotations import check_dataset, load_dataset
from haav.data.convert import convert
from haav.data.dataset import Dataset, Photo, columns, ids_of
from haav.data.loader import ShuffledBatches, StoredPhotos, build_loader
from haav.data.mapped import MappedPhotos, write_photos
from haav.data.mixture import ROLES, Source, load_mixture, merge
from haav.errors import ConfigError, DataError
from haav.store import Store, ViewManifest, open_store, photo_index
from haav.store.shards import write_index
from haav.text import SPECIAL, Vocabulary
from haav.types import PhotoView, ViewSpec

pa = pytest.importorskip("pyarrow", reason="needs the remote extra")

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=3).map(tuple)
photo_lists = st.lists(
    st.builds(
        Photo,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4),
        st.sampled_from(["train", "val", "test"]),
        texts,
        st.none() | st.integers(-(2**63), 2**63 - 1),
        texts,
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda photo: photo.id,
)


def several(count: int = 30) -> tuple[Photo, ...]:
    """Photos of all splits with 0 to 3 captions by people and 0 to 1 by a system, not in order of their names"""
    rng = random.Random(0)
    return tuple(
        Photo(
            f"{rng.random()}.jpg",
            "train" if index % 4 else ("val", "test")[index % 8 // 4],
            tuple(f"caption {index} {number}" for number in range(index % 4)),
            machine_captions=("by a net",) * (index % 5 == 0),
        )
        for index in range(count)
    )


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "BATCH", 5)


def saved(path: Path, photos: tuple[Photo, ...]) -> Dataset:
    write_photos(path, photos)
    return load_dataset(path)


@given(photos=photo_lists, data=st.data())
@settings(max_examples=60, deadline=None)
def test_photos_come_back_from_the_file_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, photos: list[Photo], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "BATCH", 3)
        dataset = saved(tmp_path_factory.mktemp("arrow") / "photos.arrow", tuple(photos))
    assert list(dataset.photos) == photos
    rows = data.draw(st.lists(st.integers(0, len(photos) - 1), max_size=6))
    assert dataset.photos.take(np.array(rows, np.int64)) == [photos[row] for row in rows]  # type: ignore[attr-defined]
    assert [dataset.photos[row] for row in rows] == [photos[row] for row in rows]
    assert dataset.photos[-1] == photos[-1]
    assert dataset.photos[1:5:2] == photos[1:5:2]
    with pytest.raises(IndexError):
        dataset.photos[len(photos)]
    assert list(ids_of(dataset.photos)) == [photo.id for photo in photos]
    here, there = columns(tuple(photos)), columns(dataset.photos)
    assert all(np.array_equal(getattr(here, name), getattr(there, name)) for name in vars(here))
    for split in ("train", "val", "test"):
        assert dataset.split(split) == Dataset(tuple(photos)).split(split)


def karpathy(folder: Path) -> Path:
    sentences = [{"raw": "one"}, {"raw": "by a net", "by": "Net"}]
    images = [
        {"filename": "b.jpg", "split": "restval", "sentences": sentences, "cocoid": 7},
        {"filename": "a.jpg", "split": "val", "sentences": []},
    ]
    (folder / "k.json").write_text(json.dumps({"images": images}))
    return folder / "k.json"


def coco(folder: Path) -> Path:
    images = [{"id": 9, "file_name": "a.jpg"}, {"id": 8, "file_name": "b.jpg"}]
    annotations = [{"image_id": 9, "caption": "one"}, {"image_id": 8, "caption": "two"}]
    (folder / "c.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return folder / "c.json"


def by_name(folder: Path) -> Path:
    (folder / "n.json").write_text(json.dumps({"é.jpg": ["one", "two"], "a.jpg": []}))
    return folder / "n.json"


ROWS = [
    {"image": "b.jpg", "caption": 'one, "two"\nthree', "split": "train", "by": ""},
    {"image": "b.jpg", "caption": "by a net", "split": "train", "by": "Net"},
    {"image": "a.jpg", "caption": "", "split": "test", "by": ""},
]


def as_csv(folder: Path) -> Path:
    with open(folder / "t.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return folder / "t.csv"


def jsonl(folder: Path) -> Path:
    (folder / "t.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)) + "\r\n")
    return folder / "t.jsonl"


def gzipped(folder: Path) -> Path:
    with gzip.open(folder / "t.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    return folder / "t.jsonl.gz"


def pictures(folder: Path) -> Path:
    for name in ("a.jpg", "b.png"):
        Image.new("RGB", (4, 4)).save(folder / name)
    (folder / "captions.txt").write_text("a.jpg\tone\na.jpg\ttwo\n")
    return folder


@pytest.mark.parametrize("form", [karpathy, coco, by_name, as_csv, jsonl, gzipped, pictures])
def test_every_format_is_converted_without_loss(tmp_path: Path, form) -> None:
    (tmp_path / "in").mkdir()
    path = form(tmp_path / "in")
    convert(path, tmp_path / "photos.arrow", "val")
    dataset, expected = load_dataset(tmp_path / "photos.arrow"), load_dataset(path, "val")
    assert isinstance(dataset.photos, MappedPhotos)
    assert dataset == expected
    assert check_dataset(dataset) == check_dataset(expected)
    convert(tmp_path / "photos.arrow", tmp_path / "again.arrow")
    assert load_dataset(tmp_path / "again.arrow") == expected


def test_the_command_converts_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "photos.arrow"
    assert main(["dataset", str(jsonl(tmp_path)), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["photos"] == {"train": 1, "test": 1}
    assert main(["dataset", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "photos.parquet")]) == 2
    assert "is written as .arrow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.jsonl", '{"image": "a"}\n{"image": "b"}\n{"image": "a"}\n', "rows of 'a' are not adjacent"),
        ("t.jsonl", '{"image": "a"}\n{"image": "a", "split": "val"}\n', "'a' is in two splits, train and val"),
        ("t.jsonl", '{"image": "a"}\n{bad', "is not whole JSONL"),
        ("t.jsonl", '{"image": "\\ud800"}\n', "cannot be written"),
        ("t.jsonl", "", "names no photo"),
        ("t.csv", "picture\na\n", "row 1 has no 'image'"),
        ("t.csv.gz", "no gzip", "cannot read"),
        (
            "k.json",
            '{"images": [{"filename": "a", "split": "val", "cocoid": 9999999999999999999}]}',
            "cannot be written",
        ),
    ],
)
def test_what_cannot_be_converted_is_said_and_leaves_no_file(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says):
        convert(tmp_path / name, tmp_path / "photos.arrow")
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_different_names_with_one_hash_are_different_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (photo_index, converting):
        monkeypatch.setattr(module, "hash_names", lambda names, salt=0: np.zeros(len(names), np.uint64))
    convert(jsonl(tmp_path), tmp_path / "photos.arrow")
    assert len(load_dataset(tmp_path / "photos.arrow").photos) == 2
    (tmp_path / "t.jsonl").write_text('{"image": "a"}\n{"image": "b"}\n{"image": "a"}\n')
    with pytest.raises(DataError, match="not adjacent"):
        convert(tmp_path / "t.jsonl", tmp_path / "photos.arrow")


def test_a_kill_while_it_is_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    out = tmp_path / "photos.arrow"
    convert(jsonl(tmp_path), out)
    before = out.read_bytes()
    reading, writing = os.pipe()

    def endless(path: Path, split: str) -> Iterator[Photo]:
        for number in range(10_000):
            if number == 20:
                os.write(writing, b"!")
                time.sleep(60)
            yield Photo(str(number), "train")

    monkeypatch.setattr(converting, "_stream", endless)
    child = os.fork()
    if not child:
        try:
            convert(tmp_path / "t.jsonl", out)
        finally:
            os._exit(1)
    assert os.read(reading, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert out.read_bytes() == before


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_cut_file_is_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "photos.arrow"
    write_photos(path, several())
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(DataError, match=r"photos.arrow is not a whole file of photos"):
        load_dataset(path)


def test_a_changed_byte_gives_photos_or_an_error(tmp_path: Path, small_batches: None) -> None:
    path = tmp_path / "photos.arrow"
    write_photos(path, several(8))
    whole, rng, errors = path.read_bytes(), random.Random(0), 0
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.unlink()
        path.write_bytes(data)
        try:
            dataset = load_dataset(path)
            check_dataset(dataset)
            list(dataset.photos)
        except DataError:
            errors += 1
    assert errors > 20


def test_other_arrow_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "photos.arrow"
    with pytest.raises(DataError, match="is missing"):
        load_dataset(path)
    table = pa.table({"id": ["a"]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="but not one of photos. Make one with: haav dataset"):
        load_dataset(path)
    write_photos(path, ())
    with pytest.raises(DataError, match="names no photo"):
        load_dataset(path)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_photos(tmp_path / "photos.arrow", several())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r'pip install "haav\[remote\]"'):
        load_dataset(tmp_path / "photos.arrow")


def test_another_process_maps_the_file_itself_and_notices_another_one(tmp_path: Path) -> None:
    photos = saved(tmp_path / "photos.arrow", several()).split("train")
    data = pickle.dumps(photos)
    assert len(data) < 1000
    assert pickle.loads(data) == photos  # noqa: S301
    write_photos(tmp_path / "photos.arrow", several(7))
    with pytest.raises(DataError, match="was replaced while it was in use"):
        pickle.loads(data)  # noqa: S301


def old_label_fraction(photos: tuple[Photo, ...], fraction: float, by: str, seed: int) -> tuple[Photo, ...]:
    """As earlier versions took it, from names in memory"""
    labelled = sorted(photo.id for photo in photos if photo.split == "train" and photo.captions)
    captions = {photo.id: photo.captions for photo in photos}
    units = [(name, index) for name in labelled for index in range(1 if by == "photo" else len(captions[name]))]
    random.Random(seed).shuffle(units)
    kept: dict[str, set[int]] = {}
    for name, index in units[: round(fraction * len(units))]:
        kept.setdefault(name, set()).update(range(len(captions[name])) if by == "photo" else {index})
    return tuple(
        replace(
            photo,
            captions=tuple(text for index, text in enumerate(photo.captions) if index in kept.get(photo.id, set())),
        )
        if photo.split == "train"
        else photo
        for photo in photos
    )


@pytest.mark.parametrize("by", ["photo", "caption"])
@pytest.mark.parametrize("fraction", [0, 0.3, 0.9, 1])
def test_label_fractions_are_those_of_earlier_versions(
    tmp_path: Path, by: str, fraction: float, small_batches: None
) -> None:
    photos = several()
    expected = old_label_fraction(photos, fraction, by, 3)
    assert Dataset(photos).label_fraction(fraction, by, 3).photos == expected
    fewer = saved(tmp_path / "photos.arrow", photos).label_fraction(fraction, by, 3)
    assert fewer.photos == expected
    assert fewer.split("train") == Dataset(expected).split("train")


@pytest.mark.parametrize("by", ["Net", None])
@pytest.mark.parametrize("weight", [1, 0.5])
@pytest.mark.parametrize("role", ROLES)
def test_one_data_set_is_the_same_chosen_or_merged(
    tmp_path: Path, role: str, weight: float, by: str | None, small_batches: None
) -> None:
    photos = several() if by else tuple(replace(photo, machine_captions=()) for photo in several())
    dataset = saved(tmp_path / "photos.arrow", photos)
    source = Source(str(tmp_path / "photos.arrow"), role, weight)
    merged, chosen = merge([source], [dataset]), load_mixture([source])
    for name in ("train", "by_people", "unlabelled", "val", "base"):
        assert tuple(getattr(chosen, name)) == getattr(merged, name), name
    assert (None if chosen.weights is None else tuple(chosen.weights)) == merged.weights
    assert list(chosen.sentences) == list(merged.sentences)
    one, other = chosen.with_references_only(), merged.with_references_only()
    assert (tuple(one.train), one.weights, tuple(one.unlabelled)) == (other.train, other.weights, other.unlabelled)


def test_batches_are_those_of_photos_in_memory_also_in_a_spawned_process(tmp_path: Path, small_batches: None) -> None:
    photos = several()
    store = Store(tmp_path / "store", write=True)
    store.add_view("things", ViewManifest(ViewSpec(2, 1), "toy"))
    store.put("things", {photo.id: PhotoView(torch.rand(1, 2)) for photo in photos})
    store.close()
    write_photos(tmp_path / "photos.arrow", photos)
    mixture = load_mixture([Source(str(tmp_path / "photos.arrow"), weight=0.5)])
    words = Vocabulary((*SPECIAL, "caption", "2", "3"))
    in_memory = merge([Source("")], [Dataset(photos)]).train
    weights = [(0.5,) * len(photo.captions) for photo in in_memory]
    with Store(tmp_path / "store") as opened:
        expected = StoredPhotos(opened, ["things"], in_memory, words, 2, weights=weights)
        stored = StoredPhotos(opened, ["things"], mixture.train, words, 2, weights=mixture.weights)
        order = ShuffledBatches(len(stored), 4, seed=1)
        batches = list(build_loader(stored, order, workers=1))
        assert len(batches) == len(order)
        for batch, rows in zip(batches, order, strict=True):
            for other in (stored[rows], expected[rows]):
                assert batch.ids == other.ids
                assert torch.equal(batch.captions, other.captions)
                assert torch.equal(batch.weights, other.weights)
                assert torch.equal(batch.views["things"].tokens, other.views["things"].tokens)


def test_a_training_process_holds_few_bytes_per_photo(tmp_path: Path) -> None:
    """Of photos with a caption in shards. Lists of names and captions would take 500 bytes."""
    count, size = 20_000, 1000
    photos = (Photo(f"{index:09d}.jpg", "train", (f"a photo of thing {index % 99}",)) for index in range(count))
    write_photos(tmp_path / "photos.arrow", photos)
    shards = {f"{shard}.tar": size for shard in range(count // size)}

    def place(name: str, file: Path) -> None:
        (tmp_path / name).write_bytes(file.read_bytes())

    manifests = {"things": ViewManifest(ViewSpec(2, 1), "toy")}
    write_index(place, manifests, shards, lambda: (f"{index:09d}.jpg" for index in range(count)))
    load_dataset(tmp_path / "photos.arrow").photos[0]  # modules are imported, caches filled
    gc.collect()
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        mixture = load_mixture([Source(str(tmp_path / "photos.arrow"))])
        vocabulary = Vocabulary.build(mixture.sentences)
        stored = StoredPhotos(open_store(tmp_path), ["things"], mixture.train, vocabulary)
        epoch = iter(stored.shuffled(50, seed=0))
        next(epoch)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow
    finally:
        tracemalloc.stop()
    assert len(stored) == count
    assert held / count < 24
