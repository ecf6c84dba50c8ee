"""What is installed with the package, and what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from PIL import Image

from haav.weights import ARTEFACTS
from helpers import ROOT, SAMPLES

EXTRAS = ("train", "hub", "faiss", "hdf5", "coco", "web", "onnx", "plots", "heif", "remote", "ray")
LARGEST = 60_000_000


def needed(extras: tuple[str, ...]) -> set[str]:
    """Every package that an installation with these extras brings, as far as it is installed here"""
    requirements = pytest.importorskip("packaging.requirements")
    found: set[str] = set()
    waiting = [("haav", extras)]
    while waiting:
        name, wanted = waiting.pop()
        try:
            asked = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(_plain(name))
        for text in asked:
            need = requirements.Requirement(text)
            applies = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *wanted))
            if applies and _plain(need.name) not in found:
                waiting.append((need.name, tuple(need.extras)))
    return found - {"haav"}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_has_its_licence_in_the_list() -> None:
    text = (ROOT / "docs" / "explanation" / "licences.md").read_text()
    rows = dict(re.findall(r"^\| ([\w.-]+) \| (.+) \|$", text, re.MULTILINE))
    packages = needed(EXTRAS)
    assert len(packages) > 50
    assert sorted(packages - {_plain(name) for name in rows}) == []
    assert [name for name, licence in rows.items() if "unknown" in licence.lower() or licence == "?"] == []


def test_every_sample_photo_has_a_source_and_free_terms() -> None:
    text = (SAMPLES / "SOURCES.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+\.jpg)` \| .+ \| (.+) \|$", text, re.MULTILINE))
    assert list(rows) == sorted(file.name for file in SAMPLES.glob("*.jpg"))
    assert [name for name, terms in rows.items() if not re.search(r"; (CC0|public domain)\b", terms)] == []


def test_sample_photos_are_small_and_without_metadata() -> None:
    for file in SAMPLES.glob("*.jpg"):
        with Image.open(file) as photo:
            assert max(photo.size) <= 640, file.name
            assert not photo.getexif(), file.name
            assert photo.info.keys() <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "dpi"}, file.name
        assert file.stat().st_size < 100_000, file.name


def build(out: Path) -> Path:
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*words, str(out), str(ROOT)], check=True)
    (wheel,) = out.glob("haav-*.whl")
    return wheel


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs the dev extra")
    wheel = build(tmp_path)
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    tracked = subprocess.run(["git", "ls-files", "src/haav"], cwd=ROOT, capture_output=True, text=True)
    expected = {line.removeprefix("src/") for line in tracked.stdout.splitlines()}
    if tracked.returncode or not expected:
        pytest.skip("needs the repository")
    metadata = {name for name in names if re.match(r"haav-[\d.]+\.dist-info/", name)}
    there = {name for name in expected if (ROOT / "src" / name).exists()}
    assert there <= names - metadata
    added = names - metadata - there
    assert {name for name in added if "__pycache__" in name or not name.startswith("haav/")} == set()
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    models = sum(file.stat().st_size for file in (ROOT / "src/haav/models").rglob("*") if file.is_file())
    assert models <= LARGEST


@pytest.mark.slow
def test_two_builds_are_the_same_file_and_it_captions_in_a_clean_environment(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs the dev extra")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first, second = build(tmp_path / "one"), build(tmp_path / "two")
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True)
    pip = [str(tmp_path / "clean/bin/pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, str(first)], check=True)
    listed = subprocess.run([*pip[:1], "list", "--format=json"], capture_output=True, text=True, check=True)
    installed = {_plain(package["name"]) for package in json.loads(listed.stdout)}
    unwanted = {_plain(artefact.package) for artefact in ARTEFACTS.values()}
    unwanted |= {"opencv-python", "opencv-python-headless", "matplotlib", "onnxruntime"}
    assert installed & unwanted == set()
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone["HAAV_CACHE"] = str(tmp_path / "cache")

    def haav(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "clean/bin/haav"), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**alone, **environment})

    photo = str(ROOT / "src/haav/samples/cat.jpg")
    done = haav("caption", photo, "--json")
    assert " cat " in done.stdout, done.stderr
    assert re.findall(r"^Downloading (.*) \(\d+ MB, MIT\)", done.stderr, re.MULTILINE) == ["CLIP ViT-B/16, 8-bit"]
    done = haav("caption", photo, "--json", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert " cat " in done.stdout, done.stderr
    assert done.stderr == "", "nothing is fetched twice"
    done = haav("explain", photo, "--out", "why")
    assert 'needs matplotlib.\n  pip install "haav[plots]"' in done.stderr


@pytest.mark.slow
def test_an_export_captions_in_an_environment_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs the onnx extra")
    from haav.export.onnx import export_onnx

    (tmp_path / "wheel").mkdir()
    wheel = build(tmp_path / "wheel")
    export_onnx("best", tmp_path / "exported")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True)
    pip = [str(tmp_path / "clean/bin/pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, "numpy", "pillow", "safetensors", "onnxruntime"], check=True)
    python = str(tmp_path / "clean/bin/python")
    torch = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert torch.returncode
    words = [python, "-m", "haav.export.portable", str(tmp_path / "exported"), str(ROOT / "src/haav/samples/cat.jpg")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert " cat " in done.stdout
