"""Commands where a package that they need is not installed: a sentence with the command that installs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from haav.errors import EXTRAS
from helpers import ROOT, SAMPLES, save_model

RUN_WITHOUT = """
import json, sys

class Hidden:
    '''As if these packages were not installed'''
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden, commands = map(json.loads, sys.argv[1:])
sys.meta_path.insert(0, Hidden())
from haav.cli.main import main
for words in commands:
    print(f"exit {main(words)}", file=sys.stderr)
"""


def run_without(hidden: list[str], *commands: list[str]) -> list[str]:
    """What each command wrote to standard error"""
    words = [sys.executable, "-c", RUN_WITHOUT, json.dumps(hidden), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    texts = re.split(r"exit 1\n", done.stderr)
    assert len(texts) == len(commands) + 1, done.stderr
    return texts[:-1]


def test_commands_that_need_torch_say_so(tmp_path: Path) -> None:
    commands = [
        ["caption", "photo.jpg"],
        ["explain", "photo.jpg", "--out", "why"],
        ["train", "toy", "--out", str(tmp_path)],
        ["extract", "--images", str(SAMPLES), "--store", str(tmp_path / "views")],
        ["export", "best", "--out", str(tmp_path)],
    ]
    for words, said in zip(commands, run_without(["torch"], *commands), strict=True):
        assert said == f"haav {words[0]} needs torch, which is not installed.\n  pip install torch\n"


def test_commands_that_need_an_extra_name_it(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model"))
    commands = {
        "onnx": ["export", model, "--out", str(tmp_path / "exported")],
        "plots": ["explain", str(SAMPLES / "cat.jpg"), "--model", model, "--out", str(tmp_path / "why")],
        "web": ["serve", "--model", model],
        "train": ["train", "toy", "--out", str(tmp_path / "run")],
    }
    hidden = ["onnx", "matplotlib", "fastapi", "lightning_fabric"]
    for extra, said in zip(commands, run_without(hidden, *commands.values()), strict=True):
        assert re.search(rf"needs \w+.*\n  pip install [\"']haav\[{extra}\][\"']", said), said


def test_a_server_without_the_parser_of_forms_does_not_start(tmp_path: Path) -> None:
    [said] = run_without(["python_multipart"], ["serve", "--model", str(save_model(tmp_path / "model"))])
    assert 'needs python_multipart, which is not installed.\n  pip install "haav[web]"' in said


def test_every_package_of_an_extra_is_known() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = {"faiss_cpu": "faiss"}
    for extra, lines in project["optional-dependencies"].items():
        for name in (Requirement(line).name.replace("-", "_") for line in lines):
            if extra not in ("all", "dev", "docs") and name != "haav":
                assert EXTRAS.get(modules.get(name, name)) == extra, name
