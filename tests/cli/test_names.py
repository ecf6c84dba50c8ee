"""Names of files that would control the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haav.cli.main import main
from helpers import SAMPLES, save_model

NAME = "a\x1b]0;owned\x07\nb\u202e.jpg"
SHOWN = r"a\x1b]0;owned\x07\x0ab\u202e.jpg"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / NAME).write_bytes((SAMPLES / "cat.jpg").read_bytes())
    (tmp_path / "photos" / f"broken {NAME}").write_bytes(b"\xff\xd8 not a photo")
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "model"))


def assert_harmless(shown: str, names: int) -> None:
    assert shown.count(SHOWN) >= names
    assert not set(shown) & set("\x1b\x07\u202e")


def test_captions_name_photos_with_escapes(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", str(folder), "--model", model]) != 0
    shown = capsys.readouterr()
    assert_harmless(shown.out, 1)
    assert_harmless(shown.err, 1)


def test_json_has_the_true_name(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", str(folder), "--model", model, "--json"]) != 0
    names = {Path(json.loads(line)["image"]).name for line in capsys.readouterr().out.splitlines()}
    assert names == {NAME, f"broken {NAME}"}


def test_explanations_name_photos_with_escapes(
    model: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["explain", str(folder), "--model", model, "--out", str(tmp_path / "pages")]) != 0
    shown = capsys.readouterr()
    assert not set(shown.out + shown.err) & set("\x1b\x07\u202e")
    assert r"\x1b]0;owned" in shown.out


def test_errors_and_checks_name_files_with_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dataset", str(tmp_path / "\x1b[2J.csv")]) != 0
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert r"\x1b[2J.csv is missing" in shown
    (tmp_path / "data.csv").write_text('image,caption\n"[/red]\x1b[2J.jpg",a dog\n')
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "b.jpg").write_bytes((SAMPLES / "cat.jpg").read_bytes())
    assert main(["dataset", str(tmp_path / "data.csv"), "--images", str(tmp_path / "photos")]) != 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"[/red]\x1b[2J.jpg" in shown


def test_files_and_stores_are_named_with_escapes(
    model: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, store = str(tmp_path / f"{NAME}.jsonl"), str(tmp_path / f"store {NAME}")
    assert main(["caption", str(folder), "--model", model, "--out", out]) == 3
    assert main(["extract", "--images", str(folder), "--store", store, "--views", "cells"]) == 3
    assert main(["store", "info", store]) == 0
    assert main(["store", "verify", store]) == 0
    assert main(["store", "export-webdataset", store]) == 0
    assert main(["store", "drop", store, "--view", "cells"]) == 0
    assert_harmless(capsys.readouterr().out, 5)
