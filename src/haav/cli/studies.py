"""Commands that study models: describe, control, ablate, report, bench."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

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
    overrides: Overrides | None = None,
) -> int:
    """Train a grid of named runs and write a table of their scores and costs."""
    from haav.studies import ablate

    settings = {flag.removeprefix("--"): value for flag, value in overrides or []}
    loaded = ablate.load_grid(grid)
    ablate.run_grid(loaded, out, settings, workers, lambda line: print(line, file=sys.stderr, flush=True))
    print((Path(out) / "table.md").read_text(encoding="utf-8"))
    return 0


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
