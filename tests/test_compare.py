"""benchmarks/compare.py: what it calls slower, and that it runs two commits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest

from helpers import ROOT

COMPARE = run_path(str(ROOT / "benchmarks" / "compare.py"))


def turns(ratio: float, noise: float, count: int = 20) -> list[tuple[float, float]]:
    """Times of a machine that is up to three times slower at times, which hits both commits alike"""
    rng = np.random.default_rng(1)
    machine = rng.uniform(1, 3, count)
    return [(slow, slow * ratio * wobble) for slow, wobble in zip(machine, rng.normal(1, noise, count), strict=True)]


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict"),
    [(1.0, 0.05, "same"), (1.1, 0.02, "slower"), (0.8, 0.02, "faster"), (1.02, 0.001, "same"), (1.1, 1e9, "same")],
)
def test_a_change_beyond_noise_has_a_verdict(ratio: float, noise: float, verdict: str) -> None:
    pairs = turns(ratio, noise) if noise < 1 else [(1.0, 0.5), (1.0, 2.0)] * 10
    assert COMPARE["judge"](pairs)["verdict"] == verdict


def test_the_ratio_is_the_median_of_the_turns() -> None:
    result = COMPARE["judge"]([(1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (2.0, 4.0), (1.0, 50.0)])
    assert (result["ratio"], result["before, ms"], result["after, ms"]) == pytest.approx((2.0, 1000.0, 2000.0))


def test_a_commit_that_is_not_there_is_said() -> None:
    with pytest.raises(SystemExit, match="'nonsense' is no commit of this repository"), COMPARE["tree_of"]("nonsense"):
        pytest.fail("it made a work tree")


@pytest.mark.slow
def test_two_commits_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "turns.json"
    command = [sys.executable, "-m", "benchmarks.compare", "HEAD", "HEAD", "--rounds", "5", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))
    assert len(results) == 5
    assert all(0.1 < result["ratio"] < 10 for result in results.values())
    trees = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(trees.splitlines()) == 1


def test_benchmarks_name_themselves(capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run([sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, check=True, timeout=120)
    assert "decoding, operations" in capfd.readouterr().out
