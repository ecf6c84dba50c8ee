"""Render the results of grids as one HTML page: bars, cost against quality, curves and captions."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from haav.data.annotations import load_dataset
from haav.errors import DataError, HaavError, ImageError
from haav.evaluate.statistics import student_interval
from haav.files import json_of
from haav.photos.images import load_image
from haav.photos.sources import PhotoRef
from haav.studies.ablate import (
    CAPTIONS,
    GRID,
    Grid,
    Outcome,
    data_of,
    load_grid,
    mean_curves,
    read_outcome,
    run_folder,
    table,
)
from haav.studies.html import data_uri, part
from haav.train.run import RunFiles

SHOWN = 10
"""photos whose captions are shown side by side"""


def render_report(folders: Sequence[str | Path], photos: Mapping[str, PhotoRef] | None = None) -> str:
    """A self-contained HTML page from folders that `haav ablate` wrote. `photos` maps names to photos to show."""
    sections = [_section(Path(folder), photos or {}) for folder in folders]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>haav: results</title><style>{part('style.css')}{_STYLE}</style></head>"
        f"<body><main><h1>Results</h1>{''.join(sections)}</main></body></html>\n"
    )


_STYLE = """
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.plot { overflow-x: auto; }
figure { margin: 0 0 1.5rem; display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure img { width: 18rem; border-radius: .4rem; } figure table { flex: 1 1 24rem; width: auto; margin: 0; }
"""


def _section(folder: Path, photos: Mapping[str, PhotoRef]) -> str:
    if not (folder / GRID).exists():
        raise DataError(f"{folder} holds no grid: give folders that haav ablate wrote.")
    grid = load_grid(str(folder / GRID))
    runs = [(row, seed, read_outcome(run_folder(folder, row.name, seed))) for row in grid.rows for seed in grid.seeds]
    outcomes = [outcome for _, _, outcome in runs if outcome is not None]
    if not outcomes:
        raise DataError(f"no run of {folder} is done yet.")
    heads, *lines = table(grid, outcomes)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    columns = "".join(f'<th scope="col">{html.escape(head)}</th>' for head in heads)
    missing = len(runs) - len(outcomes)
    note = f'<p class="soft">{missing} of {len(runs)} runs are not done.</p>' if missing else ""
    return (
        f"<h2>{html.escape(grid.title)}</h2>{note}<div class='plot'>{_bars(grid, outcomes)}</div>"
        f"<div class='plot'>{_scatter(grid, outcomes)}</div>{_curves(grid, outcomes)}"
        f"<div class='plot'><table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"{_captions(folder, grid, photos)}"
    )


def _means(grid: Grid, outcomes: Sequence[Outcome]) -> list[tuple[str, float, float]]:
    """(row, mean CIDEr × 100, half the width of its interval) for each row"""
    means = []
    for row in grid.rows:
        values = [100 * outcome.scores["CIDEr"] for outcome in outcomes if outcome.row == row.name]
        if values:
            means.append((row.name, *student_interval(values)))
    return means


def _bars(grid: Grid, outcomes: Sequence[Outcome]) -> str:
    means = _means(grid, outcomes)
    most = max(mean + (0 if np.isnan(half) else half) for _, mean, half in means) or 1
    parts = []
    for index, (name, mean, half) in enumerate(means):
        y, length = 26 * index + 8, 420 * mean / most
        parts.append(f'<text x="210" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(
            f'<rect x="220" y="{y}" width="{length:.1f}" height="16" rx="3" style="fill:var(--v{index % 6})"/>'
        )
        label = f"{mean:.1f}"
        if not np.isnan(half):
            low, high = 220 + 420 * max(0, mean - half) / most, 220 + 420 * (mean + half) / most
            parts.append(
                f'<path d="M{low:.1f} {y + 8}H{high:.1f}" style="stroke:var(--ink);stroke-width:2" fill="none"/>'
            )
            label += f" ± {half:.1f}"
        parts.append(f'<text x="{660}" y="{y + 13}">{label}</text>')
    height = 26 * len(means) + 14
    return f'<svg role="img" aria-label="CIDEr of each row" width="760" height="{height}">{"".join(parts)}</svg>'


def _scatter(grid: Grid, outcomes: Sequence[Outcome]) -> str:
    """Cost against quality: GFLOP per photo on the x axis, CIDEr on the y axis."""
    means = {name: mean for name, mean, _ in _means(grid, outcomes)}
    costs = {outcome.row: outcome.gigaflops for outcome in outcomes}
    low, high = min(means.values()), max(means.values())
    dear = max(costs.values()) or 1
    parts = ['<text x="420" y="292" text-anchor="middle">GFLOP per photo</text><text x="8" y="20">CIDEr</text>']
    parts.append('<path d="M50 20V260H740" fill="none" style="stroke:var(--soft)"/>')
    for index, (name, mean) in enumerate(means.items()):
        x, y = 50 + 600 * costs[name] / dear, 240 - 200 * (mean - low) / max(high - low, 1e-9)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" style="fill:var(--v{index % 6})"/>')
        parts.append(f'<text x="{x + 10:.1f}" y="{y + 4:.1f}">{html.escape(name)}</text>')
    parts.append(f'<text x="46" y="244" text-anchor="end">{low:.0f}</text>')
    parts.append(f'<text x="46" y="44" text-anchor="end">{high:.0f}</text>')
    parts.append(f'<text x="650" y="276" text-anchor="middle">{dear:.2f}</text>')
    return f'<svg role="img" aria-label="Cost against quality" width="860" height="300">{"".join(parts)}</svg>'


def _curves(grid: Grid, outcomes: Sequence[Outcome]) -> str:
    """CIDEr on val by epoch, mean over seeds. It shows which rows over-fit."""
    curves = mean_curves(grid, outcomes)
    points = [point for curve in curves.values() for point in curve]
    if not any(len(curve) > 1 for curve in curves.values()):
        return ""
    last, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)
    parts = ['<text x="420" y="292" text-anchor="middle">epoch</text><text x="8" y="20">CIDEr on val</text>']
    parts.append('<path d="M50 30V260H740" fill="none" style="stroke:var(--soft)"/>')
    for index, (name, curve) in enumerate(curves.items()):
        placed = [(50 + 600 * x / last, 250 - 200 * (y - low) / max(high - low, 1e-9)) for x, y in curve]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{line}" fill="none" style="stroke:var(--v{index % 6});stroke-width:2.5"/>')
        shift = 4 + 15 * (index % 2)  # keeps the names of curves with the same end apart
        parts.append(f'<text x="{placed[-1][0] + 8:.1f}" y="{placed[-1][1] + shift:.1f}">{html.escape(name)}</text>')
    parts.append(f'<text x="46" y="254" text-anchor="end">{low:.0f}</text>')
    parts.append(f'<text x="46" y="54" text-anchor="end">{high:.0f}</text>')
    parts.append(f'<text x="650" y="276" text-anchor="middle">{last}</text>')
    picture = f'<svg role="img" aria-label="CIDEr on val by epoch" width="860" height="300">{"".join(parts)}</svg>'
    return f"<div class='plot'>{picture}</div>"


def _captions(folder: Path, grid: Grid, photos: Mapping[str, PhotoRef]) -> str:
    """The captions of each row (first seed) and the reference captions, for the same photos."""
    said = {}
    for row in grid.rows:
        file = run_folder(folder, row.name, grid.seeds[0]) / CAPTIONS
        if file.exists():
            said[row.name] = json_of(file.read_text(encoding="utf-8"))
    if not said:
        return ""
    names = sorted(set.intersection(*(set(captions) for captions in said.values())))
    chosen = names[:: max(1, len(names) // SHOWN)][:SHOWN]
    references = _references(run_folder(folder, next(iter(said)), grid.seeds[0]), chosen)
    figures = []
    for name in chosen:
        rows = [(row, [captions[name]]) for row, captions in said.items()]
        rows += [("people", references[name])] if name in references else []
        lines = "".join(
            f'<tr><th scope="row">{html.escape(who)}</th><td>{"<br>".join(map(html.escape, texts))}</td></tr>'
            for who, texts in rows
        )
        figures.append(f"<figure>{_photo(photos.get(name), name)}<table>{lines}</table></figure>")
    return f"<h2>{html.escape(grid.title)}: captions side by side</h2>{''.join(figures)}"


def _references(place: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Reference captions by photo. Empty if the data of the run no longer exists."""
    try:
        config, _ = RunFiles(place).read()
        dataset = load_dataset(data_of(place, config)[0])
    except (HaavError, OSError):
        return {}
    return {photo.id: list(photo.captions) for photo in dataset.photos if photo.id in names}


def _photo(ref: PhotoRef | None, name: str) -> str:
    if ref is not None:
        try:
            return f'<img alt="{html.escape(name)}" src="{data_uri(load_image(ref.read()))}">'
        except ImageError:
            pass
    return f'<p class="soft">{html.escape(name)}</p>'
