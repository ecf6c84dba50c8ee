"""Captions in parts: the same as in one go, each photo once, whatever is interrupted."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import haav
from haav.cli.main import main
from haav.data.toy import make_toy
from haav.errors import DataError
from haav.jobs import job
from haav.jobs.source import SourcePart, find_parts
from haav.store import Store, open_store
from haav.store.shards import write_shards
from helpers import SAMPLES, write_tar


def lines(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def captions(*files: Path) -> dict[str, str]:
    rows = [(row["image"], row.get("caption", row.get("error"))) for row in lines(*files)]
    assert len(rows) == len(dict(rows)), "each photo once"
    return dict(rows)


def plain(sources: list[Path], model: Path, out: Path) -> dict[str, str]:
    """What `haav caption` writes without parts"""
    assert main(["caption", *map(str, sources), "--model", str(model), "--out", str(out), "--quiet"]) == 0
    return captions(out)


# Sources


def names(part: SourcePart) -> list[str]:
    return [item.name for item in part.items()]


def test_a_tar_is_a_part_and_loose_photos_are_put_together(tmp_path: Path, shards: list[Path]) -> None:
    for name in ("cat", "coffee", "bird"):
        shutil.copy(SAMPLES / f"{name}.jpg", tmp_path / "shards")
    parts = find_parts([str(tmp_path / "shards")], size=2)
    assert [part.name for part in parts[:3]] == [str(shard) for shard in shards]
    assert [Path(name).name for name in names(parts[3])] == ["bird.jpg", "cat.jpg"]
    assert [Path(name).name for name in names(parts[4])] == ["coffee.jpg"]
    assert names(parts[0]) == [f"{shards[0]}/{number:05d}.jpg" for number in range(5)]
    assert len(parts) == 5
    pattern = find_parts([f"{tmp_path}/shards/*.tar"])
    assert [part.tar for part in pattern] == [str(shard) for shard in shards]


def test_listing_parts_opens_no_tar_and_knows_one_without_its_ending(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards[1].rename(shards[1].with_name("photos"))
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", lambda *arguments, **settings: pytest.fail("it reads all of the tar"))
        parts = find_parts([str(shards[0].parent)])
    assert [Path(part.tar).name for part in parts] == [shards[0].name, shards[2].name, "photos"]
    assert len(names(parts[2])) == 5


def test_a_part_survives_json(shards: list[Path]) -> None:
    for part in (*find_parts([str(shards[0])]), *find_parts([str(SAMPLES)])):
        assert SourcePart.from_json(part.to_json()) == part


def test_parquet_has_photos_as_bytes_as_structs_or_as_paths(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs the remote extra")
    from pyarrow import parquet

    cat, coffee = ((SAMPLES / name).read_bytes() for name in ("cat.jpg", "coffee.jpg"))
    shutil.copy(SAMPLES / "bird.jpg", tmp_path)
    tables = {
        "bytes": {"id": ["a", "b"], "image": [cat, coffee]},
        "struct": {"image": [{"bytes": cat, "path": None}, {"bytes": None, "path": "bird.jpg"}]},
        "path": {"path": ["bird.jpg", str(SAMPLES / "cat.jpg")]},
    }
    read = {}
    for name, columns in tables.items():
        parquet.write_table(arrow.table(columns), tmp_path / f"{name}.parquet", row_group_size=1)
        parts = find_parts([str(tmp_path / f"{name}.parquet")])
        assert len(parts) == 2, "a row group is a part"
        read[name] = [item.read() for part in parts for item in part.items()]
    bird = (SAMPLES / "bird.jpg").read_bytes()
    assert read == {"bytes": [cat, coffee], "struct": [cat, bird], "path": [bird, cat]}
    parquet.write_table(arrow.table({"text": ["x"]}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no column image"):
        list(find_parts([str(tmp_path / "none.parquet")])[0].items())


def test_sources_without_photos_and_given_twice_are_refused(tmp_path: Path, shards: list[Path]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no photo in"):
        find_parts([str(tmp_path / "empty")])
    with pytest.raises(DataError, match="was given 2 times"):
        find_parts([str(shards[0]), str(shards[0])])


# Jobs


def test_parts_together_are_what_one_command_writes(tmp_path: Path, shards: list[Path], model: Path) -> None:
    expected = plain(shards, model, tmp_path / "plain.jsonl")
    command = ["caption", *map(str, shards), "--model", str(model), "--quiet", "--out"]
    assert main([*command, f"{tmp_path}/parts/"]) == 0
    files = sorted((tmp_path / "parts").glob("*.jsonl"))
    assert captions(*files) == expected
    assert lines(*files) == lines(tmp_path / "plain.jsonl"), "in the same order, with all fields"
    record = json.loads((tmp_path / "parts" / "part-000002.done").read_text())
    assert (record["source"], record["photos"], record["done"]) == (str(shards[2]), 4, 4)
    assert record["seconds"] > 0


def test_an_interrupted_job_repeats_only_what_was_not_committed(
    tmp_path: Path, shards: list[Path], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["caption", *map(str, shards), "--model", str(model), "--out", f"{tmp_path}/parts/"]
    assert main(command) == 0
    parts = tmp_path / "parts"
    before = {file.name: file.read_bytes() for file in parts.iterdir() if file.suffix == ".jsonl"}
    (parts / "part-000001.done").unlink()  # as if killed between the captions and their record
    (parts / "part-000002.done").unlink()
    (parts / "part-000002.jsonl").unlink()
    done = []
    work = job.Worker._work

    def noted(self: Any, index: int, part: SourcePart) -> Any:
        done.append(index)
        return work(self, index, part)

    monkeypatch.setattr(job.Worker, "_work", noted)
    assert main(command) == 0
    assert done == [1, 2]
    assert {file.name: file.read_bytes() for file in parts.iterdir() if file.suffix == ".jsonl"} == before
    assert "14 captions in 3 parts, 1 of them kept; 0 failed." in capsys.readouterr().out


@pytest.mark.slow
def test_another_model_other_settings_or_photos_are_refused(
    tmp_path: Path, shards: list[Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["caption", "--model", str(model), "--out", f"{tmp_path}/parts/", "--quiet"]
    assert main([*command, *map(str, shards)]) == 0
    assert main([*command, *map(str, shards), "--beam", "2"]) == 1
    assert "output of another job: other model, settings or output format" in capsys.readouterr().err
    assert main([*command, *map(str, shards[:2])]) == 1
    assert "other photos" in capsys.readouterr().err


def test_bad_photos_are_counted_by_kind_and_a_bad_part_is_tried_again(
    tmp_path: Path, shards: list[Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with tarfile.open(shards[0], "a") as tar:
        for number in (1, 2):
            info = tarfile.TarInfo(f"bad{number}.jpg")
            info.size = 9
            tar.addfile(info, io.BytesIO(b"not a jpg"))
    command = ["caption", *map(str, shards), "--model", str(model), "--out", f"{tmp_path}/out.jsonl", "--part", "4"]
    assert main([*command, "--out-format", "jsonl"]) == 3
    errors = capsys.readouterr().err
    assert "2 × " in errors
    assert "part 1" in errors
    assert "is not a whole, uncompressed tar file" in errors
    assert not (tmp_path / "out.jsonl").exists(), "not all parts are there"
    shards[1].write_bytes(whole)
    assert main([*command, "--out-format", "jsonl"]) == 3, "two photos fail"
    rows = lines(tmp_path / "out.jsonl")
    assert [sum(key in row for row in rows) for key in ("caption", "error")] == [14, 2]
    assert len({row["image"] for row in rows}) == 16


def test_a_full_disk_is_tried_again(
    tmp_path: Path, shards: list[Path], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job.time, "sleep", lambda seconds: None)
    write, calls = job.Folder.write, []

    def full(self: Any, name: str, data: bytes | Path) -> None:
        calls.append(name)
        if name == "part-000000.jsonl" and calls.count(name) < 3:
            raise OSError(28, "No space left on device")
        if name == "part-000001.jsonl":
            raise OSError(28, "No space left on device")
        write(self, name, data)

    monkeypatch.setattr(job.Folder, "write", full)
    command = ["caption", *map(str, shards), "--model", str(model), "--out", f"{tmp_path}/parts/"]
    assert main(command) == 3
    assert calls.count("part-000000.jsonl") == 3
    assert "No space left" in capsys.readouterr().err
    monkeypatch.setattr(job.Folder, "write", write)
    assert main(command) == 0
    assert len(captions(*(tmp_path / "parts").glob("*.jsonl"))) == 14


@pytest.mark.slow
def test_parquet_and_webdataset_hold_the_same_captions(tmp_path: Path, shards: list[Path], model: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the remote extra")
    expected = plain(shards, model, tmp_path / "plain.jsonl")
    command = ["caption", *map(str, shards), "--model", str(model), "--quiet", "--out"]
    assert main([*command, f"{tmp_path}/captions.parquet"]) == 0
    rows = parquet.read_table(tmp_path / "captions.parquet").to_pylist()
    assert {row["image"]: row["caption"] for row in rows} == expected
    assert json.loads(rows[0]["words"])[0]["views"].keys() == {"cells", "objects"}
    assert main([*command, f"{tmp_path}/wds/", "--out-format", "webdataset"]) == 0
    texts = {}
    for file in sorted((tmp_path / "wds").glob("*.tar")):
        with tarfile.open(file) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for name in (name for name in members if name.endswith(".json")):
            row = json.loads(members[name])
            texts[row["image"]] = members[name.replace(".json", ".txt")].decode()
            assert members[name.replace(".json", ".jpg")][:2] == b"\xff\xd8"
    assert texts == expected


def test_wrong_flags_and_missing_packages_are_explained(
    tmp_path: Path, shards: list[Path], model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["caption", str(shards[0]), "--model", str(model)]
    for flags, reason in (
        (["--engine", "spark", "--out", "x/"], "unknown engine 'spark'.\n  Available: ray."),
        (["--engine", "ray"], "--out"),
        (["--out", "x/", "--out-format", "csv"], "unknown output format 'csv'"),
        (["--out", "x.jsonl", "--out-format", "webdataset"], "WebDataset stays in parts"),
        (["--out", "x/", "--part", "0"], "--part must be at least 1"),
        (["--out", "https://example.org/x/"], "can only be read"),
    ):
        assert main([*command, *flags]) in (1, 2)
        assert reason in capsys.readouterr().err
    for missing, flags, reason in (
        ("ray", ["--engine", "ray", "--out", f"{tmp_path}/x/"], 'pip install "haav[ray]"'),
        ("fsspec", ["--out", "s3://bucket/x/"], 'pip install "haav[remote]"'),
    ):
        monkeypatch.setitem(sys.modules, missing, None)
        assert main([*command, *flags]) in (1, 2)
        assert reason in capsys.readouterr().err


# Addresses


@pytest.mark.slow
def test_photos_and_captions_can_be_in_a_bucket(tmp_path: Path, shards: list[Path], model: Path, s3: str) -> None:
    import fsspec

    bucket = fsspec.filesystem("s3")
    for shard in shards:
        bucket.put_file(str(shard), f"photos/shards/{shard.name}")
    bucket.put_file(str(SAMPLES / "cat.jpg"), "photos/loose/cat.jpg")
    expected = list(plain(shards, model, tmp_path / "plain.jsonl").values())
    command = ["caption", f"{s3}/shards", f"{s3}/loose", "--model", str(model), "--quiet", "--out"]
    assert main([*command, f"{s3}/captions"]) == 0
    rows = [
        json.loads(line)
        for part in range(4)
        for line in bucket.cat(f"photos/captions/part-{part:06d}.jsonl").splitlines()
    ]
    assert [row["caption"] for row in rows[:-1]] == expected
    assert rows[-1]["image"] == f"{s3}/loose/cat.jpg"
    assert rows[-1]["caption"] == haav.load(model).caption(SAMPLES / "cat.jpg").text
    bucket.rm("photos/captions/part-000003.done")
    assert main([*command, f"{s3}/captions"]) == 0
    assert bucket.exists("photos/captions/part-000003.done")


def test_an_address_that_leads_nowhere_is_said(model: Path, s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", f"{s3}/nothing.tar", "--model", str(model), "--out", f"{s3}/none"]) == 1
    assert "it does not exist" in capsys.readouterr().err
    assert main(["caption", f"{s3}/*.nothing", "--model", str(model), "--out", f"{s3}/none2"]) == 1
    assert "nothing is at" in capsys.readouterr().err


# Views


@pytest.mark.slow
def test_views_are_extracted_into_shards_that_training_reads(tmp_path: Path, shards: list[Path], s3: str) -> None:
    command = ["extract", "--images", ",".join(map(str, shards)), "--views", "cells"]
    assert main([*command, "--store", f"{tmp_path}/store"]) == 0
    assert main([*command, "--store", f"{s3}/views"]) == 0
    import fsspec

    fsspec.filesystem("s3").get(f"{s3}/views/", f"{tmp_path}/views/", recursive=True)
    one, other = open_store(tmp_path / "store"), open_store(tmp_path / "views")
    ids = other.ids("cells")
    assert sorted(ids) == sorted(one.ids("cells"))
    assert ids == [f"{number:05d}.jpg" for number in range(14)]
    assert other.views["cells"].fingerprint == one.views["cells"].fingerprint
    for here, there in zip(one.get_many("cells", ids), other.get_many("cells", ids), strict=True):
        assert torch.equal(here.tokens, there.tokens)


@pytest.mark.slow
def test_training_reads_shards_at_an_address_and_keeps_few_of_them(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    monkeypatch.setenv("HAAV_CACHE", str(tmp_path / "cache"))
    dataset, store = make_toy(tmp_path / "toy")
    with Store(store) as opened:
        write_shards(opened, list(opened.views), tmp_path / "shards", 40)
    fsspec.filesystem("s3").put(f"{tmp_path}/shards/", f"{s3}/toy/", recursive=True)
    command = ["train", "toy", "--train.epochs", "1", "--data.dataset", str(dataset), "--data.store"]
    assert main([*command, str(tmp_path / "shards"), "--out", f"{tmp_path}/here"]) == 0
    largest = max(file.stat().st_size for file in (tmp_path / "shards").glob("*.tar"))
    monkeypatch.setenv("HAAV_SHARD_CACHE_GB", str(3 * largest / 1e9))
    assert main([*command, f"{s3}/toy", "--out", f"{tmp_path}/there"]) == 0
    here, there = (load_file(tmp_path / run / "best" / "model.safetensors") for run in ("here", "there"))
    assert all(torch.equal(weight, there[name]) for name, weight in here.items()), "the same model, bit for bit"
    kept = list((tmp_path / "cache" / "shards").rglob("*.tar"))
    assert 1 <= len(kept) <= 3
    monkeypatch.setenv("HAAV_SHARD_CACHE_GB", "much")
    assert main([*command, f"{s3}/toy", "--out", f"{tmp_path}/third"]) == 1
    assert "is a number of gigabytes, not 'much'" in capsys.readouterr().err


@pytest.mark.slow
def test_two_photos_of_one_name_are_refused_before_training(tmp_path: Path, shards: list[Path], s3: str) -> None:
    write_tar(tmp_path / "again.tar", 2)
    command = ["extract", "--images", f"{shards[0]},{tmp_path}/again.tar", "--views", "cells", "--store", f"{s3}/twice"]
    assert main(command) == 1
