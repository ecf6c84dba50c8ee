"""The paper's claims, and a verdict on each from what was measured.

A claim says that the difference of two rows is above a number, usually 0. It is confirmed if the whole 95 % interval
of the difference is above that number, refuted if the whole interval is below, and undecided otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from haav.config.load import read_data
from haav.evaluate.statistics import Components, Floats, bootstrap_seeds_and_photos, percentile_interval
from haav.studies.grid import Grid
from haav.studies.outcomes import by_photo, final_folder, photo_scores, read_outcome
from haav.studies.speed import read_speed
from haav.studies.trained import STUDY, study_values

RESAMPLES = 2000
MOST_SEEDS, MOST_PHOTOS = 100, 100
"""a budget beyond so many seeds, or so many times the photos, is not named"""
CONFIRMED, REFUTED, UNDECIDED, NOT_RUN = "confirmed", "refuted", "undecided", "not run"
LOST = "CIDEr lost"


@dataclass(frozen=True)
class Claim:
    claim: str
    table: str
    row: str
    where: str
    """label in the LaTeX source of the paper"""
    against: str = ""
    """row that is subtracted; empty: none"""
    paper: float | None = None
    """the difference that the paper prints"""
    measure: str = "CIDEr"
    least: float = 0.0
    """the claim holds if the difference is above this"""
    more_than: tuple[str, ...] = ()
    """two rows whose difference is subtracted too: the first pair gains more than this one"""

    @property
    def rows(self) -> list[str]:
        return [name for name in (self.row, self.against, *self.more_than) if name]


@dataclass(frozen=True)
class Measured:
    """What was measured about a claim: the values of each of its rows."""

    rows: tuple[Floats, ...]
    """(seeds, photos) each; those that are subtracted are negative. Of steps, differences within rounds: (rounds, 1)"""
    over: str
    """what was drawn at random: "seeds and photos", "photos", "seeds", "rounds", or "nothing" """
    minutes: float = 0.0
    """of one more seed"""

    @property
    def value(self) -> float:
        return float(sum(row.mean() for row in self.rows))


@dataclass(frozen=True)
class Verdict:
    verdict: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    photos: int = 0
    over: str = ""
    """what the interval is over"""
    needed: str = ""
    """of an undecided claim: the budget that would decide it if the true difference is the one measured"""
    hours: float | None = None
    """hours of runs to that budget, if seeds are what is missing"""


def load_claims() -> list[Claim]:
    return [
        Claim(**{**entry, "more_than": tuple(entry.get("more_than", ()))})
        for entry in read_data("claims.yaml")["claims"]
    ]


def judge(claim: Claim, measured: Measured | None, resamples: int = RESAMPLES) -> Verdict:
    """The verdict on a claim. None is measured while a row is not run."""
    if measured is None:
        return Verdict(NOT_RUN)
    seeds, photos = measured.rows[0].shape
    value = measured.value
    low, high = value, value
    if measured.over != "nothing":
        bounds = percentile_interval(bootstrap_seeds_and_photos(measured.rows, resamples, seed=0))
        low, high = float(bounds[0]), float(bounds[1])
    verdict, needed, hours = UNDECIDED, "", None
    if "seeds" in measured.over and seeds < 2:
        needed = "at least 2 seeds: one does not show how much seeds differ"
        hours = measured.minutes / 60
    elif low > claim.least:
        verdict = CONFIRMED
    elif high < claim.least or measured.over == "nothing":
        verdict = REFUTED
    elif measured.over == "rounds":
        needed = f"a quieter machine: delete {claim.table}/{STUDY} and run it again"
    else:
        needed, hours = budget(measured, claim.least)
    return Verdict(verdict, value, low, high, seeds, photos, measured.over, needed, hours)


def budget(measured: Measured, least: float) -> tuple[str, float | None]:
    """Seeds or photos with which the interval would not include `least`, and hours of runs for more seeds"""
    seeds, photos = measured.rows[0].shape
    gap = abs(measured.value - least)
    parts = Components.of(measured.rows)
    more_seeds = range(max(2, seeds), MOST_SEEDS + 1) if "seeds" in measured.over else (seeds,)
    more_photos = range(1, MOST_PHOTOS + 1) if "photos" in measured.over else (1,)
    for times in more_photos:
        for count in more_seeds:
            if parts.half_width(count, times * photos) < gap:
                # The bootstrap may be a little wider than the components say.
                count = count + 1 if count == seeds and times == 1 and "seeds" in measured.over else count
                words = [f"{count} seeds"] if "seeds" in measured.over else []
                words += [f"{times * photos:,} photos"] if times > 1 else []
                hours = (count - seeds) * measured.minutes / 60 if "seeds" in measured.over else None
                return " and ".join(words) or f"a few more than {photos:,} photos", hours
    limits = [f"{MOST_SEEDS} seeds"] if "seeds" in measured.over else []
    limits += [f"{MOST_PHOTOS * photos:,} photos"] if "photos" in measured.over else []
    return f"more than {' and '.join(limits)}", None


def measure(claim: Claim, grid: Grid, folder: Path) -> Measured | None:
    """What was measured about a claim, over the seeds and photos that both rows have. None if a row is not run."""
    if grid.study == "speed":
        return _steps(claim, grid, folder)
    if grid.study == "train":
        rows = [_trained(grid, folder, name, claim.measure) for name in claim.rows]
        over = "seeds" if claim.measure == LOST else "seeds and photos"
        minutes = sum(_minutes(grid, folder, name) for name in claim.rows)
    else:
        values, minutes = study_values(grid, folder), _minutes(grid, folder, grid.rows[0].name)
        rows = [
            {seed: _part(each.get(name, {}), grid, claim.measure) for seed, each in values.items()}
            for name in claim.rows
        ]
        over = {"growth": "nothing", "ensemble": "photos"}.get(grid.study, "seeds and photos")
    return _subtract(rows, over, minutes)


def _steps(claim: Claim, grid: Grid, folder: Path) -> Measured | None:
    """Differences of two steps within each round, in per cent of the reference's step"""
    speed = read_speed(folder / STUDY, grid)
    if speed is None:
        return None
    row, against = (speed.percent(name, grid.reference) for name in (claim.row, claim.against))
    return Measured((np.array([[row[number] - against[number]] for number in row]),), "rounds")


def _subtract(rows: Sequence[Mapping[int, Mapping[str, float]]], over: str, minutes: float) -> Measured | None:
    """The first row minus the second, if there is one, minus the third, plus the fourth"""
    seeds = sorted(set.intersection(*(({seed for seed, values in row.items() if values}) for row in rows)))
    if not seeds:
        return None
    shared = set.intersection(*(set(row[seed]) for row in rows for seed in seeds))
    photos = [photo for photo in rows[0][seeds[0]] if photo in shared]
    if not photos:
        return None
    tables = [np.stack([by_photo(row[seed], photos) for seed in seeds]) for row in rows]
    signed = tuple(sign * table for sign, table in zip((1, -1, -1, 1), tables, strict=False))
    return Measured(signed, over, minutes)


def _trained(grid: Grid, folder: Path, name: str, measure: str) -> dict[int, dict[str, float]]:
    """Seed → photo → CIDEr × 100 of its caption; or seed → CIDEr lost on val after the best epoch"""
    places = {seed: final_folder(grid, folder, grid.row(name), seed) for seed in grid.seeds}
    outcomes = {seed: (place, read_outcome(place)) for seed, place in places.items() if place is not None}
    done = {seed: (place, outcome) for seed, (place, outcome) in outcomes.items() if outcome is not None}
    if measure == LOST:
        lost = cider_lost({seed: outcome.curve for seed, (_, outcome) in done.items()})
        return {seed: {"val": value} for seed, value in lost.items()}
    return {
        seed: {photo: 100 * score for photo, score in photo_scores(place).items()} for seed, (place, _) in done.items()
    }


def cider_lost(curves: Mapping[int, Sequence[tuple[int, float]]]) -> dict[int, float]:
    """Seed → CIDEr × 100 on val that its run lost from the best epoch to the last.

    The best epoch is that of the other seeds' mean curve. A run's own best epoch is partly luck, so that a curve that
    only wobbles would seem to fall. With one seed there are no others, and its own is taken.
    """
    tables = {seed: dict(curve) for seed, curve in curves.items() if curve}
    epochs = sorted(set.intersection(*map(set, tables.values()))) if tables else []
    lost = {}
    for seed, own in tables.items() if epochs else ():
        others = [table for other, table in tables.items() if other != seed] or [own]
        best = max(epochs, key=lambda epoch: sum(table[epoch] for table in others))
        lost[seed] = 100 * (own[best] - own[epochs[-1]])
    return lost


def _part(values: Mapping[str, float], grid: Grid, measure: str) -> dict[str, float]:
    return {measure: values[measure]} if grid.study == "growth" and measure in values else dict(values)


def _minutes(grid: Grid, folder: Path, name: str) -> float:
    """Mean of the runs of a row that are done"""
    places = [final_folder(grid, folder, grid.row(name), seed) for seed in grid.seeds]
    outcomes = [read_outcome(place) for place in places if place is not None]
    minutes = [outcome.minutes for outcome in outcomes if outcome is not None]
    return float(np.mean(minutes)) if minutes else 0.0


def verdict_lines(verdicts: Sequence[tuple[Claim, Verdict]]) -> list[list[str]]:
    """The header and the lines of the table of verdicts"""
    lines = [
        ["claim", "measure", "paper", "ours (95 % interval)", "interval over", "verdict", "in the paper", "command"]
    ]
    for claim, verdict in verdicts:
        ours, over, words = "", "", verdict.verdict
        if verdict.value is not None:
            ours = f"{verdict.value:+.1f} ({verdict.low:+.1f} … {verdict.high:+.1f})"
            counts = {"seeds": verdict.seeds, "photos": verdict.photos, "rounds": verdict.seeds}
            drawn = [
                f"{count:,} {name if count > 1 else name.removesuffix('s')}"
                for name, count in counts.items()
                if name in verdict.over
            ]
            over = ", ".join(drawn) or "counted, not sampled"
        if verdict.needed:
            words += f" at this budget; would need {verdict.needed}"
        if verdict.hours:
            words += f", {verdict.hours:.1f} h more" if verdict.needed else f"; {verdict.hours:.1f} h estimated"
        paper = "" if claim.paper is None else f"{claim.paper:+g}"
        command = f"`haav reproduce {claim.table}`"
        lines.append([claim.claim, claim.measure, paper, ours, over, words, claim.where, command])
    return lines


def to_json(claim: Claim, verdict: Verdict) -> dict[str, Any]:
    return {**asdict(claim), **asdict(verdict)}
