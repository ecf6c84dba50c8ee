"""Grids: what they say is what is trained; what is done is not repeated; the table is right."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from haav.cli.main import main
from haav.config.load import find_recipe, flags_from, grid_names
from haav.errors import ConfigError, TrainingError
from haav.model.build import load_config
from haav.studies.ablate import run_grid
from haav.studies.grid import Grid, Row, load_grid
from haav.studies.outcomes import Outcome, read_outcome, run_folder, table
from haav.studies.processes import Processes, _environment

pytest.importorskip("lightning_fabric", reason="needs the train extra")
TINY = """
title: Two ways
recipe: toy
base: {train: {epochs: 2, evaluate_every: 1}}
seeds: [0]
rows:
  - {name: "mean of views", model: {aggregator: mean}, paper: {CIDEr: 125.2}}
  - {name: HAAV}
"""


@pytest.mark.parametrize("name", grid_names())
def test_every_row_of_every_grid_is_a_valid_config(name: str) -> None:
    grid = load_grid(name)
    assert len(grid.rows) >= 2 or grid.study != "train"
    for row in grid.rows:
        settings = grid.settings_of(row, 0, {})
        flags = flags_from([(f"--{key}", value) for key, value in settings.items()])
        load_config(file=find_recipe(grid.recipe), flags=flags)


def test_the_grids_are_the_papers_rows() -> None:
    rows = {row.name: row for row in load_grid("encodings").rows}
    printed = [row.paper["CIDEr"] for row in rows.values() if row.paper]
    assert printed == [122.8, 125.6, 121.1, 125.4, 125.8, 127.6]
    assert [name for name, row in rows.items() if not row.paper] == ["HAAV from the mean"], "ours"
    assert rows["unshared"].settings == {"model.encoding": "unshared", "contrast.enabled": "false"}
    decoders = {row.paper["CIDEr"] for row in load_grid("decoders").rows if row.paper}
    assert decoders == {125.1, 125.2, 125.5, 122.9, 124.8, 127.6}


@pytest.mark.slow
def test_a_grid_is_trained_once_resumed_and_tabled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.yaml").write_text(TINY)
    words = ["ablate", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out"), "--model.d_model", "16"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "| mean of views |" in shown.out
    assert "125.2" in shown.out
    place = tmp_path / "out" / "mean-of-views" / "seed-0"
    assert "aggregator: mean" in (place / "config.yaml").read_text()
    result = json.loads((place / "result.json").read_text())
    assert result["gigabytes"] > 0.1
    assert result["parameters"] > 1000
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("checkpoint.safetensors")}
    (place / "result.json").unlink()  # cut off between training and scoring: resumed, nothing left to train
    assert main(words) == 0
    assert json.loads((place / "result.json").read_text())["scores"] == result["scores"]
    other = tmp_path / "out" / "haav" / "seed-0" / "checkpoint.safetensors"
    assert other.stat().st_mtime_ns == before[other], "what was done is not touched"
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("mean of views") >= 4, "bar, point, table, captions"
    assert page.count('<th scope="row">people</th>') == page.count('<figure class="result">') > 0, (
        "what people said stands beside"
    )
    assert "CIDEr on val by epoch" in page
    assert "https://" not in page
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 1
    (place / "result.json").write_text("{")
    assert main(words) == 1
    assert "is damaged" in capsys.readouterr().err
    assert main([*words[:-1], "32"]) == 1
    assert "was started with other settings: model.d_model 16 instead of 32" in capsys.readouterr().err


def test_a_run_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    grid = Grid("", "toy", {"train.epochs": "1"}, (0,), (Row("broken", {"model.heads": "7"}, {}),))
    with pytest.raises(TrainingError, match="broken, seed 0 ended with an error"):
        run_grid(grid, tmp_path, {})


def test_a_row_that_fails_stops_none_of_those_that_wait(tmp_path: Path) -> None:
    rows = tuple(Row(f"broken {letter}", {"model.heads": "7"}, {}) for letter in "abcd")
    told: list[str] = []
    with pytest.raises(TrainingError, match="broken a, seed 0 ended with an error"):
        run_grid(Grid("", "toy", {}, (0,), rows), tmp_path, {}, report=told.append)
    assert [line.split(",")[0] for line in told if line.endswith("begins")] == [row.name for row in rows]


@pytest.mark.slow
def test_what_follows_from_an_item_comes_before_the_other_items() -> None:
    order: list[str] = []
    tree = {"a": ["a1", "a2"], "a1": ["a11"], "b": ["b1"]}
    Processes(1).work_through(["a", "b"], order.append, lambda item, _: tree.get(item, []))
    assert order == ["a", "a1", "a11", "a2", "b", "b1"]


def test_as_many_items_at_once_as_there_are_workers() -> None:
    both, lock = threading.Barrier(2, timeout=60), threading.Lock()
    now, most = 0, 0

    def work(item: int) -> None:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        both.wait()  # not passed by one alone
        with lock:
            now -= 1

    Processes(2).work_through(range(6), work, lambda item, _: [])
    assert most == 2


def test_an_item_that_fails_leads_to_nothing_and_stops_no_other() -> None:
    done: list[str] = []

    def work(item: str) -> None:
        done.append(item)
        if item in ("a", "c"):
            raise TrainingError(f"{item} failed")

    with pytest.raises(TrainingError, match="a failed"):
        Processes(1).work_through(["a", "b", "c", "d"], work, lambda item, _: [f"{item}1"] if len(item) == 1 else [])
    assert done == ["a", "b", "b1", "c", "d", "d1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_grid_leaves_no_training_behind(tmp_path: Path, number: int) -> None:
    """Only the grid gets the signal. Its training saves a checkpoint, and no other run begins."""
    (tmp_path / "grid.yaml").write_text(TINY.replace("epochs: 2", "epochs: 2000"))
    words = ["ablate", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out"), "--seeds", "0,1"]
    with open(tmp_path / "told", "w") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "haav", *words],
            stderr=told,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if make runs in the background
        )
    try:
        deadline = time.monotonic() + 600
        place = tmp_path / "out" / "mean-of-views" / "seed-0"
        while not (place / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=300) == 130
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "told").read_text()
    assert "mean of views, seed 0 was interrupted. The same command goes on with it." in text
    assert text.count("begins") == 1
    assert (place / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_a_row_that_fails_is_told_at_once_and_stops_no_other(tmp_path: Path) -> None:
    rows = (Row("broken", {"model.heads": "7"}, {}), Row("whole", {}, {}))
    grid = Grid("", "toy", {"train.epochs": "1", "model.d_model": "16"}, (0,), rows)
    told: list[str] = []
    with pytest.raises(TrainingError, match="broken, seed 0 ended with an error"):
        run_grid(grid, tmp_path, {}, report=told.append)
    assert any("broken, seed 0 ended with an error" in line for line in told[:2])
    assert read_outcome(run_folder(tmp_path, "whole", 0)) is not None


def test_a_table_has_means_over_seeds_and_the_papers_figure() -> None:
    grid = Grid("t", "toy", {}, (0, 1), (Row("a", {}, {"CIDEr": 120.5}), Row("b", {}, {})))
    scores = [{"CIDEr": 0.5, "BLEU-4": 0.2, "ROUGE-L": 0.4}, {"CIDEr": 0.7, "BLEU-4": 0.2, "ROUGE-L": 0.4}]
    outcomes = [Outcome("a", seed, scores[seed], "val", 2_000_000, 1.5, 10.0, 2.0, 3.0, []) for seed in (0, 1)]
    heads, line = table(grid, outcomes)
    cells = dict(zip(heads, line, strict=True))
    assert cells["CIDEr"] == f"60.0 ± {12.706 * math.sqrt(0.02) * 100 / math.sqrt(2):.1f}"
    assert (cells["BLEU-4"], cells["paper CIDEr"], cells["seeds"]) == ("20.0 ± 0.0", "120.5", "0 1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rows: [{name: a}]", "is not a grid"),
        ("recipe: toy\nrows: []", "rows need names that differ"),
        ("recipe: toy\nrows: [{name: a b}, {name: a-b}]", "rows need names that differ"),
        ("recipe: [", "is not a grid"),
        ("recipe: toyy\nrows: [{name: a}]", "unknown recipe"),
    ],
)
def test_mistakes_in_a_grid_are_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_grid(str(tmp_path / "grid.yaml"))
    with pytest.raises(ConfigError, match="unknown grid 'encoding'. Did you mean 'encodings'"):
        load_grid("encoding")


def test_rows_are_compared_with_the_reference_seed_by_seed() -> None:
    rows = (Row("mean", {}, {}), Row("HAAV", {}, {}))
    grid = Grid("", "toy", {}, (0, 1, 2), rows, reference="HAAV")
    scores = {"HAAV": (0.5, 0.6, 0.7), "mean": (0.49, 0.58, 0.67)}
    outcomes = [
        Outcome(name, seed, {"CIDEr": value, "BLEU-4": 0.1, "ROUGE-L": 0.2}, "val", 1, 1.0, 1.0, 1.0, 1.0, [])
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]
    heads, mean, own = table(grid, outcomes)
    place = heads.index("CIDEr − HAAV")
    half = 4.303 * 1.0 / math.sqrt(3)  # the differences are -1, -2, -3
    assert mean[place] == f"-2.0 ± {half:.1f}"
    assert own[place] == ""


def test_a_reference_that_is_no_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(TINY + "reference: HAV\n")
    with pytest.raises(ConfigError, match="Did you mean 'HAAV'"):
        load_grid(str(tmp_path / "grid.yaml"))


def test_runs_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert _environment(3)["OMP_NUM_THREADS"] == "2"
    assert _environment(20)["OMP_NUM_THREADS"] == "1"
