"""Commands that study models: describe, control, ablate, reproduce, report, bench."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

from haav.cli.common import (
    Json,
    Model,
    Overrides,
    Seed,
    Split,
    exit_code,
    fetch_weights_of,
    listed,
    load_captioner,
    print_json,
)
from haav.errors import ConfigError, DataError, ImageError, printable, unknown

Number = TypeVar("Number", int, float)


def describe(
    model: Annotated[str | None, "name of a shipped model, or a model directory; instead of settings"] = None,
    *,
    preset: Annotated[str | None, "preset to start from: paper, release or best (default)"] = None,
    encoding: Annotated[str | None, "encoding: shared, unshared, concat_views or model_per_view"] = None,
    aggregator: Annotated[
        str | None, "aggregator: joint, hierarchical, hierarchical_from_mean, concat_tokens, mean, max, sigmoid or tanh"
    ] = None,
    contrastive: Annotated[str | None, "contrastive loss: true or false"] = None,
    config: Annotated[str | None, "YAML file of settings, applied to the preset"] = None,
    json: Json = False,
    overrides: Overrides | None = None,
) -> int:
    """Describe a model or a configuration: parameters by part, views, FLOPs and their growth with the views."""
    from haav.cli import output
    from haav.config import Given
    from haav.config.load import flags_from
    from haav.model.build import load_config
    from haav.pretrained import read_config
    from haav.studies.describe import describe

    flags = flags_from(overrides or [])
    short = {
        ("model", "encoding"): ("--encoding", encoding),
        ("model", "aggregator"): ("--aggregator", aggregator),
        ("contrast", "enabled"): ("--contrastive", contrastive),
    }
    flags |= {path: Given(value, flag) for path, (flag, value) in short.items() if value is not None}
    if model is None:
        settings = load_config(preset, config, flags)
    elif preset or config or flags:
        raise ConfigError("give either a model or settings; a model that was saved has its own.")
    else:
        settings = read_config(model)
    description = describe(settings)
    if json:
        print_json(description.to_json() | {"decode": asdict(settings.decode)})
    else:
        output.print_description(description)
        output.print_settings("decode", settings.decode)
    return 0


def control(
    study: Annotated[str, "noise (zero tokens of a view) or mask (cover an object in one view)"],
    *,
    out: Annotated[str, "folder for the figure (.png) and the results (.json)"],
    store: Annotated[str | None, "noise: view store with the views of the photos"] = None,
    dataset: Annotated[str | None, "data set of the photos (mask: optional, default all)"] = None,
    split: Split = "val",
    images: Annotated[str | None, "mask: folder, tar or list of photos"] = None,
    limit: Annotated[int | None, "largest number of photos"] = None,
    cover: Annotated[str, "mask: how objects are covered, grey or blur"] = "grey",
    model: Model = "best",
    seed: Seed = 0,
) -> int:
    """Run the paper's control studies: does the weight of a view drop when the view is disturbed?"""
    from haav.cli import output
    from haav.data.annotations import load_dataset
    from haav.data.loader import StoredPhotos
    from haav.files import make_folder, write_atomically
    from haav.photos import sources
    from haav.photos.images import load_image
    from haav.plots import check_installed
    from haav.store import open_store
    from haav.studies import control

    check_installed("the study")
    folder = make_folder(out)
    captioner = load_captioner(model, None)
    failed = 0
    if study == "noise":
        if store is None or dataset is None:
            raise ConfigError("the noise study needs --store and --dataset.")
        photos = load_dataset(dataset).split(split)[:limit]
        made_by = captioner.config.made_by
        stored = StoredPhotos(open_store(store), captioner.views, photos, vocabulary=None, made_by=made_by)
        with output.progress("photos") as progress:
            results = control.noise_study(captioner, stored, seed=seed, progress=progress)
    elif study == "mask":
        if images is None:
            raise ConfigError("the mask study needs --images.")
        refs = sources.find_photos(listed(images))
        if dataset is not None:
            chosen = {photo.id for photo in load_dataset(dataset).split(split)}
            refs = [ref for ref in refs if ref.id in chosen]
        refs = refs[:limit]
        fetch_weights_of(captioner)
        masked = []
        with output.progress("photos") as progress:
            for done, ref in enumerate(refs, 1):
                try:
                    case = control.mask_photo(captioner, load_image(ref.read()), cover)
                    masked += [case] if case is not None else []
                except ImageError as error:
                    failed += 1
                    print(f"{printable(ref.id)}: {printable(str(error), lines=True)}", file=sys.stderr)
                progress(done, len(refs))
        results = control.mask_study(masked, seed)
    else:
        raise ConfigError(unknown("study", study, ["noise", "mask"]))
    if not results:
        raise DataError("no photo can be measured. The mask study needs photos whose captions name a detected object.")
    text = json_format.dumps(results, indent=1)
    write_atomically(folder / f"{study}.json", lambda file: file.write_text(text, encoding="utf-8"))
    write_atomically(folder / f"{study}.png", lambda file: control.draw(file, results))
    output.print_control(study, results)
    return exit_code(len(results), failed)


def ablate(
    grid: Annotated[str, "name of a grid (encodings, decoders, views, …) or a YAML file"],
    *,
    out: Annotated[str, "folder for the runs and the table; finished runs are not repeated"],
    workers: Annotated[int, "runs in parallel"] = 1,
    seeds: Annotated[str, "random seeds, comma-separated, instead of the grid's"] = "",
    rates: Annotated[str, "learning rates to try, comma-separated, instead of the grid's"] = "",
    overrides: Overrides | None = None,
) -> int:
    """Train a grid of named runs and write a table of their scores and costs.

    A grid with several learning rates tries them with the first seed; the best on val is used for all seeds.
    """
    from haav.studies.ablate import run_grid
    from haav.studies.grid import load_grid, with_budget

    settings = {flag.removeprefix("--"): value for flag, value in overrides or []}
    chosen = with_budget(load_grid(grid), _numbers(seeds, "--seeds", int), _numbers(rates, "--rates", float))
    run_grid(chosen, out, settings, workers, _report)
    print((Path(out) / "table.md").read_text(encoding="utf-8"))
    return 0


def reproduce(
    table: Annotated[str | None, "a table of the paper; all: every table, the most important first (default)"] = None,
    *,
    out: Annotated[str, "folder for the runs, the page and the JSON; finished runs are not repeated"] = "runs/paper",
    plan: Annotated[bool, "print what is done and left with estimated hours, and run nothing"] = False,
    full: Annotated[bool, "use the paper's own settings instead of small models; for a machine with a GPU"] = False,
    dry_run: Annotated[bool, "build every model, count parameters and hours, and run nothing; needs no data"] = False,
    seeds: Annotated[str, "random seeds, comma-separated (default: those of the table)"] = "",
    rates: Annotated[str, "learning rates to try, comma-separated (default: those of the table)"] = "",
    rows: Annotated[str, "names of rows to run, comma-separated (default: all rows of the table)"] = "",
    workers: Annotated[int, "runs in parallel"] = 1,
    bridge: Annotated[str | None, "labels: directory of haav bridge that the text views were made with"] = None,
    textdb: Annotated[str | None, "labels: directory of haav textdb that the text views were made with"] = None,
    images: Annotated[str | None, "mask: folder, tar or list of the photos"] = None,
    gflops: Annotated[float | None, "speed of the machine for estimates (default: from finished runs)"] = None,
    overrides: Overrides | None = None,
) -> int:
    """Run a table of the paper on your data, and judge the paper's claims.

    Each row is trained with several learning rates on the first seed. The best on val is used for all seeds. The page
    reproduce.md, its figure reproduce.svg and reproduce.json in --out have a verdict per claim, with intervals over
    seeds and photos, and the hours spent and left. Run the same command again after an interruption.
    """
    from haav.photos import sources
    from haav.studies.outcomes import markdown
    from haav.studies.plan import Session, check_parameters, plan_lines
    from haav.studies.plan import plan as plan_rows
    from haav.studies.reproduce import reproduce
    from haav.studies.verdicts_page import PAGE

    if gflops is not None and not gflops > 0:
        raise ConfigError(f"--gflops is a number above 0, not {gflops:g}.")
    session = Session(
        Path(out),
        {flag.removeprefix("--"): value for flag, value in overrides or []},
        _numbers(seeds, "--seeds", int),
        _numbers(rates, "--rates", float),
        workers,
        bridge,
        textdb,
        {ref.id: ref for ref in sources.find_photos(listed(images))} if images else {},
        gflops,
        full,
        dry_run,
        tuple(listed(rows)),
        _report,
    )
    tables = session.tables(table or "all")
    if not plan and not dry_run:
        reproduce(session, tables)
        print((Path(out) / PAGE).read_text(encoding="utf-8"))
        return 0
    session.check_rows(tables)
    planned = plan_rows(session, tables, all_rows=False)
    print(markdown(plan_lines(planned)))
    speed, source = session.speed
    left = sum(row.hours for row in planned)
    print(f"{left:,.1f} hours left at {speed:,.0f} GFLOP/s ({source}); rows with a finished run by its time.")
    if not full and "data.dataset" not in session.overrides:
        print("Rows without a finished run count as 0: hours depend on the photos. Give --data.dataset.")
    wrong = check_parameters(session) if full else []
    for line in wrong:
        print(line, file=sys.stderr)
    if full and not wrong:
        print("The six encoding rows have the parameters that the paper implies.")
    return 1 if wrong else 0


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # in one write: runs in parallel report too
    sys.stderr.flush()


def _numbers(text: str, flag: str, kind: type[Number]) -> tuple[Number, ...]:
    """Numbers of a flag, comma-separated, each above or equal to 0 and unlike the others"""
    try:
        numbers = tuple(kind(part) for part in listed(text))
    except ValueError:
        numbers = (kind(-1),)
    if any(number < 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(f"{flag} takes numbers that differ, with commas, not '{text}'.")
    return numbers


def report(
    folders: Annotated[list[str], "folders that haav ablate wrote"],
    *,
    out: Annotated[str, "HTML file to write"],
    images: Annotated[str | None, "folder, tar or list of the photos, of which ten are shown"] = None,
) -> int:
    """Write an HTML page about grids: scores with intervals, cost against quality, curves, captions."""
    from haav.files import check_writable, write_atomically
    from haav.photos import sources
    from haav.studies.report import render_report

    check_writable(Path(out))
    photos = {ref.id: ref for ref in sources.find_photos(listed(images))} if images else None
    text = render_report(folders, photos)
    write_atomically(Path(out), lambda file: file.write_text(text, encoding="utf-8"))
    print(out)
    return 0


def bench(
    *,
    model: Model = "best",
    json: Json = False,
    overrides: Overrides | None = None,
) -> int:
    """Measure how fast this machine captions photos, by stage. Takes minutes; the machine should be idle."""
    from haav.studies.bench import bench

    captioner = load_captioner(model, overrides)
    fetch_weights_of(captioner)
    results = bench(captioner, model)
    if json:
        print_json(results)
        return 0
    for name, value in results.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    return 0
