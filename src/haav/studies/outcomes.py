"""Results of the runs of a grid: read from their folders, and put into one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from haav.errors import TrainingError
from haav.evaluate.statistics import Floats, student_interval
from haav.files import json_of, write_atomically
from haav.plots import draw_lines
from haav.studies.grid import Grid, Row, slug

RESULT, CAPTIONS, PHOTOS, GRID = "result.json", "captions.json", "photos.json", "grid.yaml"
METRICS = ("CIDEr", "BLEU-4", "ROUGE-L")
FLAT = 0.3
"""a run is flat if CIDEr × 100 on val changes by less in the last fifth of its epochs"""


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
    lr: float = 0.0
    key: str = ""
    """hash of all settings and paths of data; runs with the same key are the same run"""
    run: str = ""
    """folder of the run that it was taken from; empty: its own"""
    first: str = ""
    """folder of the run that is its first stage; empty: its own, or there is none"""
    teraflops: float = 0.0
    """of the whole training, estimated: see `hours.py`"""


def run_folder(folder: Path, row: str, seed: int, rate: float | None = None) -> Path:
    """With `rate`, one of the runs that differ in their learning rate."""
    return folder / slug(row) / (f"lr-{rate:g}" if rate is not None else "") / f"seed-{seed}"


def read_outcome(place: Path) -> Outcome | None:
    if not (place / RESULT).exists():
        return None
    try:
        return Outcome(**json_of((place / RESULT).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise TrainingError(f"{place / RESULT} is damaged: {error}. Delete it, and the run is scored again.") from None


def best_on_val(outcome: Outcome) -> float:
    return max((cider for _, cider in outcome.curve), default=outcome.scores["CIDEr"])


def best_rate(tried: Mapping[float, Outcome | None]) -> float | None:
    """The learning rate with the best CIDEr on val. None until all have an outcome."""
    done = {rate: best_on_val(outcome) for rate, outcome in tried.items() if outcome is not None}
    return max(done, key=lambda rate: done[rate]) if done and len(done) == len(tried) else None


def chosen_rate(grid: Grid, folder: Path, row: Row) -> float | None:
    """The best of the learning rates that were tried with the first seed. None until all are tried."""
    return best_rate({rate: read_outcome(run_folder(folder, row.name, grid.seeds[0], rate)) for rate in grid.rates})


def final_folder(grid: Grid, folder: Path, row: Row, seed: int) -> Path | None:
    """The folder of a run at the chosen learning rate. None until that is chosen."""
    if not grid.rates:
        return run_folder(folder, row.name, seed)
    rate = chosen_rate(grid, folder, row)
    return None if rate is None else run_folder(folder, row.name, seed, rate)


def read_outcomes(grid: Grid, folder: Path) -> list[Outcome]:
    """Of the runs that are done, at the chosen learning rates"""
    places = [final_folder(grid, folder, row, seed) for row in grid.rows for seed in grid.seeds]
    outcomes = [read_outcome(place) for place in places if place is not None]
    return [outcome for outcome in outcomes if outcome is not None]


def all_outcomes(folder: Path) -> dict[Path, Outcome]:
    """Folder → outcome, of all runs under a folder that were trained there, also at rates that were not chosen"""
    outcomes = {file.parent: read_outcome(file.parent) for file in sorted(folder.rglob(RESULT))}
    return {place: outcome for place, outcome in outcomes.items() if outcome is not None and not outcome.run}


def photo_scores(place: Path) -> dict[str, float]:
    """Photo → CIDEr of its caption. The CIDEr of the run is their mean."""
    try:
        return dict(json_of((place / PHOTOS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(
            f"{place / PHOTOS} cannot be read: {error}.\n  Delete {place / RESULT}, and the run is scored again."
        ) from None


def last_fifth(curve: Sequence[tuple[int, float]]) -> float:
    """Change of CIDEr × 100 on val in the last fifth of the epochs. NaN if the curve has fewer than two points.

    Between two evaluations the curve is a straight line.
    """
    if len(curve) < 2:
        return float("nan")
    epochs, ciders = zip(*curve, strict=True)
    return 100 * float(ciders[-1] - np.interp(0.8 * epochs[-1], epochs, ciders))


def is_flat(change: float) -> bool:
    return abs(change) < FLAT


def write_tables(grid: Grid, outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write `table.md` and `table.csv`, and `curves.png` if any run was scored more than once."""
    lines = table(grid, outcomes)
    text = f"# {grid.title}\n\n{markdown(lines)}\n"
    write_atomically(folder / "table.md", lambda file: file.write_text(text, encoding="utf-8"))
    buffer = io.StringIO()
    csv.writer(buffer).writerows(lines)
    write_atomically(folder / "table.csv", lambda file: file.write_text(buffer.getvalue(), encoding="utf-8"))
    if any(len(curve) > 1 for curve in mean_curves(grid, outcomes).values()):
        figure = draw_curves(grid, outcomes)
        write_atomically(folder / "curves.png", lambda file: figure.savefig(file, format="png", dpi=130))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The header and the lines of a table as Markdown"""
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def table(grid: Grid, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The header, then one line per row of the grid that has a run. Scores are multiplied by 100, as in papers."""
    against = [f"CIDEr − {grid.reference}"] if grid.reference else []
    heads = ["", *METRICS, *against, *(f"paper {name}" for name in _printed(grid)), "seeds"]
    heads += [*(["rate"] if grid.rates else []), "last fifth", "flat", "M parameters"]
    lines = [[*heads, "GFLOP per photo", "captions/s", "peak GB", "minutes"]]
    for row in grid.rows:
        row_outcomes = [outcome for outcome in outcomes if outcome.row == row.name]
        if not row_outcomes:
            continue
        cells = [row.name]
        for name in METRICS:
            mean, half = student_interval([100 * outcome.scores[name] for outcome in row_outcomes])
            cells.append(plus_minus(mean, half, ""))
        if grid.reference:
            cells.append(_difference(row_outcomes, [outcome for outcome in outcomes if outcome.row == grid.reference]))
        cells += [f"{row.paper[name]:g}" if name in row.paper else "" for name in _printed(grid)]
        cells.append(" ".join(str(outcome.seed) for outcome in row_outcomes))
        cells += [f"{row_outcomes[0].lr:g}"] if grid.rates else []
        cells += flatness(row_outcomes)
        cells += [f"{row_outcomes[0].parameters / 1e6:.1f}", f"{row_outcomes[0].gigaflops:.2f}"]
        for name in ("captions_per_second", "gigabytes", "minutes"):
            cells.append(f"{np.mean([getattr(outcome, name) for outcome in row_outcomes]):.1f}")
        lines.append(cells)
    return lines


def flatness(outcomes: Sequence[Outcome]) -> list[str]:
    """Two cells of a row: the change in the last fifth of training with its 95 % interval over seeds, and whether its
    mean is flat"""
    change, half = student_interval([last_fifth(outcome.curve) for outcome in outcomes])
    return ["–", "–"] if np.isnan(change) else [plus_minus(change, half, "+", 2), "yes" if is_flat(change) else "no"]


def _difference(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> str:
    """Mean over shared seeds of the CIDEr of a row minus that of the reference row"""
    reference_scores = {outcome.seed: outcome.scores["CIDEr"] for outcome in reference}
    pairs = [
        100 * (outcome.scores["CIDEr"] - reference_scores[outcome.seed])
        for outcome in outcomes
        if outcome.seed in reference_scores
    ]
    return plus_minus(*student_interval(pairs), "+") if pairs and list(outcomes) != list(reference) else ""


def plus_minus(mean: float, half: float, sign: str, digits: int = 1) -> str:
    return f"{mean:{sign}.{digits}f}" + ("" if np.isnan(half) else f" ± {half:.{digits}f}")


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


def by_photo(values: Mapping[str, float], photos: Sequence[str]) -> Floats:
    return np.array([values[photo] for photo in photos], dtype=np.float64)
