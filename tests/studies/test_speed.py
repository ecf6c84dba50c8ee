"""Seconds of a training step, in turns"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric", reason="needs the train extra")
from haav.errors import ConfigError
from haav.studies.ablate import config_of, run_grid
from haav.studies.claims import CONFIRMED, REFUTED, UNDECIDED, Claim, judge, load_claims, measure, verdict_lines
from haav.studies.grid import Grid, load_grid
from haav.studies.plan import Session, plan
from haav.studies.reproduce import reproduce
from haav.studies.speed import LEAST_WORDS, Speed, measure_speed, random_batch, read_speed, step_seconds, train_steps
from haav.studies.trained import STUDY
from haav.studies.verdicts_page import FIGURE, JSON, PAGE, write_page
from haav.text import BOS, EOS, PAD, SPECIAL

SMALL = {
    **{"model.d_model": "16", "model.d_ff": "16", "model.heads": "2", "model.decoder_layers": "1"},
    **{"model.memory_slots": "2", "contrast.queue_size": "100", "contrast.hidden": "16", "train.batch": "3"},
}
GRID = load_grid("speed")
ROWS = tuple(row.name for row in GRID.rows)
OURS = GRID.reference
SLOWER = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def small_grid() -> Grid:
    return replace(GRID, recipe="toy", settings=SMALL)


def study(folder: Path, seconds: dict[str, list[float]]) -> Path:
    """What was measured, of the rows that are not named as of HAAV"""
    values = {
        row: {str(number): value for number, value in enumerate(seconds.get(row, seconds[OURS]), 1)} for row in ROWS
    }
    file = folder / "speed" / STUDY
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": "an abacus", "seconds": values}))
    return file


def test_its_rows_are_the_papers_encodings() -> None:
    rows = {row.name: row.settings for row in load_grid("encodings").rows if row.paper}
    assert {row.name: row.settings for row in GRID.rows} == rows


def test_every_row_takes_a_step_in_every_round(tmp_path: Path) -> None:
    machine, seconds = step_seconds(small_grid(), rounds=2)
    assert machine
    assert {row: list(each) for row, each in seconds.items()} == {row: ["1", "2"] for row in ROWS}, "the first is not"
    assert all(value > 0 for each in seconds.values() for value in each.values())


@pytest.mark.parametrize("name", ROWS)
def test_a_step_trains_the_model_of_its_row(name: str) -> None:
    config = config_of("toy", {**SMALL, **GRID.row(name).settings})
    steps = train_steps(config, torch.device("cpu"))
    learner = next(steps)
    momentum = {} if learner.contrast is None else dict(learner.contrast.named_parameters())
    assert (learner.contrast is not None) == ("contrastive" in name)
    before = {key: value.detach().clone() for key, value in learner.named_parameters()}
    followed = {key: value.detach().clone() for key, value in momentum.items()}
    position = 0 if learner.contrast is None else int(learner.contrast.position)
    next(steps)
    changed = [not torch.equal(before[key], value) for key, value in learner.named_parameters() if value.requires_grad]
    assert sum(changed) > 0.9 * len(changed), "some biases have no gradient"
    if learner.contrast is not None:
        assert int(learner.contrast.filled) == 100, "the queue is full from the first step"
        assert int(learner.contrast.position) != position
        assert any(not torch.equal(followed[key], value) for key, value in momentum.items() if not value.requires_grad)


def test_a_batch_has_views_of_full_length_and_captions_of_several_lengths() -> None:
    config = config_of("toy", {**SMALL, "train.batch": "50", "train.captions": "2"})
    batch = random_batch(config)
    assert batch.captions is not None
    assert batch.captions.shape[:2] == (50, 2)
    for words in batch.captions.flatten(0, 1).tolist():
        length = words.index(EOS)
        assert words[0] == BOS
        assert length >= LEAST_WORDS + 1
        assert all(word >= len(SPECIAL) for word in words[1:length])
        assert set(words[length + 1 :]) <= {PAD}
    lengths = (batch.captions != PAD).sum(dim=2)
    assert int(lengths.max()) == batch.captions.shape[2]
    assert int(lengths.min()) < int(lengths.max())
    assert {name: view.tokens.shape for name, view in batch.views.items()} == {
        name: (50, spec.max_tokens, spec.dim) for name, spec in config.model.views.items()
    }


def test_steps_are_compared_within_their_round() -> None:
    speed = Speed("", {"ours": {"1": 2.0, "2": 4.0}, "theirs": {"1": 3.0, "2": 5.0}})
    assert speed.percent("theirs", "ours") == {"1": 150, "2": 125}


def test_a_machine_that_becomes_slower_changes_no_verdict(tmp_path: Path) -> None:
    study(tmp_path, {OURS: SLOWER, "concatenated": [1.1 * each for each in SLOWER]})
    slower = Claim("it is slower", "speed", "concatenated", "table:x", OURS, 15.0)
    faster = Claim("it is faster", "speed", OURS, "table:x", "concatenated")
    verdict = judge(slower, measure(slower, GRID, tmp_path / "speed"))
    assert (verdict.verdict, verdict.value) == (CONFIRMED, pytest.approx(10))
    assert (verdict.low, verdict.high) == pytest.approx((10, 10))
    assert "6 rounds" in verdict_lines([(slower, verdict)])[1]
    assert judge(faster, measure(faster, GRID, tmp_path / "speed")).verdict == REFUTED


def test_rounds_that_differ_leave_a_claim_undecided(tmp_path: Path) -> None:
    """Of differences +10, −6, …: mean 2, standard error 3.6, Student's quantile 2.571"""
    study(tmp_path, {OURS: [1.0] * 6, "concatenated": [1.10, 0.94] * 3})
    claim = Claim("it is slower", "speed", "concatenated", "table:x", OURS)
    verdict = judge(claim, measure(claim, GRID, tmp_path / "speed"))
    assert verdict.verdict == UNDECIDED
    assert verdict.value == pytest.approx(2)
    assert verdict.low is not None
    assert verdict.high is not None
    assert verdict.high - verdict.low == pytest.approx(2 * 2.571 * 3.578, rel=0.2), "a plain bootstrap: 10.7"
    assert f"delete speed/{STUDY}" in verdict.needed


def test_the_page_has_steps_per_second_beside_those_of_the_paper(tmp_path: Path) -> None:
    write_page(Session(tmp_path))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert page.count("not run | table:efficiency | `haav reproduce speed` |") == 4
    assert plan(Session(tmp_path), ["speed"]) == [], "no training is left"
    (tmp_path / FIGURE).write_text("of other results")
    study(tmp_path, {OURS: [2.0, 2.0, 8.0], "concatenated": [3.0, 3.0, 12.0]})
    write_page(Session(tmp_path))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "| concatenated | 0.17 | 150 | 4.2 | 115 |" in page
    assert f"| {OURS} | 0.25 | 100 | 4.83 | 100 |" in page
    assert "Ours on an abacus, the paper's on a GPU." in page
    assert not (tmp_path / FIGURE).exists(), "times are no points of a score"
    tree = json.loads((tmp_path / JSON).read_text())
    judged = {verdict["claim"]: verdict["verdict"] for verdict in tree["verdicts"] if verdict["table"] == "speed"}
    assert judged["A training step with concatenated views takes longer than HAAV's"] == CONFIRMED
    assert tree["tables"]["speed"]["study"]["machine"] == "an abacus"


def test_what_was_measured_of_other_rows_does_not_count(tmp_path: Path) -> None:
    file = study(tmp_path, {OURS: SLOWER})
    assert read_speed(file, GRID) is not None
    assert read_speed(file, replace(GRID, rows=GRID.rows[1:])) is None
    assert read_speed(tmp_path / "nothing", GRID) is None


def test_differences_of_the_paper_are_those_of_its_speeds() -> None:
    def percent(name: str) -> float:
        return 100 * GRID.row(OURS).paper["steps/s"] / GRID.row(name).paper["steps/s"]

    claims = [claim for claim in load_claims() if claim.table == "speed"]
    assert len(claims) == 4
    for claim in claims:
        assert claim.paper == round(percent(claim.row) - percent(claim.against)), claim


def test_a_grid_of_what_is_not_trained_is_refused(tmp_path: Path) -> None:
    for name in ("speed", "growth"):
        with pytest.raises(ConfigError, match=f"haav reproduce {name}"):
            run_grid(load_grid(name), tmp_path, {})


def test_the_study_is_measured_once_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    measured = measure_speed(small_grid(), told.append, rounds=1)
    assert set(measured["seconds"]) == set(ROWS)
    assert len(told) == 1
    file = study(tmp_path, {OURS: SLOWER})
    written = file.read_text()
    reproduce(Session(tmp_path), ["speed"])
    assert file.read_text() == written


@pytest.mark.slow
def test_the_table_needs_no_data(tmp_path: Path) -> None:
    reproduce(Session(tmp_path), ["speed"])
    assert read_speed(tmp_path / "speed" / STUDY, GRID) is not None
