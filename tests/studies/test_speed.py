"""Seconds of a training step, in turns"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning_fabric", reason="needs the train extra")
from haav.studies.ablate import config_of
from haav.studies.claims import CONFIRMED, NOT_RUN, REFUTED, Claim, judge, load_claims, measure, verdict_lines
from haav.studies.grid import Grid, Row, load_grid
from haav.studies.plan import Session, plan
from haav.studies.reproduce import reproduce
from haav.studies.speed import random_batch, relative, step_seconds, train_steps
from haav.studies.trained import STUDY
from haav.studies.verdicts_page import FIGURE, PAGE, write_page
from haav.text import BOS, PAD

SMALL = {
    **{"model.d_model": "16", "model.d_ff": "16", "model.heads": "2", "model.decoder_layers": "1"},
    **{"model.memory_slots": "2", "contrast.queue_size": "8", "contrast.hidden": "16", "train.batch": "3"},
}
ROWS = tuple(row.name for row in load_grid("speed").rows)
OURS = "shared + contrastive (HAAV)"


def small_grid() -> Grid:
    grid = load_grid("speed")
    return Grid(grid.title, "toy", SMALL, (0,), grid.rows, grid.reference, study="speed")


def study(folder: Path, seconds: dict[str, list[float]]) -> Path:
    file = folder / "speed" / STUDY
    file.parent.mkdir(parents=True)
    values = {row: {str(number): value for number, value in enumerate(each, 1)} for row, each in seconds.items()}
    file.write_text(json.dumps(values))
    return file


def test_every_row_takes_a_step_in_every_round() -> None:
    told: list[str] = []
    seconds = step_seconds(small_grid(), told.append, rounds=2)
    assert {row: list(each) for row, each in seconds.items()} == {row: ["1", "2"] for row in ROWS}
    assert all(value > 0 for each in seconds.values() for value in each.values())
    assert len(told) == 3, "the first round is run, and not counted"


@pytest.mark.parametrize("name", ROWS)
def test_a_step_trains_the_model_of_its_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = torch.optim.AdamW

    def watched(parameters: object, **options: object) -> torch.optim.AdamW:
        built.extend(parameters := list(parameters))  # type: ignore[call-overload]
        return build(parameters, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim, "AdamW", watched)
    row = small_grid().row(name)
    steps = train_steps(config_of("toy", {**SMALL, **row.settings}))
    next(steps)
    before = [parameter.detach().clone() for parameter in built]
    next(steps)
    trained = [parameter for parameter in built if parameter.requires_grad]
    changed = [not torch.equal(old, new) for old, new in zip(before, built, strict=True) if new.requires_grad]
    assert all(parameter.grad is not None for parameter in trained), "every part is used"
    assert sum(changed) > 0.9 * len(changed), "some biases have no gradient"


def test_a_batch_has_views_and_captions_of_full_length() -> None:
    config = config_of("toy", SMALL)
    batch = random_batch(config)
    assert batch.captions is not None
    assert batch.captions.shape[:2] == (3, config.train.captions)
    assert bool((batch.captions[:, :, 0] == BOS).all())
    assert not bool((batch.captions == PAD).any())
    assert {name: view.tokens.shape for name, view in batch.views.items()} == {
        name: (3, spec.max_tokens, spec.dim) for name, spec in config.model.views.items()
    }


def test_steps_are_compared_within_their_round() -> None:
    seconds = {"ours": {"1": 2.0, "2": 4.0}, "theirs": {"1": 3.0, "2": 5.0}}
    assert relative(seconds, "ours") == {"ours": {"1": 100, "2": 100}, "theirs": {"1": 150, "2": 125}}


def test_a_machine_that_becomes_slower_changes_no_verdict(tmp_path: Path) -> None:
    slower = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    study(tmp_path, {OURS: slower, "concatenated": [1.1 * each for each in slower]})
    claim = Claim("it is slower", "speed", "concatenated", "table:x", OURS, 15.0, measure="time")
    measured = measure(claim, load_grid("speed"), tmp_path / "speed")
    verdict = judge(claim, measured)
    assert (verdict.verdict, verdict.over, verdict.photos) == (CONFIRMED, "rounds", 6)
    assert (verdict.value, verdict.low, verdict.high) == pytest.approx((10, 10, 10))
    assert "6 rounds" in verdict_lines([(claim, verdict)])[1]
    other = Claim("it is faster", "speed", OURS, "table:x", "concatenated", measure="time")
    assert judge(other, measure(other, load_grid("speed"), tmp_path / "speed")).verdict == REFUTED
    noisy = {"1": [0.5, 1.6] * 3}
    file = tmp_path / "speed" / STUDY
    values = json.loads(file.read_text())
    values["concatenated"] = dict(zip(values[OURS], noisy["1"], strict=True))
    values[OURS] = dict.fromkeys(values[OURS], 1.0)
    file.write_text(json.dumps(values))
    needed = judge(claim, measure(claim, load_grid("speed"), tmp_path / "speed")).needed
    assert needed.endswith(" rounds"), needed


def test_the_page_has_steps_per_second_beside_those_of_the_paper(tmp_path: Path) -> None:
    write_page(Session(tmp_path))
    claims = [claim for claim in load_claims() if claim.table == "speed"]
    assert len(claims) == 4
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert page.count("`haav reproduce speed` |") == 4
    assert plan(Session(tmp_path), ["speed"]) == [], "no run is left"
    study(tmp_path, {row: [2.0, 2.0, 8.0] if row == OURS else [3.0, 3.0, 12.0] for row in ROWS})
    write_page(Session(tmp_path))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "| concatenated | 0.33 | 150 | 4.2 | 115 |" in page
    assert f"| {OURS} | 0.50 | 100 | 4.83 | 100 |" in page
    assert not (tmp_path / FIGURE).exists(), "times are no points of a score"
    judged = {claim.claim: judge(claim, measure(claim, load_grid("speed"), tmp_path / "speed")) for claim in claims}
    assert {verdict.verdict for verdict in judged.values()} == {CONFIRMED, REFUTED}
    assert NOT_RUN not in {verdict.verdict for verdict in judged.values()}


def test_differences_of_the_paper_are_those_of_its_speeds() -> None:
    grid = load_grid("speed")

    def percent(name: str) -> float:
        return 100 * grid.row(OURS).paper["steps/s"] / grid.row(name).paper["steps/s"]

    for claim in load_claims():
        if claim.table == "speed":
            assert claim.paper == round(percent(claim.row) - percent(claim.against)), claim


@pytest.mark.slow
def test_the_table_needs_no_data(tmp_path: Path) -> None:
    reproduce(Session(tmp_path), ["speed"])
    file = tmp_path / "speed" / STUDY
    written = file.read_text()
    assert set(json.loads(written)) == set(ROWS)
    reproduce(Session(tmp_path), ["speed"])
    assert file.read_text() == written, "what is measured is not repeated"
    assert isinstance(load_grid("speed").row(OURS), Row)
