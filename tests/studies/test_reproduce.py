"""`haav reproduce`: tables, plans, verdicts; a session that is killed goes on and comes to the same result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from haav.cli.main import main
from haav.config.load import grid_names, table_names
from haav.data.toy import make_toy
from haav.errors import ConfigError, TrainingError
from haav.studies.ablate import THEN, config_of, run_grid, run_key
from haav.studies.claims import (
    CONFIRMED,
    LOST,
    NOT_RUN,
    REFUTED,
    UNDECIDED,
    Claim,
    Measured,
    Verdict,
    cider_lost,
    judge,
    load_claims,
    measure,
    verdict_lines,
)
from haav.studies.grid import Grid, Row, load_grid, with_budget
from haav.studies.hours import training_flops
from haav.studies.outcomes import (
    PHOTOS,
    RESULT,
    Outcome,
    chosen_rate,
    final_folder,
    flatness,
    last_fifth,
    read_outcome,
    run_folder,
    table,
)
from haav.studies.plan import Session, check_parameters, plan
from haav.studies.reproduce import reproduce
from haav.studies.trained import Trained, ensemble_file, study_models, study_values
from haav.studies.verdicts_page import FIGURE, JSON, PAGE, write_page
from haav.train.run import RunFiles

KEPT = sorted((Path(__file__).parents[2] / "docs" / "experiments").glob("paper-*.tar.xz"))
pytest.importorskip("lightning_fabric", reason="needs the train extra")
TOY = [
    *("--data.dataset", "toy", "--data.views", "objects,grid,text", "--data.min_count", "1"),
    *("--model.d_model", "16", "--model.d_ff", "16", "--model.memory_slots", "2", "--model.decoder_layers", "1"),
    *("--contrast.queue_size", "50", "--contrast.hidden", "16", "--train.warmup_steps", "2"),
    *("--train.epochs", "2", "--train.batch", "40", "--train.captions", "1", "--decode.beam", "1"),
]
CLAIM = Claim("a is ahead of b", "encodings", "a", "table:x", "b", 2.0)


def outcome(row: str, seed: int, cider: float = 0.5, **more: Any) -> Outcome:
    scores = {"CIDEr": cider, "BLEU-4": 0.2, "ROUGE-L": 0.4}
    return replace(Outcome(row, seed, scores, "val", 1_000_000, 1.0, 10.0, 1.0, 6.0, [(1, 0.4), (2, cider)]), **more)


def done(place: Path, result: Outcome, photos: dict[str, float] | None = None) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / RESULT).write_text(json.dumps(asdict(result)))
    (place / PHOTOS).write_text(json.dumps(photos or {"p": result.scores["CIDEr"]}))


# Grids and claims


@pytest.mark.parametrize("name", grid_names())
def test_every_grid_builds_the_models_of_its_rows(name: str) -> None:
    if name not in table_names():
        pytest.skip("no table of the paper")
    grid = load_grid(name)
    planned = plan(Session(Path("nowhere"), dry=True), [name])
    if not grid.is_trained:
        assert planned == []
        return
    assert {row.row for row in planned} == {row.name for row in grid.rows}
    assert len(planned) == len(grid.rows)
    assert all(row.parameters > 10_000 and row.left == row.runs for row in planned)
    assert planned[0].runs == max(1, len(grid.rates)) + len(grid.seeds) - 1, "rates with one seed, then the others"


def test_every_claim_names_rows_of_its_table_once() -> None:
    claims = load_claims()
    assert len({claim.claim for claim in claims}) == len(claims)
    for claim in claims:
        grid = load_grid(claim.table)
        assert claim.table in table_names()
        if grid.study in ("train", "growth", "speed"):
            assert set(claim.rows) <= {row.name for row in grid.rows}, claim
        assert len(claim.more_than) in ((0, 2) if claim.against else (0,)), claim


def test_differences_of_the_paper_are_those_of_its_rows() -> None:
    for claim in load_claims():
        rows = {row.name: row.paper.get("CIDEr") for row in load_grid(claim.table).rows}
        if claim.paper is not None and claim.measure == "CIDEr":
            plus, minus, more, *less = [rows[name] or 0.0 for name in claim.rows] + [0.0, 0.0]
            assert claim.paper == pytest.approx(plus - minus - (more - less[0]), abs=0.01), claim


def test_the_papers_own_settings_have_its_parameter_counts() -> None:
    session = Session(Path("nowhere"), full=True, dry=True)
    assert sorted(session.paper["parameters"].values()) == [
        *(13_120_268, 13_520_396, 15_361_036, 20_812_556, 22_653_196, 49_104_908)
    ]
    assert check_parameters(session) == []
    grid = session.grid("main")
    assert (grid.recipe, grid.rows[0].then, grid.rates) == ("release-xe", "release-scst", ())
    session.paper["parameters"]["shared"] += 1
    assert check_parameters(session) == ["shared: 13,520,396 parameters instead of 13,520,397"]


# Rates, flatness, shared runs


def test_the_rate_with_the_best_val_is_chosen_once_all_are_tried(tmp_path: Path) -> None:
    row = Row("a", {}, {})
    grid = Grid("", "toy", {}, (0, 1), (row,), rates=(0.001, 0.01))
    done(run_folder(tmp_path, "a", 0, 0.001), outcome("a", 0, curve=[(1, 0.9), (2, 0.5)]))
    assert chosen_rate(grid, tmp_path, row) is None
    assert final_folder(grid, tmp_path, row, 1) is None
    done(run_folder(tmp_path, "a", 0, 0.01), outcome("a", 0, curve=[(1, 0.6), (2, 0.8)]))
    assert chosen_rate(grid, tmp_path, row) == 0.001
    assert final_folder(grid, tmp_path, row, 1) == tmp_path / "a" / "lr-0.001" / "seed-1"


def test_each_run_is_looked_at_once_and_the_first_seed_chooses_the_rate(tmp_path: Path) -> None:
    grid = Grid("", "toy", {}, (0, 1), (Row("a", {}, {}),), rates=(0.001, 0.01))
    for seed, rate, cider in ((0, 0.001, 0.5), (0, 0.01, 0.75), (1, 0.01, 0.25)):
        done(run_folder(tmp_path, "a", seed, rate), outcome("a", seed, cider, lr=rate))
    told: list[str] = []
    ciders = [result.scores["CIDEr"] for result in run_grid(grid, tmp_path, {}, report=told.append)]
    assert ciders == [0.75, 0.25]
    assert told == [
        *("a, seed 0, rate 0.001: CIDEr 50.0 on val", "a, seed 0, rate 0.01: CIDEr 75.0 on val"),
        *("a: rate 0.01 is the best on val", "a, seed 1, rate 0.01: CIDEr 25.0 on val"),
    ]


def test_only_the_chosen_rows_are_looked_at_and_the_table_has_all(tmp_path: Path) -> None:
    grid = Grid("", "toy", {}, (0,), (Row("a", {}, {}), Row("b", {}, {})))
    for row in ("a", "b"):
        done(run_folder(tmp_path, row, 0), outcome(row, 0))
    told: list[str] = []
    assert len(run_grid(grid, tmp_path, {}, report=told.append, only=["b"])) == 2
    assert told == ["b, seed 0: CIDEr 50.0 on val"]
    assert "| a |" in (tmp_path / "table.md").read_text()


def test_the_last_fifth_is_read_off_the_curve() -> None:
    """Of 10 epochs it begins at 8. Between 6 and 10 the curve rises from 0.70 to 0.74: 0.02 to go at 8."""
    assert last_fifth([(2, 0.1), (6, 0.70), (10, 0.74)]) == pytest.approx(2.0)
    assert last_fifth([(5, 0.5), (8, 0.801), (10, 0.8)]) == pytest.approx(-0.1)
    assert np.isnan(last_fifth([(10, 0.5)]))
    grid = Grid("", "toy", {}, (0,), (Row("a", {}, {}), Row("b", {}, {}), Row("c", {}, {})))
    curves = {"a": [(8, 0.5), (10, 0.502)], "b": [(8, 0.5), (10, 0.51)], "c": [(10, 0.5)]}
    heads, *lines = table(grid, [outcome(name, 0, curve=curve) for name, curve in curves.items()])
    flat = [(line[heads.index("last fifth")], line[heads.index("flat")]) for line in lines]
    assert flat == [("+0.20", "yes"), ("+1.00", "no"), ("–", "–")]
    two = [outcome("a", 0, curve=curves["a"]), outcome("a", 1, curve=curves["b"])]
    assert flatness(two) == ["+0.60 ± 5.08", "no"], "half of 0.8, times Student's 12.706"


def test_results_that_were_copied_here_are_not_reused_with_other_settings(tmp_path: Path) -> None:
    grid = Grid("", "toy", {"model.d_model": "16"}, (0,), (Row("a", {}, {}),))
    place = run_folder(tmp_path, "a", 0)
    done(place, outcome("a", 0))
    settings = place.with_suffix(".json")
    settings.write_text(json.dumps({"model.d_model": "32", "train.seed": "0"}))
    with pytest.raises(TrainingError, match=r"other settings: model\.d_model 32 instead of 16"):
        run_grid(grid, tmp_path, {})
    settings.write_text(json.dumps({"model.d_model": "16", "train.seed": "0"}))
    assert run_grid(grid, tmp_path, {}) == [outcome("a", 0, curve=[[1, 0.4], [2, 0.5]])]
    assert run_grid(grid, tmp_path, {"train.recompute": "true"}), "it changes no bits"
    twice = replace(grid, rows=(replace(grid.rows[0], then="flickr8k-scst"),))
    with pytest.raises(TrainingError, match="the recipe of the second stage None instead of flickr8k-scst"):
        run_grid(twice, tmp_path, {})
    settings.write_text(json.dumps({"model.d_model": "16", "train.seed": "0", "then": "flickr8k-scst"}))
    assert run_grid(twice, tmp_path, {})
    with pytest.raises(TrainingError, match="the recipe of the second stage flickr8k-scst instead of None"):
        run_grid(grid, tmp_path, {})


def test_a_result_from_another_machine_is_taken_over_if_only_paths_differ(tmp_path: Path) -> None:
    """Without its captions and its model. A study trains again: it needs the model."""
    photos = [
        {"filename": f"{split}.jpg", "split": split, "sentences": [{"raw": "a dog"}]} for split in ("train", "test")
    ]
    (tmp_path / "here.json").write_text(json.dumps({"images": photos}))
    grid = Grid("", "toy", {"train.epochs": "3", "data.store": "views"}, (0,), (Row("b", {}, {}),))
    there = {**grid.settings, "data.dataset": "/there.json", "train.seed": "0"}

    def copied(name: str, settings: dict[str, str], photo: str = "test.jpg") -> Path:
        place = run_folder(tmp_path / name, "a", 0)
        result = outcome("a", 0, split="test", key=run_key(config_of("toy", settings), ""))
        done(place, result, {photo: 0.5})
        place.with_suffix(".json").write_text(json.dumps(settings))
        return place

    def taken(grid: Grid = grid) -> str:
        shutil.rmtree(tmp_path / "y", ignore_errors=True)
        with suppress(TrainingError):  # of a training, which fails here: there are no views
            run_grid(grid, tmp_path / "y", {"data.dataset": str(tmp_path / "here.json")}, pool=tmp_path)
        result = read_outcome(run_folder(tmp_path / "y", "b", 0))
        assert result is None or result.row == "b"
        return result.run if result else ""

    copied("other settings", {**there, "train.epochs": "4"})
    copied("other photos", there, photo="stranger.jpg")
    assert taken() == ""
    place = copied("right", there)
    assert taken() == os.path.relpath(place, tmp_path / "y" / "b" / "seed-0")
    assert taken(replace(grid, study="noise")) == ""
    RunFiles(place).best.mkdir()
    assert taken(replace(grid, study="noise"))


def test_results_of_another_data_set_are_not_shown_as_those_of_this_one(tmp_path: Path) -> None:
    photos = [{"filename": "x.jpg", "split": split, "sentences": [{"raw": "a dog"}]} for split in ("val",)]
    (tmp_path / "data.json").write_text(json.dumps({"images": photos}))
    grid, settings = Grid("", "toy", {}, (0,), (Row("a", {}, {}),)), {"data.dataset": str(tmp_path / "data.json")}
    done(run_folder(tmp_path, "a", 0), outcome("a", 0), {"y.jpg": 0.5})
    with pytest.raises(
        TrainingError, match=r"scored on other photos than those of .*data\.json.\n  Name another --out"
    ):
        run_grid(grid, tmp_path, settings)
    done(run_folder(tmp_path, "a", 0), outcome("a", 0), {"x.jpg": 0.5})
    assert len(run_grid(grid, tmp_path, settings)) == 1


def test_a_study_without_the_model_says_where_to_get_it(tmp_path: Path) -> None:
    grid = Grid("", "toy", {}, (0,), (Row("a", {}, {}),), study="noise")
    done(run_folder(tmp_path, "a", 0), outcome("a", 0))
    with pytest.raises(TrainingError, match=r"a/seed-0/best is not here.*\n.*or delete .*a/seed-0 to train it again"):
        study_models(grid, tmp_path, {})


def test_recomputed_layers_make_no_other_run() -> None:
    keys = {run_key(config_of("toy", {"train.recompute": value}), "") for value in ("true", "false")}
    assert len(keys) == 1


def test_photos_without_captions_make_another_run_only_where_they_are_read() -> None:
    alone, named = {"data.dataset": "d"}, {"data.dataset": "d", "data.unlabelled": "u", "data.unlabelled_store": "s"}
    keys = [
        run_key(config_of("toy", {**settings, "train.unlabelled_batch": batch}), "")
        for settings, batch in ((alone, "0"), (named, "0"), (named, "8"))
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.skipif(not KEPT, reason="needs a checkout: results are not in the package")
@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_kept_results_are_those_of_runs_as_they_would_be_now(kept: Path) -> None:
    """Otherwise a setting that was added would make `paper.sh` train them again for other tables."""
    with tarfile.open(kept) as tar:
        texts = {name: tar.extractfile(name).read() for name in tar.getnames() if name.endswith(".json")}  # type: ignore[union-attr]
    results = [name for name in texts if name.endswith(f"/{RESULT}")]
    assert results
    for name in results:
        grid, settings = load_grid(name.split("/")[1]), json.loads(texts[name.replace(f"/{RESULT}", ".json")])
        result = json.loads(texts[name])
        settings.pop(THEN, None)
        key = run_key(config_of(grid.recipe, settings), grid.row(result["row"]).then)
        assert key == result["key"], name


def test_rows_with_fewer_labels_have_as_many_steps() -> None:
    grid = load_grid("labels")
    settings = grid.settings_of(grid.row("HAAV 40 %"), 0, {"train.epochs": "6", "train.evaluate_every": "1"})
    assert (settings["train.epochs"], settings["train.evaluate_every"]) == ("15", "2")
    whole = grid.settings_of(grid.row("HAAV 100 %"), 0, {"train.epochs": "6"})
    assert whole["train.epochs"] == "6"


def test_a_table_with_a_rate_of_its_own_tries_no_others() -> None:
    slow, other = (with_budget(load_grid(name), (5,), (0.1, 0.2)) for name in ("slow-start", "decoders"))
    assert (slow.seeds, slow.rates, other.rates) == ((5,), (), (0.1, 0.2))
    assert slow.settings_of(slow.rows[0], 5, {"train.lr": "0.1"})["train.lr"] == "0.001"


@pytest.mark.parametrize(("name", "epochs"), [("overfit", "40"), ("slow-start", "4")])
def test_flags_for_all_tables_do_not_change_how_long_such_a_table_is_trained(name: str, epochs: str) -> None:
    grid = load_grid(name)
    for row in grid.rows:
        settings = grid.settings_of(row, 0, {"train.epochs": "10", "train.evaluate_every": "2"})
        assert (settings["train.epochs"], settings["train.evaluate_every"]) == (epochs, "1")
        assert settings["train.schedule"] == "constant"


def test_views_given_for_all_tables_leave_the_mask_study_those_that_a_covered_photo_has() -> None:
    grid = load_grid("mask")
    views = grid.settings_of(grid.rows[0], 0, {"data.views": "patches,patch_objects,text_whole"})["data.views"]
    assert views == "patches,patch_objects"


def test_the_papers_own_settings_are_those_of_its_code_for_every_table() -> None:
    session = Session(Path("nowhere"), full=True, dry=True)
    for name in session.tables("all"):
        grid = session.grid(name)
        assert grid.settings_of(grid.rows[0], 0, {})["train.epochs"] == "30", name


def test_a_grid_of_fewer_labels_is_not_trained_without_cut_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "labels", "--out", str(tmp_path)]) == 2
    assert "haav reproduce labels --bridge DIR --textdb DIR" in capsys.readouterr().err


# Verdicts


def rows_of(mean: float, seeds: int = 3, photos: int = 200, between: float = 0.1) -> Measured:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((seeds, photos)) + between * np.linspace(-1, 1, seeds)[:, None]
    return Measured((values - values.mean() + mean,), "seeds and photos", minutes=30.0)


def test_a_claim_is_confirmed_refuted_or_undecided_by_its_interval() -> None:
    assert judge(CLAIM, rows_of(2.0)).verdict == CONFIRMED
    assert judge(CLAIM, rows_of(-2.0)).verdict == REFUTED
    undecided = judge(CLAIM, rows_of(0.5, between=1.0))
    assert undecided.verdict == UNDECIDED
    assert undecided.low < 0 < undecided.high
    assert judge(CLAIM, None).verdict == NOT_RUN
    assert judge(replace(CLAIM, least=-1.0), rows_of(-0.2)).verdict == CONFIRMED, "no worse by more than 1"


def test_an_undecided_claim_names_the_budget_that_would_decide_it() -> None:
    verdict = judge(CLAIM, rows_of(0.8, between=1.0))
    seeds = int(verdict.needed.split()[0])
    assert 3 < seeds < 20
    assert verdict.hours == pytest.approx((seeds - 3) * 0.5)
    of_photos = np.random.default_rng(0).standard_normal(50)
    same_for_all_seeds = Measured((np.stack([of_photos - of_photos.mean() + 0.1] * 3),), "seeds and photos")
    assert judge(CLAIM, same_for_all_seeds).needed.endswith("photos"), "no number of seeds would do"
    assert judge(CLAIM, rows_of(1e-6, between=1.0)).needed.startswith("more than 100 seeds")


def test_one_seed_decides_nothing_about_training() -> None:
    verdict = judge(CLAIM, rows_of(5.0, seeds=1))
    assert (verdict.verdict, verdict.hours) == (UNDECIDED, 0.5)
    assert "at least 2 seeds" in verdict.needed
    photos_only = replace(rows_of(5.0, seeds=1), over="photos")
    assert judge(CLAIM, photos_only).verdict == CONFIRMED, "one ensemble, many photos"


def test_what_is_counted_has_no_interval() -> None:
    verdict = judge(replace(CLAIM, least=0.5), Measured((np.array([[0.96]]),), "nothing"))
    assert (verdict.verdict, verdict.low, verdict.high) == (CONFIRMED, 0.96, 0.96)
    assert judge(replace(CLAIM, least=0.5), Measured((np.array([[0.5]]),), "nothing")).verdict == REFUTED


def test_differences_are_of_shared_seeds_and_photos(tmp_path: Path) -> None:
    grid = Grid("", "toy", {}, (0, 1, 2), (Row("a", {}, {}), Row("b", {}, {})))
    for seed in (0, 1):
        done(run_folder(tmp_path, "a", seed), outcome("a", seed), {"x": 0.5 + seed, "y": 0.25})
    for seed in (1, 2):
        done(run_folder(tmp_path, "b", seed), outcome("b", seed), {"y": 0.125, "x": 0.5})
    measured = measure(CLAIM, grid, tmp_path)
    assert measured is not None
    assert sum(measured.rows).tolist() == [[100.0, 12.5]], "seed 1: x 1.5 - 0.5, y 0.25 - 0.125"
    assert measured.minutes == 12.0
    (alone,) = measure(replace(CLAIM, against=""), grid, tmp_path).rows
    assert alone.shape == (2, 2)
    lost = measure(replace(CLAIM, measure=LOST, against=""), grid, tmp_path)
    assert ([row.shape for row in lost.rows], lost.over) == ([(2, 1)], "seeds")
    gains = measure(replace(CLAIM, more_than=("b", "a")), grid, tmp_path)
    assert len(gains.rows) == 4
    assert (sum(gains.rows).tolist(), gains.value) == ([[200.0, 25.0]], 112.5), "a - b - (b - a)"
    assert gains.minutes == 24.0
    grid = replace(grid, rows=(*grid.rows, Row("c", {}, {})))
    assert measure(replace(CLAIM, row="c"), grid, tmp_path) is None
    assert measure(replace(CLAIM, more_than=("b", "c")), grid, tmp_path) is None


def test_what_is_lost_after_the_best_epoch_of_the_other_seeds() -> None:
    """The others of seed 0 and 2 are best at epoch 2, those of seed 1 at epoch 1."""
    curves = {
        0: [(1, 0.75), (2, 0.5), (3, 0.5)],
        1: [(1, 0.25), (2, 0.75), (3, 0.25)],
        2: [(1, 0.5), (2, 0.5), (3, 0.25)],
    }
    assert cider_lost(curves) == {0: 0.0, 1: 0.0, 2: 25.0}
    assert cider_lost({1: curves[1]}) == {1: 50.0}
    assert cider_lost({}) == cider_lost({0: []}) == {}


def test_curves_that_only_wobble_lose_nothing_after_their_best_epoch() -> None:
    rng = np.random.default_rng(0)
    means = []
    for _ in range(300):
        curves = {seed: list(enumerate(0.5 + 0.01 * rng.standard_normal(40))) for seed in range(3)}
        means.append(np.mean(list(cider_lost(curves).values())))
    assert abs(np.mean(means)) < 0.2, "each from its own best epoch, they would lose 2.2 on average"


def test_the_table_of_verdicts_drops_no_claim() -> None:
    pairs = [(CLAIM, judge(CLAIM, rows_of(2.0))), (CLAIM, replace(judge(CLAIM, None), hours=3.0))]
    heads, run, not_run = verdict_lines(pairs)
    assert run[heads.index("paper")] == "+2"
    assert run[heads.index("ours (95 % interval)")].startswith("+2.0 (+")
    assert run[heads.index("interval over")] == "3 seeds, 200 photos"
    assert not_run[heads.index("verdict")] == "not run; 3.0 h estimated"
    assert not_run[heads.index("command")] == "`haav reproduce encodings`"


# Plans and pages


def test_a_plan_counts_measured_hours_and_shared_runs(tmp_path: Path) -> None:
    session = Session(tmp_path, seeds=(0, 1), rates=(0.001, 0.01), dry=True, gigaflops=1.0)
    rows = {(row.table, row.row): row for row in plan(session, ["encodings", "decoders"])}
    haav = rows["encodings", "shared + contrastive (HAAV)"]
    assert (haav.runs, haav.done, haav.shared) == (3, 0, 0)
    assert rows["decoders", "hierarchical (HAAV)"].shared == 3, "the same model under another name"
    assert rows["decoders", "mean"].shared == 0
    for rate in (0.001, 0.01):
        done(run_folder(tmp_path / "encodings", haav.row, 0, rate), outcome(haav.row, 0, minutes=90.0))
    (row, *_) = plan(session, ["encodings"])
    assert (row.done, row.left, row.hours) == (2, 1, 1.5)


def test_a_plan_without_data_says_that_its_hours_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "mask", "--dry-run", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "0.0 hours left" in (said := capsys.readouterr().out)
    assert "Give --data.dataset." in said
    dataset, _ = make_toy(tmp_path / "toy")
    assert main([*words, "--data.dataset", str(dataset)]) == 0
    assert "Give --data.dataset." not in capsys.readouterr().out


def test_a_plan_of_some_rows_shares_nothing_with_the_others() -> None:
    chosen = ("joint", "labelled only")
    session = Session(Path("nowhere"), seeds=(0,), rates=(0.001,), rows=chosen, dry=True, gigaflops=1.0)
    planned = plan(session, ["encodings", "decoders", "semi"], all_rows=False)
    assert [(row.table, row.row, row.shared) for row in planned] == [
        ("decoders", "joint", 0),
        ("semi", "labelled only", 0),
    ]


def test_a_plan_does_not_count_first_stages_that_other_tables_have() -> None:
    session = Session(Path("nowhere"), seeds=(0,), rates=(0.001,), dry=True, gigaflops=1e-9 / 3600)
    alone = {row.row: row.hours for row in plan(session, ["main"])}
    after = {row.row: row.hours for row in plan(session, ["encodings", "main"]) if row.table == "main"}
    assert alone == {"HAAV": 2.0, "concatenated": 2.0}, "without data each stage counts 1 FLOP, an hour here"
    assert after == {"HAAV": 1.0, "concatenated": 1.0}, "the self-critical stages"


def test_hours_of_self_critical_rows_depend_on_where_their_first_stages_are(tmp_path: Path) -> None:
    session = Session(tmp_path, {"data.dataset": "toy"}, seeds=(0, 1), rates=(0.001,), dry=True, gigaflops=1e-9 / 3600)

    def planned() -> tuple[int, float]:
        row = plan(session, ["main"])[0]
        return row.left, row.hours

    assert planned() == (2, 4.0), "two stages, an hour each"
    grid = session.grid("encodings")
    row = grid.row("shared + contrastive (HAAV)")
    for seed in (0, 1):
        key = run_key(config_of(grid.recipe, grid.settings_of(row, seed, session.overrides, 0.001)), "")
        done(run_folder(tmp_path / "encodings", row.name, seed, 0.001), outcome(row.name, seed, key=key))
    assert planned() == (2, 4.0), "results of another machine, without the models"
    for file in list((tmp_path / "encodings").rglob(RESULT)):
        RunFiles(file.parent).best.mkdir()
    assert planned() == (2, 2.0)
    done(run_folder(tmp_path / "main", "HAAV", 0, 0.001), outcome("HAAV", 0, minutes=180.0, first="../there"))
    assert planned() == (1, 3.0), "the second stage alone took 3 hours"
    done(run_folder(tmp_path / "main", "HAAV", 0, 0.001), outcome("HAAV", 0, minutes=180.0))
    assert planned() == (1, 1.5), "both took 3"


def test_a_plan_shares_no_first_stage_that_leaves_no_result() -> None:
    session = Session(Path("nowhere"), seeds=(0,), rates=(0.001,), dry=True, gigaflops=1.0)
    noise = plan(session, ["main", "noise"])[-1]
    assert (noise.table, noise.left, noise.shared) == ("noise", 1, 0)


def test_a_plan_of_one_table_shares_what_another_has_done(tmp_path: Path) -> None:
    session = Session(tmp_path, {"data.dataset": "toy"}, seeds=(0, 1), rates=(0.001, 0.01), dry=True, gigaflops=1.0)
    grid = session.grid("encodings")
    row = grid.row("shared + contrastive (HAAV)")
    for seed, rate, cider in ((0, 0.001, 0.5), (0, 0.01, 0.7), (1, 0.01, 0.7)):
        key = run_key(config_of(grid.recipe, grid.settings_of(row, seed, session.overrides, rate)), "")
        done(run_folder(tmp_path / "encodings", row.name, seed, rate), outcome(row.name, seed, cider, key=key))
    (planned, *_) = plan(session, ["decoders"])
    assert (planned.row, planned.left, planned.shared) == ("hierarchical (HAAV)", 3, 3), "at the rate chosen there"
    assert planned.hours == 0


def test_the_page_lists_every_row_also_of_what_is_not_run(tmp_path: Path) -> None:
    session = Session(tmp_path, seeds=(0, 1), rates=(0.001,))
    for name, cider in (("shared + contrastive (HAAV)", 0.9), ("concatenated", 0.5)):
        for seed in (0, 1):
            place = run_folder(tmp_path / "encodings", name, seed, 0.001)
            photos = {f"p{index}": cider + 0.001 * index for index in range(30)}
            done(place, outcome(name, seed, cider, lr=0.001), photos)
    write_page(session)
    figure = (tmp_path / FIGURE).read_text(encoding="utf-8")
    assert ">HAAV is ahead of concatenated views<" in figure
    assert ">HAAV is ahead of a model per view<" not in figure, "not run"
    page, tree = (tmp_path / PAGE).read_text(), json.loads((tmp_path / JSON).read_text())
    first = tree["verdicts"][0]
    assert (first["verdict"], first["seeds"], first["photos"]) == (CONFIRMED, 2, 30)
    assert first["value"] == pytest.approx(40)
    assert len(tree["verdicts"]) == len(load_claims())
    assert {verdict["verdict"] for verdict in tree["verdicts"][1:]} == {NOT_RUN}
    for name in table_names():
        for row in load_grid(name).rows if load_grid(name).is_trained else ():
            assert row.name in {each["row"] for each in tree["tables"][name]["rows"]}
    assert tree["hours"]["spent"] == pytest.approx(4 * 6 / 60)
    assert "model per view: not run (needs --data.dataset, --data.store)" in page
    rows = {row["row"]: row for row in tree["tables"]["encodings"]["rows"]}
    assert rows["concatenated"]["flat"] is False
    assert rows["concatenated"]["curve"] == [[1, pytest.approx(40)], [2, pytest.approx(50)]]
    assert "| CIDEr on val after epoch | 1 | 2 |" in page
    assert "| concatenated | 40.0 | 50.0 |" in page
    assert f"]({FIGURE})" in page
    assert "\nScores are on val.\n" in page
    assert rows["concatenated"]["left"] == 0


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "encoding", "--plan"]) == 2
    assert "unknown table 'encoding'. Did you mean 'encodings'" in capsys.readouterr().err
    for flags in (["--plan"], ["--out", str(tmp_path)]):
        assert main(["reproduce", "encodings", "--rows", "concatenatd", *flags]) == 2
        assert "unknown row 'concatenatd'. Did you mean 'concatenated'" in capsys.readouterr().err
    assert main(["reproduce", "encodings", "--seeds", "0,0"]) == 2
    assert "--seeds takes numbers that differ" in capsys.readouterr().err
    assert main(["reproduce", "encodings", "--out", str(tmp_path)]) == 2
    assert "needs --data.dataset, --data.store" in capsys.readouterr().err
    assert main(["reproduce", "encodings", "--out", str(tmp_path), "--train.lr", "1", *TOY]) == 2
    assert "--rates 3e-4,1e-3" in capsys.readouterr().err
    assert main(["reproduce", "encodings", "--out", str(tmp_path), "--rates", "1", "--train.epohcs", "2", *TOY]) == 2
    told = capsys.readouterr().err
    assert told.count("Did you mean '--train.epochs'") == 1
    assert "begins" not in told
    place = run_folder(tmp_path / "decoders", "mean", 0, 1.0)
    place.mkdir(parents=True)
    (place / RESULT).write_text("{")
    assert main(["reproduce", "encodings", "--out", str(tmp_path), "--rates", "1", *TOY]) == 1
    told = capsys.readouterr().err
    assert f"{place / RESULT} is damaged" in told
    assert "begins" not in told
    with pytest.raises(ConfigError, match="unknown table 'views'"):
        Session(tmp_path, full=True).tables("views")


@pytest.mark.slow
def test_growth_is_counted_without_data(tmp_path: Path) -> None:
    reproduce(Session(tmp_path), ["growth"])
    tree = json.loads((tmp_path / JSON).read_text())
    judged = {verdict["claim"]: verdict for verdict in tree["verdicts"] if verdict["table"] == "growth"}
    assert len(judged) == 3
    assert not (tmp_path / FIGURE).exists(), "what is counted has no interval to draw"
    assert all(verdict["verdict"] == CONFIRMED for verdict in judged.values())
    study = tree["tables"]["growth"]["study"]
    one = study["HAAV"]["GFLOP of 8"], study["HAAV"]["M parameters of 8"]
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert f"| 8 views | {one[0]:.2f}, {one[1]:.2f} |" in page, "one line per number of views, HAAV first"
    assert study["HAAV"]["parameters, 8 views to 1"] == pytest.approx(1)
    assert study["model per view"]["parameters, 8 views to 1"] == pytest.approx(8)
    reproduce(Session(tmp_path, {"model.d_model": "64", "data.dataset": "toy"}), ["growth"])
    assert "\nData: toy.\nSettings given: model.d_model 64.\n" in (tmp_path / PAGE).read_text()
    smaller = json.loads((tmp_path / JSON).read_text())["tables"]["growth"]["study"]
    assert smaller["HAAV"]["M parameters of 8"] < one[1], "counted for the settings that are given"


# End to end


def timeless(file: Path) -> Any:
    """What a session wrote, without the times that it measured"""

    def strip(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: strip(value) for key, value in tree.items() if key not in ("hours", "minutes")}
        return [strip(item) for item in tree] if isinstance(tree, list) else tree

    return strip(json.loads(file.read_text()))


@pytest.mark.slow
def test_a_session_that_is_killed_goes_on_to_the_same_result(tmp_path: Path) -> None:
    """Four rows, two seeds; the whole process group is killed once the second run has begun."""
    words = ["reproduce", "box", "--seeds", "0,1", "--rates", "0.01", *TOY]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    command = [sys.executable, "-m", "haav", *words, "--out", str(tmp_path / "cut")]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 900
    while len(list((tmp_path / "cut").rglob("checkpoint.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = list((tmp_path / "cut").rglob(RESULT))
    assert 1 <= len(before) < 8
    assert main([*words, "--out", str(tmp_path / "cut")]) == 0
    whole, cut = (timeless(tmp_path / name / JSON) for name in ("whole", "cut"))
    assert whole == cut
    assert {row["row"]: (row["runs"], row["done"]) for row in cut["tables"]["box"]["rows"]} == dict.fromkeys(
        ("HAAV", "concatenated", "HAAV from the mean", "joint"), (2, 2)
    )


def test_an_ensemble_of_other_members_is_measured_again(tmp_path: Path) -> None:
    grid = Grid("", "toy", {}, (0, 1), (Row("a", {}, {}),), study="ensemble")
    for seed in grid.seeds:
        done(run_folder(tmp_path, "a", seed), outcome("a", seed, key=f"key {seed}"))
    members = [Trained.of(grid, tmp_path, grid.rows[0], seed) for seed in grid.seeds]
    file = ensemble_file(tmp_path, [member for member in members if member is not None])
    file.parent.mkdir()
    file.write_text(json.dumps({"ensemble": {"p": 1.0}}))
    assert study_values(grid, tmp_path) == {0: {"ensemble": {"p": 1.0}}}
    done(run_folder(tmp_path, "a", 1), outcome("a", 1, key="trained again at another rate"))
    assert study_values(grid, tmp_path) == {}


@pytest.mark.slow
def test_studies_take_the_models_of_other_tables(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--rates", "0.01", *TOY]
    assert main(["reproduce", "ensemble", *words]) == 0
    assert main(["reproduce", "noise", "--seeds", "0,1", *words]) == 0
    tree = json.loads((tmp_path / JSON).read_text())
    assert set(tree["tables"]["ensemble"]["study"]["0"]) == {"ensemble", "one model"}
    noise = tree["tables"]["noise"]
    assert set(noise["study"]) == {"0", "1"}
    assert {view for each in noise["study"].values() for view in each} <= {"objects", "grid", "text"}
    assert "NaN" not in (tmp_path / JSON).read_text()
    (row,) = noise["rows"]
    result = json.loads(next((tmp_path / "noise").rglob(RESULT)).read_text())
    assert result["run"], "trained for the ensemble, not again"
    assert (row["runs"], row["done"]) == (2, 2)
    (claim,) = [verdict for verdict in tree["verdicts"] if verdict["table"] == "ensemble"]
    assert claim["over"] == "photos"
    assert claim["verdict"] in (CONFIRMED, REFUTED, UNDECIDED)


@pytest.mark.slow
def test_a_second_stage_starts_from_the_first_whatever_the_encoding(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--seeds", "0", "--rates", "0.001,0.01", *TOY]
    assert main(["reproduce", "noise", *words]) == 0
    assert main(["reproduce", "main", *words]) == 0
    tree = json.loads((tmp_path / JSON).read_text())
    for row, encoding in (("haav", "shared"), ("concatenated", "concat_views")):
        (rate,) = [str(each["rate"]) for each in tree["tables"]["main"]["rows"] if each["row"].lower() == row]
        place = tmp_path / "main" / row / f"lr-{rate}" / "seed-0"
        config = (place / "then" / "config.yaml").read_text()
        assert "objective: scst" in config
        assert f"encoding: {encoding}" in config
        result = json.loads((place / RESULT).read_text())
        assert (str(result["lr"]), result["teraflops"]) == (rate, 0.0)
        assert (place / PHOTOS).read_text() == (place / "then" / PHOTOS).read_text()
        assert (place / "config.yaml").exists() == (row != "haav"), "HAAV's first stage was trained for noise"


def test_hours_count_a_small_set_as_often_as_an_epoch_goes_through_it() -> None:
    config = config_of("flickr8k-xe", {"train.batch": "10", "train.epochs": "2"})
    again = replace(config, train=replace(config.train, epoch_steps=25))
    once, thrice = (training_flops(each, photos=100, val=0) for each in (config, again))
    assert thrice == 3 * once, "10 steps go through 100 photos, so 25 steps need three rounds"


def test_one_seed_is_called_so() -> None:
    verdict = Verdict(UNDECIDED, 1.0, 0.0, 2.0, seeds=1, photos=3000, over="seeds and photos")
    assert "1 seed, 3,000 photos" in verdict_lines([(CLAIM, verdict)])[1]
    assert "2 seeds, 3,000 photos" in verdict_lines([(CLAIM, replace(verdict, seeds=2))])[1]
