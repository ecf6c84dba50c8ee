"""What the README and CONTRIBUTING show, run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from haav.cli.main import main
from helpers import ROOT


def blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.S)


def test_readme_commands_and_code_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy of what they read, so that `my-model` does not land in the project."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "photos").mkdir()
    for colour in ("red", "green"):
        Image.new("RGB", (60, 40), colour).save(tmp_path / "photos" / f"{colour}.png")
    shutil.copytree(ROOT / "tests" / "golden", tmp_path / "tests" / "golden")
    (tmp_path / "captions.json").write_text('{"a": "a dog on a beach", "b": "two cats"}')
    (tmp_path / "references.json").write_text('{"a": ["a dog runs on a beach"], "b": ["two cats on a bed", "cats"]}')
    shutil.copytree(ROOT / "src" / "haav" / "samples", tmp_path / "src" / "haav" / "samples")
    lines = [line[2:] for block in blocks("README.md", "console") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    ours = [words[1:] for words in commands if words[0] == ".venv/bin/haav"]
    assert len(ours) >= 8
    assert [words for words in commands if words[0] != ".venv/bin/haav"] == [["make", "caption"]]
    for words in ours:
        if words == ["serve"]:
            continue  # does not end by itself: tests/web/test_web.py
        assert main(words) == 0, (words, capsys.readouterr().err)
        assert capsys.readouterr().out
    first, second = (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        for code in blocks("README.md", "python")
    )
    assert first.returncode == 0, first.stderr
    assert "'cells': 0." in first.stdout
    assert second.returncode == 0, second.stderr
    assert len(second.stdout.splitlines()) == 2
    assert "'objects': 0.0" in second.stdout


def test_the_aggregator_of_contributing_keeps_the_laws() -> None:
    (code,) = blocks("CONTRIBUTING.md", "python")
    script = f"""
import sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
from torch import Tensor
from haav.model.aggregators.base import TwoTierAggregator, aggregators
from haav.types import Aggregated
{code}
from helpers import random_captions, random_views, tiny_model
model, views, captions = tiny_model(aggregator="median"), random_views(), random_captions()
without = {{name: view for name, view in views.items() if name != "grid"}}
logits = model(without, captions).logits
assert logits.isfinite().all()
assert not torch.allclose(logits, model(views, captions).logits)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
"""`make docs` checks the links of the pages in docs/"""


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert ((ROOT / page).parent / target).exists(), target
