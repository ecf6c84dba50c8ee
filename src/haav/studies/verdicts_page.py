"""The page, the figure and the JSON of `haav reproduce`: verdicts on the paper's claims, hours, and all tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from haav import __version__
from haav.data.mixture import parse_sources
from haav.files import write_atomically
from haav.plots import Interval, draw_intervals, is_installed, svg_file
from haav.studies.ablate import PLACES
from haav.studies.claims import (
    CONFIRMED,
    NOT_RUN,
    REFUTED,
    UNDECIDED,
    Claim,
    Verdict,
    judge,
    load_claims,
    measure,
    to_json,
    verdict_lines,
)
from haav.studies.grid import Grid
from haav.studies.outcomes import all_outcomes, is_flat, last_fifth, markdown, mean_curves, read_outcomes, table
from haav.studies.plan import ALL, Planned, Session, plan
from haav.studies.speed import Speed, read_speed
from haav.studies.trained import GIGAFLOPS_OF, PARAMETERS_OF, STUDY, study_values

PAGE, FIGURE, JSON = "reproduce.md", "reproduce.svg", "reproduce.json"


def verdicts(session: Session, planned: Sequence[Planned]) -> list[tuple[Claim, Verdict]]:
    """On every claim, also on those whose rows are not run"""
    known, pairs = set(session.tables(ALL)), []
    for claim in load_claims():
        if claim.table not in known:
            continue
        grid = session.grid(claim.table)
        verdict = judge(claim, measure(claim, grid, session.folder(claim.table)))
        if verdict.verdict == NOT_RUN:
            wanted = set(claim.rows) if grid.study == "train" else {row.name for row in grid.rows}
            left = [each.hours for each in planned if each.table == claim.table and each.row in wanted]
            verdict = replace(verdict, hours=sum(left))
        pairs.append((claim, verdict))
    return pairs


def write_page(session: Session) -> None:
    """Write `reproduce.md`, its figure and `reproduce.json` from what is done."""
    names = session.tables(ALL)
    planned = plan(session, names)
    judged = verdicts(session, planned)
    outcomes = all_outcomes(session.out).values()
    spent = sum(outcome.minutes for outcome in outcomes) / 60
    splits = sorted({outcome.split for outcome in outcomes})
    speed, source = session.speed
    left = sum(each.hours for each in planned)
    lines = ["# The paper's claims", "", markdown(verdict_lines(judged)), ""]
    (session.out / FIGURE).unlink(missing_ok=True)  # of other results
    if figure := _figure(judged):
        write_atomically(session.out / FIGURE, lambda file: file.write_text(figure, encoding="utf-8"))
        lines += [f"![Our intervals and the paper's figures]({FIGURE})", ""]
    lines += [
        f"Hours of all runs together: {spent:.1f} spent, {left:.1f} left. Runs in parallel count each for itself.",
        f"Hours of rows without a finished run are estimated from FLOPs at {speed:.0f} GFLOP/s ({source}).",
        "A row is flat if CIDEr on val changes by less than 0.3 in the last fifth of its epochs.",
        *([f"Scores are on {' and '.join(splits)}."] if splits else []),
        *_given(session),
    ]
    tree: dict[str, Any] = {"version": __version__, "settings": dict(session.overrides)}
    tree["verdicts"] = [to_json(claim, verdict) for claim, verdict in judged]
    tree["tables"] = {}
    for name in names:
        text, tree["tables"][name] = _table(session, name, [each for each in planned if each.table == name])
        lines += ["", *text]
    tree["hours"] = {"spent": spent, "left": left}
    page, data = "\n".join(lines) + "\n", json.dumps(tree, indent=1, ensure_ascii=False)
    write_atomically(session.out / PAGE, lambda file: file.write_text(page, encoding="utf-8"))
    write_atomically(session.out / JSON, lambda file: file.write_text(data, encoding="utf-8"))


def _figure(judged: Sequence[tuple[Claim, Verdict]]) -> str:
    """The intervals of all claims that are over photos or several seeds, as SVG; empty if there is none"""
    intervals = []
    for claim, verdict in judged:
        value, low, high = verdict.value, verdict.low, verdict.high
        sampled = verdict.seeds > 1 if "seeds" in verdict.over else "photos" in verdict.over
        if sampled and value is not None and low is not None and high is not None:
            label = claim.claim if claim.measure == "CIDEr" else f"{claim.claim} ({claim.measure})"
            intervals.append(Interval(label, verdict.verdict, value, low, high, claim.least, claim.paper))
    if not intervals or not is_installed():
        return ""
    kinds = (UNDECIDED, REFUTED, CONFIRMED)  # blue, orange, green
    return svg_file(draw_intervals(intervals, kinds, "CIDEr, or what is named", "bound of the claim", "the paper"))


def _given(session: Session) -> list[str]:
    """The data, by name, and the settings of all runs that were given with flags"""
    dataset, mixture = session.overrides.get("data.dataset", ""), session.mixture
    names = ", ".join(Path(source.path).name for source in parse_sources(dataset)) if mixture else dataset
    counts = f", {len(mixture.train):,} training photos and {len(mixture.val):,} of val" if mixture else ""
    settings = ", ".join(f"{name} {value}" for name, value in session.overrides.items() if name not in PLACES)
    return [*([f"Data: {names}{counts}."] if names else []), *([f"Settings given: {settings}."] if settings else [])]


def _table(session: Session, name: str, planned: Sequence[Planned]) -> tuple[list[str], dict[str, Any]]:
    """A table as lines of Markdown and as JSON, with the rows that are not run"""
    grid, folder = session.grid(name), session.folder(name)
    outcomes = read_outcomes(grid, folder)
    lines = [f"## {grid.title} (`haav reproduce {name}`)", ""]
    if len(grid.rates) > 1 and grid.is_trained:
        rates = ", ".join(f"{rate:g}" for rate in grid.rates)
        lines += [f"The rate of a row is the best of {rates} on val, with seed {grid.seeds[0]}.", ""]
    curves = mean_curves(grid, outcomes)
    lines += [markdown(table(grid, outcomes)), ""] if outcomes else []
    lines += [_curves(curves), ""] if any(len(curve) > 1 for curve in curves.values()) else []
    rows = []
    for each in planned:
        own = [outcome for outcome in outcomes if outcome.row == each.row]
        change = float(np.mean([last_fifth(outcome.curve) for outcome in own])) if own else float("nan")
        known = not np.isnan(change)
        rows.append(
            {
                **asdict(each),
                "left": each.left,
                "CIDEr": {str(outcome.seed): 100 * outcome.scores["CIDEr"] for outcome in own},
                "rate": own[0].lr if own else None,
                "last_fifth": change if known else None,
                "flat": is_flat(change) if known else None,
                "curve": curves.get(each.row, []),
                "minutes": [outcome.minutes for outcome in own],
            }
        )
        if each.left:
            what = "not run" if not each.done else f"{each.done} of {each.runs} runs done"
            why = f" ({each.reason})" if each.reason else ""
            lines.append(f"- {each.row}: {what}{why}; {each.hours:.1f} h left.")
    study_lines, study = _study(grid, folder)
    return [*lines, *study_lines], {"title": grid.title, "rows": rows, "study": study}


def _study(grid: Grid, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """What was measured beside captions, as lines of Markdown and as JSON"""
    if grid.study == "speed":
        speed = read_speed(folder / STUDY, grid)
        return (_speed(grid, speed), asdict(speed)) if speed is not None else ([], {})
    values = study_values(grid, folder) if grid.study != "train" else {}
    if not any(values.values()):
        return [], {}
    if grid.study == "growth":
        return [_growth(values[0])], dict(values[0])
    study = {str(seed): {row: _summary(part) for row, part in each.items() if part} for seed, each in values.items()}
    heads = ["", *(f"seed {seed}" for seed in study)] if len(study) > 1 else ["", "value"]
    names = list(dict.fromkeys(row for each in study.values() for row in each))
    cells = [[row, *(f"{each[row]['mean']:.2f}" if row in each else "–" for each in study.values())] for row in names]
    return [markdown([heads, *cells])], study


def _curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """CIDEr on val by epoch, mean over seeds. Rows of fewer labels have other epochs."""
    epochs = sorted({epoch for curve in curves.values() for epoch, _ in curve})
    lines = [["CIDEr on val after epoch", *map(str, epochs)]]
    for row, curve in curves.items():
        known = dict(curve)
        lines.append([row, *(f"{known[epoch]:.1f}" if epoch in known else "" for epoch in epochs)])
    return markdown(lines)


def _summary(values: Mapping[str, float]) -> dict[str, float]:
    return {"mean": float(np.mean(list(values.values()))), "photos": len(values)}


def _growth(values: Mapping[str, Mapping[str, float]]) -> str:
    """A line per number of views: GFLOP per photo and millions of parameters of each row; then the rest"""
    heads = list(next(iter(values.values())))
    counts = [head.removeprefix(GIGAFLOPS_OF) for head in heads if head.startswith(GIGAFLOPS_OF)]
    lines = [["GFLOP, M parameters of", *values]]
    for count in counts:
        pairs = [(each[GIGAFLOPS_OF + count], each[PARAMETERS_OF + count]) for each in values.values()]
        lines.append([f"{count} views", *(f"{flops:.2f}, {parameters:.2f}" for flops, parameters in pairs)])
    rest = [head for head in heads if not head.startswith((GIGAFLOPS_OF, PARAMETERS_OF))]
    return markdown([*lines, *([head, *(f"{each[head]:.2f}" for each in values.values())] for head in rest)])


def _speed(grid: Grid, speed: Speed) -> list[str]:
    """Steps per second of each row, and its step beside that of the reference; means over rounds"""
    lines = [["", "steps/s", f"step, % of {grid.reference}", "paper steps/s", "paper step, %"]]
    for row in grid.rows:
        paper, first = row.paper["steps/s"], grid.row(grid.reference).paper["steps/s"]
        ours = 1 / np.mean(list(speed.seconds[row.name].values()))
        step = np.mean(list(speed.percent(row.name, grid.reference).values()))
        lines.append([row.name, f"{ours:.2f}", f"{step:.0f}", f"{paper:g}", f"{100 * first / paper:.0f}"])
    about = f"Ours on {speed.machine}, the paper's on a GPU. Flags do not change the sizes of this table."
    return [markdown(lines), "", about]
