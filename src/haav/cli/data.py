"""Commands that prepare data for models: extract, views, import, store, dataset, textdb, bridge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from haav import weights
from haav.cli.common import Device, Json, Seed, check_unused, exit_code, fetch_weights, listed, print_json
from haav.cli.jobs import JobSettings, extract_in_parts
from haav.errors import ConfigError, DataError, printable, unknown
from haav.photos.remote import is_remote
from haav.provenance import MadeBy


def extract(
    *,
    images: Annotated[str, "folder, .tar file or list of paths (.txt or @FILE); several, comma-separated"],
    store: Annotated[str, "view store to write to; created if missing"],
    views: Annotated[str | None, "views to extract, comma-separated (default: patches,patch_regions)"] = None,
    model: Annotated[str | None, "model whose views to extract, with its bridge and text database"] = None,
    bridge: Annotated[str | None, "text views: directory written by haav bridge"] = None,
    textdb: Annotated[str | None, "text views: directory written by haav textdb"] = None,
    clip_model: Annotated[str | None, "clip_grid: hub name or folder"] = None,
    clip_text_model: Annotated[str | None, "clip_text views: hub name or folder"] = None,
    detr_model: Annotated[str | None, "detr_objects: hub name or folder"] = None,
    clip_source: Annotated[str | None, "patch views: hub name, folder or file of CLIP ViT-B/16"] = None,
    precision: Annotated[str | None, "patch views: auto, float32, bfloat16 or int8"] = None,
    device: Device = "cpu",
    workers: Annotated[int | None, "worker processes (default: one per core)"] = None,
    batch: Annotated[int | None, "photos per batch (default: 8, fewer where memory is short)"] = None,
    engine: Annotated[str | None, "ray: extract parts of the photos into shards, on a Ray cluster"] = None,
    address: Annotated[str | None, "ray: of the cluster, or auto (default: a cluster of this machine)"] = None,
    cores: Annotated[int, "ray: cores of each worker"] = 1,
    part: Annotated[int, "ray: photos of a shard; a tar file or Parquet row group is one shard"] = 256,
) -> int:
    """Extract views of photos into a store. Run it again to resume or to add a view."""
    from haav.cli import output
    from haav.photos import sources
    from haav.views import DEFAULT_VIEWS, ExtractorOptions, extract, weights_of

    if batch is not None and batch < 1:
        raise ConfigError(f"a batch has at least 1 photo, not {batch}.")
    made_by: MadeBy = {}
    options = ExtractorOptions(device, precision, bridge, textdb, clip_source, clip_model, clip_text_model, detr_model)
    if model is not None:
        from haav.pretrained import find_model, read_config
        from haav.views.live import with_own_texts

        home = find_model(model)
        config = read_config(home)
        views, made_by = views or ",".join(config.model.views), config.made_by
        options = with_own_texts(options, home)
    chosen = listed(views or "") or list(DEFAULT_VIEWS)
    paths = images.split(",")
    fetch_weights(weights.find(name) for name in weights_of(chosen, options))
    if engine is not None or is_remote(store) or any(map(is_remote, paths)):
        settings = JobSettings(paths, store, None, engine, address, workers, cores, part, batch, device, precision)
        return extract_in_parts(settings, chosen, options, made_by)
    refs = sources.find_photos(paths, output.note)
    with output.progress("photos") as progress:
        summary = extract.extract(refs, store, chosen, options, workers, batch, progress, made_by)
    counts = f"{summary.photos:,} photos extracted, {summary.skipped:,} already stored, {len(summary.failures)} failed"
    print(f"{printable(store)}: {counts}.")
    if summary.failures:
        first = printable(summary.failures[0].error, lines=True)
        print(f"{printable(store)}/{extract.FAILURES} lists them; the first: {first}", file=sys.stderr)
    return exit_code(summary.photos + summary.skipped, len(summary.failures))


def views() -> int:
    """List the views that can be extracted, what each needs, and broken plug-ins."""
    from haav.views import broken_plugins, extractors, view_names

    for name in view_names():
        extractor = extractors.get(name)
        needs = f"  needs {', '.join(f'--{need}' for need in extractor.needs)}" if extractor.needs else ""
        print(f"{name}  [{extractor.licence}]{needs}")
    for plugin in broken_plugins():
        print(f"broken: {plugin}.", file=sys.stderr)
    return 0


def import_features(
    layout: Annotated[
        str, "layout of the files: bottom_up_tsv, bottom_up_npz, oscar_hdf5, vis_ctx_hdf5 or txt_ctx_hdf5"
    ],
    source: Annotated[str, "file, or folder of files"],
    *,
    store: Annotated[str, "view store to write to; created if missing"],
    view: Annotated[str | None, "name of the view, if the layout leaves a choice"] = None,
    id_template: Annotated[str, "template of photo names, e.g. {id:012d}.jpg"] = "{id}",
) -> int:
    """Import features that other programs extracted into a view store."""
    from haav.cli import output
    from haav.views import importers

    with output.progress("photos") as progress:
        summary = importers.import_features(layout, Path(source), store, view, id_template, progress)
    counts = f"{summary.photos:,} photos imported, {summary.skipped:,} already stored, {len(summary.failures)} failed"
    print(f"{printable(store)}: {counts}.")
    for failure in summary.failures[:10]:
        print(f"{printable(failure.image)}: {printable(failure.error, lines=True)}", file=sys.stderr)
    return exit_code(summary.photos + summary.skipped, len(summary.failures))


def store(
    action: Annotated[str, "info, verify, drop or export-webdataset"],
    path: Annotated[str, "view store"],
    *,
    view: Annotated[str | None, "a single view (required by drop)"] = None,
    out: Annotated[str | None, "export-webdataset: folder for the shards"] = None,
    shard_size: Annotated[int, "export-webdataset: photos per shard"] = 1000,
    json: Json = False,
) -> int:
    """Inspect a view store, verify its records, drop a view, or write WebDataset shards."""
    from haav.cli import output
    from haav.store import Store, shards

    actions = ("info", "verify", "drop", "export-webdataset")
    if action not in actions:
        raise ConfigError(unknown("action", action, actions))
    with Store(path, write=action == "drop") as opened:
        chosen = [view] if view else sorted(opened.views)
        if action == "info":
            info = opened.info()
            print_json(info) if json else output.print_store(path, info)
        elif action == "drop":
            if not view:
                raise ConfigError("drop needs --view NAME.")
            opened.drop(view)
            print(f"{printable(path)}: view '{view}' dropped.")
        elif action == "verify":
            faults = [(name, photo, fault) for name in chosen for photo, fault in opened.verify(name) if fault]
            for name, photo, fault in faults[:20]:
                print(f"{name} {printable(photo)}: {printable(fault, lines=True)}")
            print(f"{printable(path)}: {sum(opened.count(name) for name in chosen):,} records, {len(faults)} damaged.")
            return 1 if faults else 0
        else:
            folder = out or f"{path}-shards"
            written = shards.write_shards(opened, chosen, Path(folder), shard_size)
            print(f"{written} shards in {printable(folder)}.")
    return 0


def dataset(
    path: Annotated[str, "Karpathy or COCO JSON, CSV or JSONL (also .gz), .arrow, or a folder with captions.txt"],
    *,
    out: Annotated[str | None, "write the data set as an .arrow file, which training reads without loading it"] = None,
    images: Annotated[str | None, "folder, tar or list of the photos, to find missing and duplicate ones"] = None,
    json: Json = False,
) -> int:
    """Count a data set, or convert it. Fails without captions, or if splits share photos."""
    from dataclasses import asdict

    from haav.cli import output
    from haav.data.annotations import check_dataset, load_dataset
    from haav.data.convert import convert
    from haav.photos import sources

    if out is not None:
        convert(path, out)
    pictures = sources.digests(sources.find_photos(images.split(","))) if images else None
    check = check_dataset(load_dataset(out or path), pictures)
    print_json(asdict(check)) if json else output.print_check(check)
    if not check.captions and not check.machine_captions:
        raise DataError(
            f"no photo of {path} has a caption. In a table, captions are in the column 'caption'.\n"
            "  Without captions, it can be used for training only as photos: --data.dataset PATH:photos"
        )
    return 1 if check.shared or check.missing else 0


def textdb(
    *,
    out: Annotated[str, "directory to write"],
    captions: Annotated[str, "data sets whose training captions to include, comma-separated"] = "",
    text: Annotated[str, "text files with one sentence per line, comma-separated"] = "",
    visual_genome: Annotated[str, "attributes.json and relationships.json, comma-separated"] = "",
    exclude: Annotated[str | None, "text file of Visual Genome or COCO image ids to exclude"] = None,
    limit: Annotated[
        int | None, "largest number of sentences, sampled evenly (60000 take 25 MB in a packed model)"
    ] = None,
    clip_text_model: Annotated[
        str | None, "clip_text views: hub name or folder of the encoder (default: MiniLM)"
    ] = None,
    overwrite: Annotated[bool, "replace the text database in the directory"] = False,
) -> int:
    """Build the text database that text views retrieve from. Only training captions are included."""
    from haav.cli import output
    from haav.views.retrieval import sentences
    from haav.views.retrieval.build import build_textdb
    from haav.views.retrieval.textdb import MANIFEST

    check_unused(Path(out) / MANIFEST, overwrite)
    ids = frozenset(Path(exclude).read_text().split()) if exclude else frozenset()
    encoder = None
    if clip_text_model:
        from haav.views.hub.clip import ClipTextEncoder

        encoder = ClipTextEncoder(clip_text_model)
    else:
        fetch_weights([weights.find(sentences.WEIGHTS)])
    with output.progress("sentences") as progress:
        database = build_textdb(listed(captions), listed(text), listed(visual_genome), ids, progress, encoder, limit)
    database.save(out)
    print(f"{out}: {len(database):,} sentences.")
    return 0


def bridge(
    *,
    store: Annotated[str, "view store with the view that the bridge reads"],
    dataset: Annotated[str, "data set with the train and val photos of the store"],
    textdb: Annotated[str, "text database with the captions of its training photos"],
    out: Annotated[str, "directory to write"],
    view: Annotated[str | None, "view of the photo and its crops to read (default: patch_regions)"] = None,
    epochs: Annotated[int, "epochs per fold"] = 30,
    folds: Annotated[int, "number of folds; a bridge serves the fold that it was not trained on"] = 5,
    seed: Seed = 0,
) -> int:
    """Train the bridge from photos to sentences on training captions. Prints recall on val."""
    from haav.cli import output
    from haav.data.annotations import load_dataset
    from haav.store import Store
    from haav.views.retrieval import sentences
    from haav.views.retrieval.bridge import FEATURES
    from haav.views.retrieval.build import build_bridge
    from haav.views.retrieval.textdb import TextDatabase

    fetch_weights([weights.find(sentences.WEIGHTS)])
    with Store(store) as opened, output.progress("epochs") as progress:
        fitted, report = build_bridge(
            opened,
            load_dataset(dataset),
            TextDatabase.load(textdb),
            progress,
            view=view or FEATURES,
            epochs=epochs,
            folds=folds,
            seed=seed,
        )
    fitted.save(out, report)
    print_json(report)
    return 0
