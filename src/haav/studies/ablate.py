"""Train a grid of named runs that differ in a few settings, and write one table.

Runs are trained one after another or in parallel. Each run is an ordinary `haav train` in its own process, so it can
be interrupted and resumed, and its peak memory is measured separately. A run that has a `result.json` is done and is
not repeated.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from haav.config import Config
from haav.config.load import find_grid, find_recipe
from haav.data.annotations import load_dataset
from haav.data.mixture import parse_sources
from haav.data.toy import make_toy
from haav.errors import ConfigError, TrainingError, unknown
from haav.evaluate.scores import SLOW, evaluate
from haav.evaluate.statistics import student_interval
from haav.files import json_of, make_folder, write_atomically
from haav.inference.captioner import Captioner
from haav.inference.predict import predict
from haav.plots import check_installed, draw_lines
from haav.store import open_store
from haav.studies.describe import HEAD, cost, count_parameters
from haav.train.run import RunFiles

RESULT, CAPTIONS, GRID = "result.json", "captions.json", "grid.yaml"
METRICS = ("CIDEr", "BLEU-4", "ROUGE-L")
PLACES = {"data.dataset", "data.store", "data.unlabelled", "data.unlabelled_store"}


@dataclass(frozen=True)
class Row:
    name: str
    settings: Mapping[str, str]
    """dotted name → value, applied on top of the settings of the grid"""
    paper: Mapping[str, float]
    """metric → value reported in the paper"""


@dataclass(frozen=True)
class Grid:
    title: str
    recipe: str
    settings: Mapping[str, str]
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    reference: str = ""
    """name of the row that the others are compared with; empty if there is none"""


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    row: str
    seed: int
    scores: Mapping[str, float]
    split: str
    parameters: int
    gigaflops: float
    """per photo: encoding it and decoding the first word"""
    captions_per_second: float
    gigabytes: float
    """peak memory of training"""
    minutes: float
    curve: Sequence[tuple[int, float]]
    """epoch and CIDEr on val"""


def load_grid(name: str) -> Grid:
    """Load a grid from a YAML file, or by the name of a grid in the package."""
    text = find_grid(name).read_text(encoding="utf-8")
    try:
        tree = yaml.safe_load(text)
        rows = tuple(_row(dict(row)) for row in tree["rows"])
        grid = Grid(
            str(tree.get("title", name)),
            str(tree["recipe"]),
            _dotted(tree.get("base") or {}),
            tuple(int(seed) for seed in tree.get("seeds", [0])),
            rows,
            str(tree.get("reference") or ""),
        )
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name} is not a grid: {error}. It needs 'recipe' and 'rows' with a 'name' each.") from None
    names = [_slug(row.name) for row in grid.rows]
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f"{name}: rows need names that differ, in letters and digits too.")
    if grid.reference and grid.reference not in {row.name for row in grid.rows}:
        raise ConfigError(unknown("row", grid.reference, [row.name for row in grid.rows]))
    find_recipe(grid.recipe)
    return grid


def run_grid(
    grid: Grid,
    out: str | Path,
    overrides: Mapping[str, str],
    workers: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Train the runs that are not done yet. `overrides` replace settings of the grid, but not those of a row."""
    check_installed("the curves of a grid")
    folder = make_folder(out)
    text = yaml.safe_dump(_tree(grid), sort_keys=False, allow_unicode=True)
    write_atomically(folder / GRID, lambda file: file.write_text(text, encoding="utf-8"))
    jobs = [(row, seed) for seed in grid.seeds for row in grid.rows]

    def work(job: tuple[Row, int]) -> Outcome:
        row, seed = job
        place = run_folder(folder, row.name, seed)
        settings = {**grid.settings, **overrides, **row.settings, "train.seed": str(seed)}
        try:
            _keep_settings(place, settings)
            done = read_outcome(place)
            if done is None:
                report(f"{row.name}, seed {seed}: begins")
                done = _train(grid.recipe, settings, row.name, seed, place, workers)
        except TrainingError as error:  # reported now, raised when the other rows are done
            report(str(error))
            raise
        report(f"{row.name}, seed {seed}: CIDEr {100 * done.scores['CIDEr']:.1f} on {done.split}")
        return done

    with ThreadPoolExecutor(max(1, workers)) as pool:
        outcomes = list(pool.map(work, jobs))
    write_tables(grid, outcomes, folder)
    return outcomes


def run_folder(folder: Path, row: str, seed: int) -> Path:
    return folder / _slug(row) / f"seed-{seed}"


def read_outcome(place: Path) -> Outcome | None:
    if not (place / RESULT).exists():
        return None
    try:
        return Outcome(**json_of((place / RESULT).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise TrainingError(f"{place / RESULT} is damaged: {error}. Delete it, and the run is scored again.") from None


def _train(recipe: str, settings: Mapping[str, str], row: str, seed: int, place: Path, workers: int) -> Outcome:
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    resuming = (place / "config.yaml").exists()
    words = ["--resume", str(place)] if resuming else [recipe, "--out", str(place), *flags]
    started = time.monotonic()
    with open(place.with_suffix(".log"), "ab") as log:
        command = [sys.executable, "-m", "haav", "train", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment(workers))
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()  # the run saves a checkpoint and stops; the grid can resume it
            process.wait()
            raise
    if os.waitstatus_to_exitcode(status):
        tail = place.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise TrainingError(f"{row}, seed {seed} ended with an error:\n  " + "\n  ".join(tail))
    outcome = _score(row, seed, place, usage.ru_maxrss / 2**20, (time.monotonic() - started) / 60)
    text = json.dumps(asdict(outcome), indent=1)
    write_atomically(place / RESULT, lambda file: file.write_text(text, encoding="utf-8"))
    return outcome


def _keep_settings(place: Path, settings: Mapping[str, str]) -> None:
    """Refuse to resume or reuse a run whose settings have changed. Paths of data may change."""
    file = place.with_suffix(".json")
    if not file.exists() or not (place / "config.yaml").exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=1)
        write_atomically(file, lambda new: new.write_text(text, encoding="utf-8"))
        return
    try:
        known = dict(json_of(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise TrainingError(
            f"{file} is damaged: {error}. Delete it if the run beside it is the one you want."
        ) from None
    names = {*known, *settings} - PLACES
    differ = sorted(name for name in names if known.get(name) != settings.get(name))
    if differ:
        changes = ", ".join(f"{name} {known.get(name)} instead of {settings.get(name)}" for name in differ)
        raise TrainingError(
            f"{place} was started with other settings: {changes}.\n  Name another --out, or delete {place} and {file}."
        )


def _environment(workers: int) -> dict[str, str]:
    """Environment of a run. Parallel runs divide the cores among themselves."""
    if workers == 1:
        return dict(os.environ)
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}


def _score(row: str, seed: int, place: Path, gigabytes: float, minutes: float) -> Outcome:
    """Score a run on test if the data set has that split, otherwise on val."""
    files = RunFiles(place)
    config, _ = files.read()
    captioner = Captioner.from_pretrained(files.best)
    dataset_path, store_path = data_of(place, config)
    dataset, store = load_dataset(dataset_path), open_store(store_path)
    split = "test" if dataset.split("test") else "val"
    photos = [photo for photo in dataset.split(split) if photo.captions]
    captions = {photo: caption.text for photo, caption in predict(captioner, store, photos, seed=0)}
    text = json.dumps(captions)
    write_atomically(place / CAPTIONS, lambda file: file.write_text(text, encoding="utf-8"))
    scores = evaluate(captions, {photo.id: photo.captions for photo in photos}, skip=SLOW, resamples=1).scores
    parts, flops = count_parameters(captioner.config), cost(captioner.config.model)
    log = files.metrics()
    rates = [line["captions_per_second"] for line in log if "captions_per_second" in line]
    return Outcome(
        row,
        seed,
        {name: scores[name].value for name in METRICS},
        split,
        sum(size for name, size in parts.items() if name != HEAD),
        (flops.encoding + flops.memory + flops.step) / 1e9,
        float(np.median(rates)) if rates else 0.0,
        gigabytes,
        minutes,
        [(line["epoch"], line["CIDEr"]) for line in log if "CIDEr" in line],
    )


def data_of(place: Path, config: Config) -> tuple[Path, str]:
    """The path of the first data set that a run was trained on, and that or the address of its view store"""
    if config.data.dataset == "toy":
        dataset, store = make_toy(place / "toy")
        return dataset, str(store)
    return Path(parse_sources(config.data.dataset)[0].path), config.data.store


def write_tables(grid: Grid, outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write `table.md` and `table.csv`, and `curves.png` if any run was scored more than once."""
    lines = table(grid, outcomes)
    text = "\n".join(["| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:])])
    write_atomically(folder / "table.md", lambda file: file.write_text(f"# {grid.title}\n\n{text}\n", encoding="utf-8"))
    buffer = io.StringIO()
    csv.writer(buffer).writerows(lines)
    write_atomically(folder / "table.csv", lambda file: file.write_text(buffer.getvalue(), encoding="utf-8"))
    if any(len(curve) > 1 for curve in mean_curves(grid, outcomes).values()):
        figure = draw_curves(grid, outcomes)
        write_atomically(folder / "curves.png", lambda file: figure.savefig(file, format="png", dpi=130))


def table(grid: Grid, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The header, then one line per row of the grid. Scores are multiplied by 100, as in papers."""
    against = [f"CIDEr − {grid.reference}"] if grid.reference else []
    heads = ["", *METRICS, *against, *(f"paper {name}" for name in _printed(grid)), "seeds", "M parameters"]
    lines = [[*heads, "GFLOP per photo", "captions/s", "peak GB", "minutes"]]
    for row in grid.rows:
        row_outcomes = [outcome for outcome in outcomes if outcome.row == row.name]
        if not row_outcomes:
            continue
        cells = [row.name]
        for name in METRICS:
            mean, half = student_interval([100 * outcome.scores[name] for outcome in row_outcomes])
            cells.append(_plus_minus(mean, half, ""))
        if grid.reference:
            cells.append(_difference(row_outcomes, [outcome for outcome in outcomes if outcome.row == grid.reference]))
        cells += [f"{row.paper[name]:g}" if name in row.paper else "" for name in _printed(grid)]
        cells += [" ".join(str(outcome.seed) for outcome in row_outcomes), f"{row_outcomes[0].parameters / 1e6:.1f}"]
        cells += [f"{row_outcomes[0].gigaflops:.2f}"]
        for name in ("captions_per_second", "gigabytes", "minutes"):
            cells.append(f"{np.mean([getattr(outcome, name) for outcome in row_outcomes]):.1f}")
        lines.append(cells)
    return lines


def _difference(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> str:
    """Mean over shared seeds of the CIDEr of a row minus that of the reference row"""
    reference_scores = {outcome.seed: outcome.scores["CIDEr"] for outcome in reference}
    pairs = [
        100 * (outcome.scores["CIDEr"] - reference_scores[outcome.seed])
        for outcome in outcomes
        if outcome.seed in reference_scores
    ]
    return _plus_minus(*student_interval(pairs), "+") if pairs and list(outcomes) != list(reference) else ""


def _plus_minus(mean: float, half: float, sign: str) -> str:
    return f"{mean:{sign}.1f}" if np.isnan(half) else f"{mean:{sign}.1f} ± {half:.1f}"


def mean_curves(grid: Grid, outcomes: Sequence[Outcome]) -> dict[str, list[tuple[int, float]]]:
    """Row → (epoch, CIDEr × 100 on val, mean over seeds)"""
    by_row = {}
    for row in grid.rows:
        curves = [dict(outcome.curve) for outcome in outcomes if outcome.row == row.name]
        epochs = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if epochs:
            by_row[row.name] = [(epoch, 100 * float(np.mean([curve[epoch] for curve in curves]))) for epoch in epochs]
    return by_row


def draw_curves(grid: Grid, outcomes: Sequence[Outcome]) -> Any:
    """A figure of CIDEr on val by epoch, mean over seeds. It shows which rows over-fit."""
    return draw_lines(mean_curves(grid, outcomes), "epoch", "CIDEr on val")


def _printed(grid: Grid) -> list[str]:
    return list(dict.fromkeys(name for row in grid.rows for name in row.paper))


def _row(tree: dict[str, Any]) -> Row:
    name, paper = str(tree.pop("name")), tree.pop("paper", None) or {}
    return Row(name, _dotted(tree), {str(key): float(value) for key, value in paper.items()})


def _tree(grid: Grid) -> dict[str, Any]:
    """The grid as plain data for a YAML file that `load_grid` can read."""
    rows = [{"name": row.name, "paper": dict(row.paper), **row.settings} for row in grid.rows]
    return {
        "title": grid.title,
        "recipe": grid.recipe,
        "base": dict(grid.settings),
        "seeds": list(grid.seeds),
        "reference": grid.reference,
        "rows": rows,
    }


def _dotted(tree: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings → {dotted name: value}"""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _dotted(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
