"""What `haav reproduce` was given, and what is done and left of the tables: runs, parameters, estimated hours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from haav.config import Config, DataConfig
from haav.config.load import read_data, table_names
from haav.data.mixture import Mixture, load_mixture, parse_sources
from haav.errors import ConfigError, unknown
from haav.photos.sources import PhotoRef
from haav.store import Store, open_store
from haav.studies.ablate import config_of, model_folder, run_key
from haav.studies.describe import count_parameters
from haav.studies.grid import Grid, Row, load_grid, with_budget
from haav.studies.hours import GIGAFLOPS, hours, measured_gigaflops, training_flops
from haav.studies.outcomes import Outcome, all_outcomes, best_rate, read_outcome, run_folder
from haav.text import Vocabulary
from haav.types import ViewSpec

ALL = "all"


@dataclass(frozen=True)
class Planned:
    """A row of a table: what is done, and what is left."""

    table: str
    row: str
    runs: int
    done: int
    shared: int
    """runs left that another table has, or an earlier one will have"""
    hours: float
    """estimated, of the runs left that are not shared"""
    parameters: int
    """trainable, of one model"""
    reason: str = ""
    """why it cannot be run with what was given; empty: it can"""

    @property
    def left(self) -> int:
        return self.runs - self.done


@dataclass(frozen=True)
class Session:
    """What the user gave."""

    out: Path
    overrides: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    workers: int = 1
    bridge: str | None = None
    textdb: str | None = None
    images: Mapping[str, PhotoRef] = field(default_factory=dict)
    gigaflops: float | None = None
    """of the machine, for estimates; None: from measured runs"""
    full: bool = False
    """the paper's own settings instead of those of the grids"""
    dry: bool = False
    """nothing of the data is looked at"""
    rows: tuple[str, ...] = ()
    """names of the rows to run; empty: all"""
    report: Callable[[str], None] = lambda line: None

    @cached_property
    def paper(self) -> dict[str, Any]:
        return read_data("full.yaml")

    def tables(self, name: str) -> list[str]:
        """The table of that name, or all of them"""
        names = list(self.paper["tables"]) if self.full else table_names()
        if name != ALL and name not in names:
            raise ConfigError(unknown("table", name, [*names, ALL]))
        return names if name == ALL else [name]

    def folder(self, name: str) -> Path:
        return self.out / name

    def chosen(self, grid: Grid) -> list[Row]:
        """The rows to run, the reference first"""
        return [row for row in grid.in_order if not self.rows or row.name in self.rows]

    def check_rows(self, tables: Sequence[str]) -> None:
        """Refuse rows that none of the tables has."""
        names = list(dict.fromkeys(row.name for name in tables for row in self.grid(name).rows))
        for name in self.rows:
            if name not in names:
                raise ConfigError(unknown("row", name, names))

    @cached_property
    def _grids(self) -> dict[str, Grid]:
        return {}

    @cached_property
    def sizes(self) -> dict[tuple[str, str], tuple[int, float, float]]:
        """Table and row → parameters of a model, and FLOPs of a run's first and second stage; filled as counted"""
        return {}

    def grid(self, name: str) -> Grid:
        """The table of that name, with the seeds and rates that were given"""
        if name not in self._grids:
            self._grids[name] = self._load(name)
        return self._grids[name]

    def _load(self, name: str) -> Grid:
        grid = load_grid(name)
        seeds = () if grid.study == "ensemble" else self.seeds  # an ensemble of four has four
        if not self.full:
            return with_budget(grid, seeds, self.rates)
        below = {
            f"{section}.{key}": str(value)
            for section, part in self.paper["base"].items()
            for key, value in part.items()
        }
        rows = tuple(replace(row, then=self.paper["then"] if row.then else "") for row in grid.rows)
        own = grid.seeds if grid.study == "ensemble" else tuple(self.paper["seeds"])
        whole = replace(
            grid, recipe=self.paper["recipe"], settings=below, fixed={}, rows=rows, rates=(), cut_texts=False, seeds=own
        )
        return with_budget(whole, seeds, self.rates)

    @cached_property
    def views(self) -> dict[str, ViewSpec]:
        """Of the store"""
        if not self.overrides.get("data.store"):
            return {}
        store = open_store(self.overrides["data.store"])
        specs = {name: manifest.spec for name, manifest in store.views.items()}
        if isinstance(store, Store):
            store.close()
        return specs

    @cached_property
    def mixture(self) -> Mixture | None:
        """The training data; None without a data set, and for the generated one"""
        dataset = self.overrides.get("data.dataset", "")
        return load_mixture(parse_sources(dataset)) if dataset not in ("", "toy") else None

    @cached_property
    def words(self) -> int | None:
        """Size of the vocabulary of the training captions"""
        least = int(self.overrides.get("data.min_count", DataConfig().min_count))
        return len(Vocabulary.build(self.mixture.sentences, least)) if self.mixture else None

    def photos(self, name: str) -> dict[str, int]:
        """Numbers of training and val photos"""
        if self.full:
            return dict(self.paper["photos_of"].get(name, self.paper["photos"]))
        mixture = self.mixture
        return {"train": len(mixture.train), "val": len(mixture.val)} if mixture else {"train": 0, "val": 0}

    @property
    def speed(self) -> tuple[float, str]:
        """GFLOP per second for estimates, and where the figure is from"""
        if self.gigaflops is not None:
            return self.gigaflops, "given with --gflops"
        measured = measured_gigaflops(list(all_outcomes(self.out).values())) if self.out.exists() else None
        if measured is not None:
            return measured, "the median of finished runs"
        if self.full:
            return float(self.paper["gigaflops"]), "assumed of a GPU"
        return GIGAFLOPS, "assumed of two CPU cores"

    def missing(self, grid: Grid, row: Row) -> str:
        """Why a row cannot be run with what was given"""
        if not grid.is_trained:
            return ""
        given = {**self.overrides, **({"images": "given"} if self.images else {})}
        toy = grid.settings_of(row, 0, self.overrides).get("data.dataset") == "toy"
        needs = [*(() if toy else ("data.dataset", "data.store")), *grid.needs]
        lacking = [name for name in needs if name not in given]
        if lacking:
            return "needs " + ", ".join(f"--{name}" for name in lacking)
        settings = grid.settings_of(row, 0, self.overrides)
        views = [] if toy else [view for view in settings.get("data.views", "").split(",") if view]
        absent = [view for view in views if view not in self.views]
        if absent:
            return "the store has no view " + ", ".join(absent)
        share = float(settings.get("data.label_fraction", 1))
        if grid.cut_texts and share < 1 and not toy and not (self.bridge and self.textdb):
            return "needs --bridge, --textdb"
        return ""


def plan(session: Session, tables: Sequence[str], all_rows: bool = True) -> list[Planned]:
    """Rows of tables, or the chosen ones, with what is done and left. Builds each model, without its weights."""
    finished = _Finished.of(session.out)
    known: set[str] = set()
    planned = []
    for name in tables:
        grid = session.grid(name)
        rows = grid.in_order if all_rows else session.chosen(grid)
        for row in rows if grid.is_trained else ():
            planned.append(_plan_row(session, name, grid, row, finished, known))
    return planned


@dataclass(frozen=True)
class _Finished:
    """Runs of all tables, by key."""

    outcomes: Mapping[str, Outcome]
    models: frozenset[str]
    """those whose model is here too"""

    @classmethod
    def of(cls, folder: Path) -> _Finished:
        found = {place: outcome for place, outcome in all_outcomes(folder).items() if outcome.key}
        models = frozenset(outcome.key for place, outcome in found.items() if model_folder(place, outcome).exists())
        return cls({outcome.key: outcome for outcome in found.values()}, models)


def _plan_row(session: Session, name: str, grid: Grid, row: Row, finished: _Finished, known: set[str]) -> Planned:
    """`known`: runs that are planned for rows before this one; it grows."""
    settled = config_of(grid.recipe, grid.settings_of(row, grid.seeds[0], session.overrides))
    if (name, row.name) not in session.sizes:
        config = _fit_to_data(session, settled)
        session.sizes[name, row.name] = sum(count_parameters(config).values()), *_flops(session, name, config, row)
    parameters, first, second = session.sizes[name, row.name]
    photos, shared = str(session.photos(name)), 0
    done: list[tuple[float, float]] = []  # hours and FLOPs of each run
    left: list[float] = []  # FLOPs
    for job in _jobs(session.folder(name), grid, row, settled, finished):
        begun = row.then and (job.first in finished.models or job.first + photos in known)
        taken = finished.outcomes if grid.study == "train" else finished.models
        if job.outcome is not None:
            done.append((job.outcome.minutes / 60, second if job.outcome.first else first + second))
        elif job.key in taken or job.key + photos in known:
            shared, left = shared + 1, [*left, 0.0]
        else:
            left.append(second if begun else first + second)
        known.add(job.key + photos)
    spent, counted = (sum(column) for column in zip(*done, strict=True)) if done else (0.0, 0.0)
    estimate = spent / counted * sum(left) if counted else hours(sum(left), session.speed[0])
    reason = "" if session.dry else session.missing(grid, row)
    return Planned(name, row.name, len(done) + len(left), len(done), shared, estimate, parameters, reason)


@dataclass(frozen=True)
class _Job:
    key: str
    first: str
    """key of its first stage alone"""
    outcome: Outcome | None
    """None: not done"""


def _jobs(folder: Path, grid: Grid, row: Row, settled: Config, finished: _Finished) -> list[_Job]:
    """The runs of a row: a learning rate each with the first seed, and the other seeds"""

    def job(seed: int, rate: float | None, known: bool) -> _Job:
        config = replace(settled, train=replace(settled.train, seed=seed, lr=rate or settled.train.lr))
        outcome = read_outcome(run_folder(folder, row.name, seed, rate)) if known else None
        return _Job(run_key(config, row.then), run_key(config, ""), outcome)

    seed, *others = grid.seeds
    tried = {rate: job(seed, rate, known=True) for rate in grid.rates or (None,)}
    if not grid.rates:
        return [*tried.values(), *(job(other, None, known=True) for other in others)]
    chosen = best_rate(
        {rate: job.outcome or finished.outcomes.get(job.key) for rate, job in tried.items() if rate is not None}
    )
    rest = [job(other, chosen or grid.rates[0], known=chosen is not None) for other in others]
    return [*tried.values(), *rest]


def _fit_to_data(session: Session, config: Config) -> Config:
    """The config with the views of the store where it has them, and the words of the data set"""
    names = [view for view in config.data.views.split(",") if view] or list(config.model.views)
    specs = {view: session.views[view] for view in names if view in session.views}
    views = specs if len(specs) == len(names) else config.model.views
    words = session.words or config.model.vocabulary_size
    return replace(config, model=replace(config.model, views=views, vocabulary_size=words))


def _flops(session: Session, name: str, config: Config, row: Row) -> tuple[float, float]:
    """Of the first and the second stage of one run"""
    photos = session.photos(name)
    if not photos["train"]:
        return 1.0, 1.0  # no data was given: only the ratio to finished runs counts
    trained = round(photos["train"] * config.data.label_fraction)
    first = training_flops(config, trained, photos["val"])
    if not row.then:
        return first, 0.0
    second = replace(config_of(row.then, {}), model=config.model, contrast=config.contrast)
    return first, training_flops(second, trained, photos["val"])


def check_parameters(session: Session) -> list[str]:
    """Differences between the models of --full and the parameter counts of the paper; none if all agree"""
    grid, wrong = session.grid("encodings"), []
    for name, count in session.paper["parameters"].items():
        config = config_of(grid.recipe, grid.settings_of(grid.row(name), 0, {}))
        built = sum(count_parameters(config).values())
        if built != count:
            wrong.append(f"{name}: {built:,} parameters instead of {count:,}")
    return wrong


def plan_lines(planned: Sequence[Planned]) -> list[list[str]]:
    """The header and the lines of the table that --plan and --dry-run print"""
    lines = [["table", "row", "M parameters", "runs done", "runs left", "shared", "hours left", "note"]]
    for each in planned:
        counts = [str(each.done), str(each.left), str(each.shared)]
        lines.append([each.table, each.row, f"{each.parameters / 1e6:.1f}", *counts, f"{each.hours:.1f}", each.reason])
    return lines
