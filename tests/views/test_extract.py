"""Extraction as a user runs it: bad pictures, kills, resuming, several processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from haav.cli.main import main
from haav.errors import DataError, StoreError
from haav.photos.sources import digests, find_photos, photos_of
from haav.store.lmdb import Store
from haav.store.records import pack
from haav.views.extract import extract
from helpers import make_photos

VIEWS = ["grid", "objects", "regions"]


def contents(store: Path) -> dict[str, dict[str, bytes]]:
    with Store(store) as opened:
        return {view: {name: pack(record) for name, record in opened.items(view)} for view in opened.views}


def test_bad_pictures_are_named_and_the_rest_go_on(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    (photos / "empty.jpg").write_bytes(b"")
    (photos / "text.png").write_text("not a picture")
    (photos / "cut.jpg").write_bytes((photos / "000.jpg").read_bytes()[:300])
    (photos / "sub").mkdir()
    Image.new("CMYK", (30, 20)).save(photos / "sub" / "cmyk.jpg")
    summary = extract(find_photos([photos]), tmp_path / "s", VIEWS, workers=1)
    assert summary.photos == 4
    failed = {json.loads(line)["image"] for line in (tmp_path / "s" / "failures.jsonl").read_text().splitlines()}
    assert failed == {"empty.jpg", "text.png", "cut.jpg"}
    with Store(tmp_path / "s") as store:
        assert store.ids("grid") == ["000.jpg", "001.jpg", "002.jpg", "sub/cmyk.jpg"]
    for name in failed:
        Image.new("RGB", (9, 9)).save(photos / name)
    again = extract(find_photos([photos]), tmp_path / "s", VIEWS, workers=1)
    assert (again.photos, again.skipped, again.failures) == (3, 4, [])
    assert not (tmp_path / "s" / "failures.jsonl").exists()


@pytest.mark.slow
def test_many_processes_store_what_one_does(tmp_path: Path) -> None:
    refs = find_photos([make_photos(tmp_path / "photos", 6)])
    seen: list[tuple[int, int]] = []
    extract(refs, tmp_path / "one", ["grid"], workers=1, batch=2)
    extract(refs, tmp_path / "two", ["grid"], workers=2, batch=2, progress=lambda *at: seen.append(at))
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one.keys() == two.keys()
    assert one["grid"].keys() == two["grid"].keys()
    assert seen[0] == (0, 6)
    assert seen[-1] == (6, 6)


def test_adding_a_view_computes_only_that_view(tmp_path: Path) -> None:
    refs = find_photos([make_photos(tmp_path / "photos", 2)])
    extract(refs, tmp_path / "s", ["grid"], workers=1)
    before = contents(tmp_path / "s")["grid"]
    summary = extract(refs, tmp_path / "s", ["grid", "objects"], workers=1)
    after = contents(tmp_path / "s")
    assert summary.photos == 2
    assert after["grid"] == before
    assert len(after["objects"]) == 2
    assert extract(refs, tmp_path / "s", ["grid", "objects"], workers=1).skipped == 2


def test_a_changed_extractor_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = find_photos([make_photos(tmp_path / "photos", 1)])
    extract(refs, tmp_path / "s", ["grid"], workers=1)
    monkeypatch.setattr("haav.views.embedded.efficientnet.fingerprint", lambda: "other")
    with pytest.raises(StoreError, match="made by another extractor"):
        extract(refs, tmp_path / "s", ["grid"], workers=1)


@pytest.mark.parametrize(("kills", "count"), [(1, 20), pytest.param(3, 40, marks=pytest.mark.slow)])
def test_killed_extraction_resumes_with_nothing_lost_and_nothing_twice(tmp_path: Path, kills: int, count: int) -> None:
    """`kill -9` of the whole process group at random moments, then the same command again."""
    photos, store = make_photos(tmp_path / "photos", count), tmp_path / "s"
    haav = [sys.executable, "-m", "haav", "extract", "--workers", "2", "--batch", "2"]
    command = [*haav, "--views", "grid", "--store", str(store), "--images", str(photos)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    chance = random.Random(1)
    known: dict[str, bytes] = {}
    for _ in range(kills):
        running = subprocess.Popen(command, start_new_session=True, **quiet)
        deadline = time.time() + 60
        while time.time() < deadline and running.poll() is None:
            time.sleep(0.1)
            if (store / "data.mdb").exists() and _count(store) >= len(known) + chance.randint(1, 6):
                break
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        now = contents(store)["grid"]
        assert known.items() <= now.items(), "what was there stays as it was"
        known = now
    assert known
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    final = contents(store)["grid"]
    assert len(final) == count
    assert known.items() <= final.items()
    assert f"{count - len(known)} photos extracted, {len(known)} already stored, 0 failed" in done.stdout
    with Store(store) as opened:
        assert not [fault for _, fault in opened.verify("grid") if fault]


def _count(store: Path) -> int:
    with Store(store) as opened:
        return opened.count("grid")


def test_photos_are_found_in_folders_tars_and_lists(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 3)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(photos / "001.jpg", "001.jpg")
        tar.add(photos / "002.jpg", "deep/002.jpg")
    (photos / "notes.md").write_text("no picture")
    (tmp_path / "list.txt").write_text("photos/000.jpg\n\nphotos/002.jpg\n")
    inside = find_photos([tmp_path / "t.tar"])
    assert [ref.id for ref in inside] == ["001.jpg", "deep/002.jpg"]
    assert inside[1].read() == (photos / "002.jpg").read_bytes()
    assert [ref.id for ref in find_photos([photos])] == ["000.jpg", "001.jpg", "002.jpg"]
    assert [ref.id for ref in find_photos([tmp_path / "list.txt"])] == ["photos/000.jpg", "photos/002.jpg"]
    assert find_photos([photos / "001.jpg"])[0].id == "001.jpg"
    same = digests([*find_photos([tmp_path / "t.tar"]), *find_photos([photos])])
    assert same["deep/002.jpg"] == same["002.jpg"]


def test_tar_files_are_known_by_their_ending_in_any_case(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 1)
    (tmp_path / "tars").mkdir()
    path = tmp_path / "tars" / "PHOTOS.TAR"
    with tarfile.open(path, "w") as tar:
        tar.add(photos / "000.jpg", "000.jpg")
    for source in (path, tmp_path / "tars"):
        assert [ref.id for ref in find_photos([source])] == ["000.jpg"]
        assert [(ref.id, ref.fault) for ref in photos_of(str(source)).photos] == [("000.jpg", "")]


def test_sources_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="no photo in"):
        find_photos([tmp_path / "a"])
    with pytest.raises(DataError, match="does not exist"):
        find_photos([tmp_path / "none"])
    (tmp_path / "bad.tar").write_bytes(b"x" * 600)
    with pytest.raises(DataError, match="not a whole, uncompressed tar"):
        find_photos([tmp_path / "bad.tar"])
    make_photos(tmp_path / "one", 1)
    make_photos(tmp_path / "two", 1)
    with pytest.raises(DataError, match="two photos are called '000.jpg'"):
        find_photos([tmp_path / "one", tmp_path / "two"])


def test_commands_work_from_photos_to_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, store = make_photos(tmp_path / "photos", 2), str(tmp_path / "s")
    (photos / "bad.jpg").write_text("")
    assert main(["extract", "--images", str(photos), "--store", store, "--workers", "1"]) == 3
    out = capsys.readouterr()
    assert "2 photos extracted, 0 already stored, 1 failed" in out.out
    assert "failures.jsonl" in out.err
    assert main(["store", "info", store, "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["views"]["patches"]["photos"] == 2
    assert main(["store", "verify", store]) == 0
    assert "4 records, 0 damaged" in capsys.readouterr().out
    assert main(["store", "export-webdataset", store, "--out", str(tmp_path / "w")]) == 0
    assert main(["store", "drop", store, "--view", "patch_regions"]) == 0
    assert main(["store", "info", store]) == 0
    assert "patch_regions" not in capsys.readouterr().out.replace("'patch_regions' dropped", "")
    assert main(["store", "fly", store]) == 2
    assert "unknown action 'fly'" in capsys.readouterr().err


def test_extracted_numbers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    refs = find_photos([make_photos(tmp_path / "photos", 5)])
    for size in (1, 5):
        extract(refs, tmp_path / str(size), ["regions"], workers=1, batch=size)
    with Store(tmp_path / "1") as one, Store(tmp_path / "5") as five:
        for name, view in one.items("regions"):
            torch.testing.assert_close(view.tokens, five.get("regions", name).tokens, rtol=1e-2, atol=1e-2)
