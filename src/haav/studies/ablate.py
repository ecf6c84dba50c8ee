"""Train a grid of named runs that differ in a few settings, and write one table.

Runs are trained one after another or in parallel. Each is an ordinary `haav train` in its own process, so it can
be interrupted and resumed, and its peak memory is measured separately. A run that has a `result.json` is done and is
not repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from haav.config import Config, to_dict
from haav.config.load import find_recipe, flags_from
from haav.data.annotations import load_dataset
from haav.data.mixture import load_mixture, parse_sources
from haav.data.toy import make_toy
from haav.errors import ConfigError, TrainingError
from haav.evaluate.scores import SLOW, Report, evaluate
from haav.files import json_of, make_folder, write_atomically
from haav.inference.captioner import Captioner
from haav.inference.predict import predict
from haav.model.build import load_config
from haav.plots import check_installed
from haav.store import open_store
from haav.studies.describe import HEAD, cost, count_parameters
from haav.studies.grid import Grid, Row, to_tree
from haav.studies.hours import training_flops
from haav.studies.outcomes import (
    CAPTIONS,
    GRID,
    METRICS,
    PHOTOS,
    RESULT,
    Outcome,
    all_outcomes,
    best_rate,
    photo_scores,
    read_outcome,
    read_outcomes,
    run_folder,
    write_tables,
)
from haav.studies.processes import Clock, Processes, sigterm_interrupts
from haav.train.run import CONFIG, RunFiles

PLACES = {"data.dataset", "data.store", "data.unlabelled", "data.unlabelled_store"}
RECOMPUTE = "train.recompute"
"""changes no bits"""
THEN = "then"
"""folder of the second stage in that of a run, and its recipe in the settings beside it"""
Prepare = Callable[[Mapping[str, str]], Mapping[str, str]]
"""what is done before a run: takes its settings, and returns them with the paths of what was made"""
Run = tuple[Row, int, float | None]
"""row, seed and learning rate; None: that of the recipe"""


def run_grid(
    grid: Grid,
    out: str | Path,
    overrides: Mapping[str, str],
    workers: int = 1,
    report: Callable[[str], None] = lambda line: None,
    pool: Path | None = None,
    prepare: Prepare | None = None,
    only: Collection[str] | None = None,
) -> list[Outcome]:
    """Train the runs that are not done yet. `overrides` replace settings of the grid, but not those of a row.

    `pool` is a folder of grids: a run with the same settings and data that one of them has done is not repeated.
    `only`: names of the rows to train; None: all. The table has every row that is done.
    """
    check_installed("the curves of a grid")
    if grid.rates and "train.lr" in overrides:
        raise ConfigError("--train.lr is given, but this grid tries several rates.\n  Name them: --rates 3e-4,1e-3")
    if not grid.is_trained:
        raise ConfigError(f"the rows of '{grid.title}' are not trained.\n  Run it with: haav reproduce {grid.study}")
    if grid.cut_texts and prepare is None:
        raise ConfigError(
            "text views of this grid are made from the labels that each row keeps.\n"
            "  Run it with: haav reproduce labels --bridge DIR --textdb DIR"
        )
    folder = make_folder(out)
    text = yaml.safe_dump(to_tree(grid), sort_keys=False, allow_unicode=True)
    write_atomically(folder / GRID, lambda file: file.write_text(text, encoding="utf-8"))
    processes = Processes(workers)

    def work(row: Row, seed: int, rate: float | None) -> Outcome:
        place = run_folder(folder, row.name, seed, rate)
        settings = grid.settings_of(row, seed, overrides, rate)
        label = f"{row.name}, seed {seed}" + (f", rate {rate:g}" if rate is not None else "")
        try:
            _keep_settings(place, settings, row.then)
            done = read_outcome(place)
            key = _key(grid.recipe, row.then, settings)
            if done is not None and not _same_photos(place, done, settings):
                raise TrainingError(
                    f"{place} was scored on other photos than those of {settings['data.dataset']}.\n"
                    "  Name another --out for another data set."
                )
            if done is None and pool is not None and key:
                done = _take_over(pool, grid, row, settings, key, place)
            if done is None:
                report(f"{label}: begins")
                first = _first_stage(pool, grid, row, settings, place)
                ready = prepare(settings) if prepare else settings
                done = _train(grid.recipe, row, ready, seed, place, first, processes, key, label)
        except TrainingError as error:  # reported now, raised when the other rows are done
            report(str(error))
            raise
        report(f"{label}: CIDEr {100 * done.scores['CIDEr']:.1f} on {done.split}")
        return done

    first, *others = grid.seeds
    tried: dict[str, dict[float, Outcome | None]] = {row.name: dict.fromkeys(grid.rates) for row in grid.rows}

    def next_runs(run: Run, outcome: Outcome) -> list[Run]:
        """Once all learning rates of a row are tried, the other seeds with the best"""
        row, seed, rate = run
        if rate is None or seed != first:
            return []
        tried[row.name][rate] = outcome
        best = best_rate(tried[row.name])
        if best is None:
            return []
        report(f"{row.name}: rate {best:g} is the best on val")
        return [(row, other, best) for other in others]

    seeds = [first] if grid.rates else grid.seeds
    chosen = [row for row in grid.in_order if only is None or row.name in only]
    runs = [(row, seed, rate) for row in chosen for seed in seeds for rate in grid.rates or (None,)]
    with sigterm_interrupts():
        processes.work_through(runs, lambda run: work(*run), next_runs)
    outcomes = read_outcomes(grid, folder)
    write_tables(grid, outcomes, folder)
    return outcomes


def config_of(recipe: str, settings: Mapping[str, str]) -> Config:
    """The checked config of a run"""
    return load_config(
        file=find_recipe(recipe), flags=flags_from([(f"--{name}", value) for name, value in settings.items()])
    )


def run_key(config: Config, then: str) -> str:
    """Hash of a run: equal for rows of different grids that come to the same settings on the same data"""
    if not config.train.unlabelled_batch:
        config = replace(config, data=replace(config.data, unlabelled="", unlabelled_store=""))  # nobody reads them
    settings = to_dict(config)
    del settings["train"][RECOMPUTE.removeprefix("train.")]
    return hashlib.sha256(json.dumps([settings, then], sort_keys=True).encode()).hexdigest()[:16]


def _key(recipe: str, then: str, settings: Mapping[str, str]) -> str:
    try:
        return run_key(config_of(recipe, settings), then)
    except ConfigError:
        return ""  # `haav train` explains what is wrong


def _take_over(pool: Path, grid: Grid, row: Row, settings: Mapping[str, str], key: str, place: Path) -> Outcome | None:
    """The result of the same run under another row or grid, copied here"""
    found = _find(pool, grid.recipe, row.then, settings, key, with_model=grid.study != "train")
    if found is None:
        return None
    other, outcome = found
    place.mkdir(parents=True, exist_ok=True)
    for name in (CAPTIONS, PHOTOS):
        if (other / name).exists():  # captions may be left on another machine
            shutil.copyfile(other / name, place / name)
    taken = replace(outcome, row=row.name, run=os.path.relpath(other, place))
    _save_outcome(taken, place)
    return taken


def _first_stage(pool: Path | None, grid: Grid, row: Row, settings: Mapping[str, str], place: Path) -> Path:
    """The folder of the first stage of a run with two: that of another table if it is the same, otherwise its own"""
    key = _key(grid.recipe, "", settings)
    if pool is None or not row.then or not key or (place / CONFIG).exists():
        return place
    found = _find(pool, grid.recipe, "", settings, key, with_model=True)
    return place if found is None else found[0]


def _find(
    pool: Path, recipe: str, then: str, settings: Mapping[str, str], key: str, with_model: bool
) -> tuple[Path, Outcome] | None:
    """A finished run with these settings. On the machine that trained it, its model is there too."""
    for other, outcome in all_outcomes(pool).items():
        here = not with_model or model_folder(other, outcome).exists()
        if here and _same_run(other, outcome, recipe, then, settings, key):
            return other, outcome
    return None


def _same_run(other: Path, outcome: Outcome, recipe: str, then: str, settings: Mapping[str, str], key: str) -> bool:
    """Whether a result is that of a run with these settings. On another machine its data may have had other paths."""
    if outcome.key != key:
        theirs = _known_settings(other)[0] if other.with_suffix(".json").exists() else {}
        moved = {name: value for name, value in theirs.items() if name not in PLACES}
        moved |= {name: value for name, value in settings.items() if name in PLACES}
        if moved == theirs or outcome.key != _key(recipe, then, theirs) or key != _key(recipe, then, moved):
            return False
    return _same_photos(other, outcome, settings)


def _same_photos(place: Path, outcome: Outcome, settings: Mapping[str, str]) -> bool:
    """Whether a run was scored on the photos of the data set; True where that cannot be known"""
    dataset = settings.get("data.dataset", "toy")
    if dataset == "toy" or not (place / PHOTOS).exists():
        return True
    return photo_scores(place).keys() == _scored_photos(parse_sources(dataset)[0].path, outcome.split)


@cache
def _scored_photos(dataset: str, split: str) -> frozenset[str]:
    return frozenset(photo.id for photo in load_dataset(dataset).split(split) if photo.captions)


def _save_outcome(outcome: Outcome, place: Path) -> None:
    text = json.dumps(asdict(outcome), indent=1)
    write_atomically(place / RESULT, lambda file: file.write_text(text, encoding="utf-8"))


def model_folder(place: Path, outcome: Outcome) -> Path:
    """The best model of a run"""
    own = place / outcome.run if outcome.run else place
    return RunFiles(own / THEN if (own / THEN).exists() else own).best


def _train(
    recipe: str,
    row: Row,
    settings: Mapping[str, str],
    seed: int,
    place: Path,
    first: Path,
    processes: Processes,
    key: str,
    label: str,
) -> Outcome:
    """Train a run and score it. `first` is the folder of its first stage: its own, or one that is done."""
    with Clock(place) as clock:
        gigabytes, last = 0.0, place
        if first == place:
            flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
            gigabytes = _call(place, place, [recipe, *flags], processes, label)
        if row.then:
            # Its recipe says how the second stage is trained. The model and the data are those of the first.
            kept = {
                name: value
                for name, value in settings.items()
                if not name.startswith("train.") or name in ("train.seed", "train.precision", RECOMPUTE)
            }
            flags = [word for name, value in kept.items() for word in (f"--{name}", value)]
            last = place / THEN
            words = [row.then, "--init", str(RunFiles(first).best), *flags]
            gigabytes = max(gigabytes, _call(last, place, words, processes, label))
    outcome = replace(_score(row.name, seed, last, gigabytes, clock.minutes), key=key)
    if row.then:  # the rate is that of the first stage, and FLOPs are not counted for two
        stage = "" if first == place else os.path.relpath(first, place)
        outcome = replace(outcome, lr=config_of(recipe, settings).train.lr, teraflops=0.0, first=stage)
    for name in (CAPTIONS, PHOTOS) if last != place else ():
        shutil.copyfile(last / name, place / name)
    _save_outcome(outcome, place)
    return outcome


def _call(run: Path, place: Path, words: list[str], processes: Processes, label: str) -> float:
    """Start or resume `haav train`. Returns its peak memory in GB."""
    resuming = (run / CONFIG).exists()
    arguments = ["--resume", str(run)] if resuming else [*words, "--out", str(run)]
    log_file = place.with_suffix(".log")
    with open(log_file, "ab") as log:
        code, gigabytes = processes.run([sys.executable, "-m", "haav", "train", *arguments], log)
    if code and processes.stopped:
        raise TrainingError(f"{label} was interrupted. The same command goes on with it.")
    if code:
        tail = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise TrainingError(f"{label} ended with an error:\n  " + "\n  ".join(tail))
    return gigabytes


def _keep_settings(place: Path, settings: Mapping[str, str], then: str) -> None:
    """Refuse to resume or reuse a run whose settings have changed. Paths of data and what changes no bits may change.

    A run may be here with its results only, copied from another machine.
    """
    file = place.with_suffix(".json")
    if not file.exists() or not any((place / name).exists() for name in (CONFIG, f"{THEN}/{CONFIG}", RESULT)):
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**settings, THEN: then} if then else settings, indent=1)
        write_atomically(file, lambda new: new.write_text(text, encoding="utf-8"))
        return
    known, known_then = _known_settings(place)
    pairs = {name: (known.get(name), settings.get(name)) for name in sorted({*known, *settings} - PLACES - {RECOMPUTE})}
    pairs["the recipe of the second stage"] = (known_then or None, then or None)
    changes = ", ".join(f"{name} {old} instead of {new}" for name, (old, new) in pairs.items() if old != new)
    if changes:
        raise TrainingError(
            f"{place} was started with other settings: {changes}.\n  Name another --out, or delete {place} and {file}."
        )


def _known_settings(place: Path) -> tuple[dict[str, str], str]:
    """The settings that a run was started with, and the recipe of its second stage"""
    file = place.with_suffix(".json")
    try:
        known = dict(json_of(file.read_text(encoding="utf-8")))
        return known, known.pop(THEN, "")
    except (ValueError, TypeError) as error:
        raise TrainingError(
            f"{file} is damaged: {error}. Delete it if the run beside it is the one you want."
        ) from None


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
    scores = score_captions(captions, {photo.id: photo.captions for photo in photos}, place).scores
    parts, flops = count_parameters(captioner.config), cost(captioner.config.model)
    trained, val = photo_counts(config, dataset_path)
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
        config.train.lr,
        teraflops=training_flops(config, trained, val, flops) / 1e12,
    )


def score_captions(captions: Mapping[str, str], references: Mapping[str, tuple[str, ...]], place: Path) -> Report:
    """Score captions, and write them with the CIDEr of each to a folder."""
    report = evaluate({photo: captions[photo] for photo in references}, references, skip=SLOW, resamples=1)
    (cider,) = (metric for metric in report.metrics if metric.names == ("CIDEr",))
    # Rounded, since these files are copied to other machines.
    by_photo = dict(zip(references, np.round(cider.stats[:, 0], 5).tolist(), strict=True))
    said, scores = json.dumps(dict(captions)), json.dumps(by_photo)
    write_atomically(place / CAPTIONS, lambda file: file.write_text(said, encoding="utf-8"))
    write_atomically(place / PHOTOS, lambda file: file.write_text(scores, encoding="utf-8"))
    return report


def photo_counts(config: Config, dataset: Path) -> tuple[int, int]:
    """Training photos with captions, and val photos"""
    sources = parse_sources(str(dataset) if config.data.dataset == "toy" else config.data.dataset)
    mixture = load_mixture(sources, config.data.label_fraction, config.data.label_by, config.train.seed)
    return len(mixture.train), len(mixture.val)


def data_of(place: Path, config: Config) -> tuple[Path, str]:
    """The path of the first data set that a run was trained on, and that or the address of its view store"""
    if config.data.dataset == "toy":
        dataset, store = make_toy(place / "toy")
        return dataset, str(store)
    return Path(parse_sources(config.data.dataset)[0].path), config.data.store
