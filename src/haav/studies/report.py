"""Render the results of grids as one HTML page: bars, cost against quality, curves and captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from haav.data.annotations import load_dataset
from haav.errors import DataError, HaavError, ImageError
from haav.evaluate.statistics import student_interval
from haav.files import json_of
from haav.palette import colours_of
from haav.photos.images import data_uri, load_image
from haav.photos.sources import PhotoRef
from haav.plots import check_installed, new_figure, to_svg
from haav.studies.ablate import data_of
from haav.studies.grid import Grid, load_grid
from haav.studies.html import SIDE, render_page
from haav.studies.outcomes import (
    CAPTIONS,
    GRID,
    Outcome,
    draw_curves,
    final_folder,
    mean_curves,
    read_outcomes,
    table,
)
from haav.train.run import RunFiles

SHOWN = 10
"""photos whose captions are shown side by side"""


def render_report(folders: Sequence[str | Path], photos: Mapping[str, PhotoRef] | None = None) -> str:
    """A self-contained HTML page from folders that `haav ablate` wrote. `photos` maps names to photos to show."""
    check_installed("a report")
    return render_page("report.html", grids=[_grid(Path(folder), photos or {}) for folder in folders])


def _grid(folder: Path, photos: Mapping[str, PhotoRef]) -> dict[str, object]:
    """What the template shows of a grid"""
    if not (folder / GRID).exists():
        raise DataError(f"{folder} holds no grid: give folders that haav ablate wrote.")
    grid = load_grid(str(folder / GRID))
    outcomes = read_outcomes(grid, folder)
    runs = len(grid.rows) * len(grid.seeds)
    if not outcomes:
        raise DataError(f"no run of {folder} is done yet.")
    charts = {"CIDEr of each row": _bars(grid, outcomes), "Cost against quality": _scatter(grid, outcomes)}
    if any(len(curve) > 1 for curve in mean_curves(grid, outcomes).values()):
        charts["CIDEr on val by epoch"] = draw_curves(grid, outcomes)
    return {
        "title": grid.title,
        "runs": runs,
        "missing": runs - len(outcomes),
        "charts": {label: Markup(to_svg(figure, label)) for label, figure in charts.items()},
        "table": table(grid, outcomes),
        "photos": _photos(folder, grid, photos),
    }


def _means(grid: Grid, outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    """Row → (mean CIDEr × 100, half the width of its interval)"""
    values = {row.name: [100 * each.scores["CIDEr"] for each in outcomes if each.row == row.name] for row in grid.rows}
    return {name: student_interval(scores) for name, scores in values.items() if scores}


def _bars(grid: Grid, outcomes: Sequence[Outcome]) -> Any:
    means = _means(grid, outcomes)
    figure = new_figure(8, 0.6 + 0.32 * len(means))
    axes = figure.subplots()
    colours = list(colours_of(means).values())
    values, halves = zip(*means.values(), strict=True)
    bars = axes.barh(list(means), values, xerr=np.nan_to_num(halves), color=colours)
    labels = [f"{mean:.1f}" if np.isnan(half) else f"{mean:.1f} ± {half:.1f}" for mean, half in means.values()]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("CIDEr")
    return figure


def _scatter(grid: Grid, outcomes: Sequence[Outcome]) -> Any:
    """Cost against quality: GFLOP per photo on the x axis, CIDEr on the y axis."""
    means = {name: mean for name, (mean, _) in _means(grid, outcomes).items()}
    costs = {outcome.row: outcome.gigaflops for outcome in outcomes}
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    for name, colour in colours_of(means).items():
        axes.scatter(costs[name], means[name], color=colour)
        axes.annotate(name, (costs[name], means[name]), xytext=(7, -4), textcoords="offset points")
    axes.set_xlim(0, 1.3 * max(costs.values()) or 1)
    axes.set(xlabel="GFLOP per photo", ylabel="CIDEr")
    return figure


def _photos(folder: Path, grid: Grid, photos: Mapping[str, PhotoRef]) -> list[dict[str, object]]:
    """Some photos with the captions of each row (first seed) and the reference captions."""
    said, places = {}, []
    for row in grid.rows:
        place = final_folder(grid, folder, row, grid.seeds[0])
        if place is not None and (place / CAPTIONS).exists():
            said[row.name] = json_of((place / CAPTIONS).read_text(encoding="utf-8"))
            places.append(place)
    if not said:
        return []
    names = sorted(set.intersection(*(set(captions) for captions in said.values())))
    chosen = names[:: max(1, len(names) // SHOWN)][:SHOWN]
    references = _references(places[0], chosen)
    shown: list[dict[str, object]] = []
    for name in chosen:
        captions = [(row, [texts[name]]) for row, texts in said.items()]
        captions += [("people", references[name])] if name in references else []
        shown.append({"name": name, "image": _image(photos.get(name)), "captions": captions})
    return shown


def _references(place: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Reference captions by photo. Empty if the data of the run no longer exists."""
    try:
        config, _ = RunFiles(place).read()
        dataset = load_dataset(data_of(place, config)[0])
    except (HaavError, OSError):
        return {}
    return {photo.id: list(photo.captions) for photo in dataset.photos if photo.id in names}


def _image(ref: PhotoRef | None) -> str:
    """The photo as a data URI. Empty if it is not there or cannot be read."""
    try:
        return data_uri(load_image(ref.read()), SIDE) if ref is not None else ""
    except ImageError:
        return ""
