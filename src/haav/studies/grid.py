"""Grids: YAML files of named rows that differ in a few settings, for `haav ablate` and `haav reproduce`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from haav.config.load import find_grid, find_recipe
from haav.errors import ConfigError, unknown

STUDIES = ("train", "ensemble", "noise", "mask", "growth", "speed")
UNTRAINED = ("growth", "speed")
"""studies of models that are built and not trained"""
SHARED = ("recipe", "base", "seeds", "rates")
"""what a grid takes from the one that it is `like`"""
KEYS = (*SHARED, "fixed", "title", "like", "study", "needs", "reference", "cut_texts", "same_steps", "rows")


@dataclass(frozen=True)
class Row:
    name: str
    settings: Mapping[str, str]
    """dotted name → value, applied on top of the settings of the grid"""
    paper: Mapping[str, float]
    """metric → value reported in the paper"""
    then: str = ""
    """recipe of a second stage, which starts from the best model of the first; empty: there is none"""


@dataclass(frozen=True)
class Grid:
    title: str
    recipe: str
    settings: Mapping[str, str]
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    reference: str = ""
    """name of the row that the others are compared with, and that is run first; empty if there is none"""
    rates: tuple[float, ...] = ()
    """learning rates tried with the first seed; the best on val is used for all seeds. Empty: that of the recipe"""
    study: str = "train"
    """what is measured once its rows are trained: their captions, or more (`trained.py`)"""
    needs: tuple[str, ...] = ()
    """settings and flags without which it cannot be run"""
    cut_texts: bool = False
    """whether text views of rows with fewer labels retrieve only from the captions that these rows keep"""
    same_steps: bool = False
    """whether rows with fewer labels are trained for more epochs, so that all have about as many steps"""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """settings that make the study what it is: like those of rows, they are not replaced by flags"""

    def row(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise ConfigError(unknown("row", name, [row.name for row in self.rows]))

    @property
    def is_trained(self) -> bool:
        return self.study not in UNTRAINED

    @property
    def in_order(self) -> tuple[Row, ...]:
        """The reference first: without it, no other row can be compared"""
        return tuple(sorted(self.rows, key=lambda row: row.name != self.reference))

    def settings_of(
        self, row: Row, seed: int, overrides: Mapping[str, str], rate: float | None = None
    ) -> dict[str, str]:
        """What a run is trained with. `overrides` replace settings of the grid, but not those of a row."""
        settings = {**self.settings, **overrides, **self.fixed, **row.settings, "train.seed": str(seed)}
        if rate is not None:
            settings["train.lr"] = f"{rate:g}"
        share = float(settings.get("data.label_fraction", 1))
        if self.same_steps and share < 1:
            for name in ("train.epochs", "train.evaluate_every"):
                if not settings[name].isdigit():
                    raise ConfigError(f"{name} is a whole number, not '{settings[name]}'.")
                settings[name] = str(max(1, round(int(settings[name]) / share)))
        return settings


def load_grid(name: str) -> Grid:
    """Load a grid from a YAML file, or by the name of a grid in the package."""
    tree = _read(name)
    try:
        rows = tuple(_row(dict(row)) for row in tree["rows"])
        grid = Grid(
            str(tree.get("title", name)),
            str(tree["recipe"]),
            _dotted(tree.get("base") or {}),
            tuple(int(seed) for seed in tree.get("seeds", [0])),
            rows,
            str(tree.get("reference") or ""),
            tuple(float(rate) for rate in tree.get("rates") or ()),
            str(tree.get("study", "train")),
            tuple(str(need) for need in tree.get("needs") or ()),
            bool(tree.get("cut_texts", False)),
            bool(tree.get("same_steps", False)),
            _dotted(tree.get("fixed") or {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name} is not a grid: {error}. It needs 'recipe' and 'rows' with a 'name' each.") from None
    _check(grid, name)
    return grid


def _read(name: str) -> dict[str, Any]:
    """The YAML of a grid, with what it takes from the one that it is `like`"""
    try:
        tree = yaml.safe_load(find_grid(name).read_text(encoding="utf-8"))
        for key in tree:
            if key not in KEYS:
                raise ConfigError(f"{name}: " + unknown("key of a grid", str(key), KEYS))
        if "like" in tree:
            below = _read(str(tree["like"]))
            base = _dotted(below.get("base") or {}) | _dotted(tree.get("base") or {})
            tree = {**{key: below[key] for key in SHARED if key in below}, **tree, "base": base}
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name} is not a grid: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{name} is like a grid that is like itself.") from None
    return dict(tree)


def _check(grid: Grid, name: str) -> None:
    names = [slug(row.name) for row in grid.rows]
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f"{name}: rows need names that differ, in letters and digits too.")
    if not grid.seeds or len(set(grid.seeds)) != len(grid.seeds):
        raise ConfigError(f"{name}: seeds must differ, and there must be at least one.")
    if grid.study not in STUDIES:
        raise ConfigError(f"{name}: " + unknown("study", grid.study, STUDIES))
    if grid.reference:
        grid.row(grid.reference)
    if grid.same_steps and not {"train.epochs", "train.evaluate_every"} <= grid.settings.keys():
        raise ConfigError(f"{name}: same_steps needs train.epochs and train.evaluate_every in 'base'.")
    for recipe in (grid.recipe, *(row.then for row in grid.rows if row.then)):
        find_recipe(recipe)


def with_budget(grid: Grid, seeds: Sequence[int] = (), rates: Sequence[float] = ()) -> Grid:
    """The grid with other seeds and learning rates, where they are given and it does not fix its own."""
    own = "train.lr" in grid.fixed or not rates
    return replace(grid, seeds=tuple(seeds) or grid.seeds, rates=grid.rates if own else tuple(rates))


def to_tree(grid: Grid) -> dict[str, Any]:
    """The grid as plain data for a YAML file that `load_grid` can read."""
    rows = [
        {"name": row.name, "paper": dict(row.paper), **({"then": row.then} if row.then else {}), **row.settings}
        for row in grid.rows
    ]
    return {
        "title": grid.title,
        "recipe": grid.recipe,
        "base": dict(grid.settings),
        "fixed": dict(grid.fixed),
        "seeds": list(grid.seeds),
        "rates": list(grid.rates),
        "study": grid.study,
        "needs": list(grid.needs),
        "reference": grid.reference,
        "cut_texts": grid.cut_texts,
        "same_steps": grid.same_steps,
        "rows": rows,
    }


def _row(tree: dict[str, Any]) -> Row:
    name, paper, then = str(tree.pop("name")), tree.pop("paper", None) or {}, str(tree.pop("then", None) or "")
    return Row(name, _dotted(tree), {str(key): float(value) for key, value in paper.items()}, then)


def _dotted(tree: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings → {dotted name: value}"""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _dotted(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
