"""What the how-to pages on your own photos and views promise, done on the sample photos."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from haav.cli.main import main
from haav.pretrained import SHIPPED
from haav.views import base, extractors
from helpers import ROOT, SAMPLES

pytest.importorskip("lightning_fabric", reason="needs the train extra")
HOW_TO = ROOT / "docs" / "how-to"
PHOTOS = (HOW_TO / "your-own-photos.md").read_text(encoding="utf-8")
VIEW = (HOW_TO / "your-own-view.md").read_text(encoding="utf-8")
CAPTIONS = """image,caption,split
astronaut.jpg,a woman in an orange suit,train
cat.jpg,a cat looking at the camera,train
coffee.jpg,a cup of coffee on a table,train
motorcycles.jpg,a motorcycle in a garage,val
rocket.jpg,a rocket takes off,val
"""


def commands(page: str) -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", page, re.S)
    return [shlex.split(line[2:]) for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the pages assume it"""
    (tmp_path / "captions.csv").write_text(CAPTIONS)
    for folder in ("photos", "holiday"):
        (tmp_path / folder).mkdir()
    for photo in SAMPLES.glob("*.jpg"):
        (tmp_path / "photos" / photo.name).write_bytes(photo.read_bytes())
    (tmp_path / "holiday" / "me.jpg").write_bytes((SAMPLES / "astronaut.jpg").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_photos_of_your_own_teach_the_model_in_the_box(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (SHIPPED / "best").is_dir():
        pytest.skip("no model is shipped yet")
    first = commands(PHOTOS)
    assert [words[1] for words in first] == ["extract", "train", "predict", "evaluate", "pack", "caption"]
    for words in first:
        short = ["--train.epochs", "1"] if words[1] == "train" else []
        assert main([*words[1:], *short]) == 0, words
    assert "me.jpg" in capsys.readouterr().out
    assert json.loads((place / "captions.json").read_text())[0]["caption"]


def test_a_view_of_your_own_is_one_class(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, entry = (re.search(rf"```{language}\n(.*?)```", VIEW, re.S) for language in ("python", "toml"))
    assert code
    assert entry
    # What pip would make of a package with these two.
    (place / "colours.py").write_text(code[1])
    (place / "colours-1.0.dist-info").mkdir()
    (place / "colours-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: colours\nVersion: 1.0\n")
    lines = entry[1].replace('[project.entry-points."haav.views"]', "[haav.views]").replace('"', "")
    (place / "colours-1.0.dist-info" / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(extractors, "_entries", dict(extractors._entries))
    base.broken_plugins.cache_clear()
    try:
        for words in commands(VIEW):
            short = ["--train.epochs", "1", "--model.d_model", "16"] if words[1] == "train" else []
            assert main([*words[1:], *short]) == 0, words
    finally:
        base.broken_plugins.cache_clear()
    assert (place / "runs" / "colours" / "best" / "model.safetensors").exists()
