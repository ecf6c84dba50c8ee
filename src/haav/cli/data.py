"""Commands that prepare data for models: extract, views, import, store, dataset, textdb, bridge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from haav import weights
from haav.cli.common import fetch_weights, listed, print_json
from haav.errors import ConfigError, unknown
from haav.provenance import MadeBy


def extract(
    *,
    images: Annotated[str, "a folder, a .tar, a .txt list of paths; several with commas"],
    store: Annotated[str, "view store to fill; made when it is not there"],
    views: Annotated[str | None, "which views, with commas (default: grid,cells,objects,regions)"] = None,
    model: Annotated[str | None, "extract what this model reads, with its bridge and text database"] = None,
    bridge: Annotated[str | None, "for text views: a directory made by haav bridge"] = None,
    textdb: Annotated[str | None, "for text views: a directory made by haav textdb"] = None,
    clip_model: Annotated[str | None, "for clip_grid: a hub name or a folder"] = None,
    clip_text_model: Annotated[str | None, "for clip_text views: a hub name or a folder"] = None,
    detr_model: Annotated[str | None, "for detr_objects: a hub name or a folder"] = None,
    clip_source: Annotated[str | None, "for patch views: CLIP ViT-B/16 of the hub, a folder or a file"] = None,
    precision: Annotated[str | None, "for patch views: auto, float32, bfloat16 or int8"] = None,
    device: Annotated[str, "where networks run, e.g. cuda"] = "cpu",
    workers: Annotated[int | None, "processes (default: one per core)"] = None,
    batch: Annotated[int, "photos per batch"] = 8,
) -> int:
    """Turn photos into views and keep them; run it again to finish or to add a view."""
    from haav.cli import output
    from haav.photos import sources
    from haav.views import DEFAULT_VIEWS, ExtractorOptions, extract, weights_of

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
    refs = sources.find_photos(images.split(","))
    fetch_weights(weights.find(name) for name in weights_of(chosen, options))
    with output.progress("photos") as progress:
        summary = extract.extract(refs, store, chosen, options, workers, batch, progress, made_by)
    print(
        f"{store}: {summary.photos:,} photos extracted, {summary.skipped:,} were there, {len(summary.failures)} failed."
    )
    if summary.failures:
        print(f"{store}/{extract.FAILURES} names them; the first: {summary.failures[0].error}", file=sys.stderr)
    return 1 if summary.failures else 0


def views() -> int:
    """The views that can be extracted, what each needs, and plug-ins that do not work."""
    from haav.views import broken_plugins, extractors, view_names

    for name in view_names():
        extractor = extractors.get(name)
        needs = f"  needs {', '.join(f'--{need}' for need in extractor.needs)}" if extractor.needs else ""
        print(f"{name}  [{extractor.licence}]{needs}")
    for plugin in broken_plugins():
        print(f"broken: {plugin}.", file=sys.stderr)
    return 0


def import_features(
    layout: Annotated[str, "bottom_up_tsv, bottom_up_npz, oscar_hdf5, vis_ctx_hdf5 or txt_ctx_hdf5"],
    source: Annotated[str, "the file, or folder of files"],
    *,
    store: Annotated[str, "view store to fill; made when it is not there"],
    view: Annotated[str | None, "name of the view, where the layout leaves a choice"] = None,
    id_template: Annotated[str, "photo's name from the file's id, e.g. {id:012d}.jpg"] = "{id}",
) -> int:
    """Bring features that others extracted into a view store."""
    from haav.cli import output
    from haav.views import importers

    with output.progress("photos") as progress:
        summary = importers.import_features(layout, Path(source), store, view, id_template, progress)
    print(
        f"{store}: {summary.photos:,} photos imported, {summary.skipped:,} were there, {len(summary.failures)} failed."
    )
    for failure in summary.failures[:10]:
        print(f"{failure.image}: {failure.error}", file=sys.stderr)
    return 1 if summary.failures else 0


def store(
    action: Annotated[str, "info, verify, drop or export-webdataset"],
    path: Annotated[str, "the view store"],
    *,
    view: Annotated[str | None, "one view only (drop needs it)"] = None,
    out: Annotated[str | None, "export-webdataset: folder for the shards"] = None,
    shard_size: Annotated[int, "export-webdataset: photos per shard"] = 1000,
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Look at a view store, check every record, take a view out, or write it as WebDataset shards."""
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
            print(f"{path}: view '{view}' is gone.")
        elif action == "verify":
            faults = [(name, photo, fault) for name in chosen for photo, fault in opened.verify(name) if fault]
            for name, photo, fault in faults[:20]:
                print(f"{name} {photo}: {fault}")
            print(f"{path}: {sum(opened.count(name) for name in chosen):,} records, {len(faults)} damaged.")
            return 1 if faults else 0
        else:
            written = shards.write_shards(opened, chosen, Path(out or f"{path}-shards"), shard_size)
            print(f"{written} shards in {out or f'{path}-shards'}.")
    return 0


def dataset(
    path: Annotated[str, "Karpathy or COCO JSON, CSV, JSONL (.gz is fine), or a folder with captions.txt"],
    *,
    images: Annotated[str | None, "where the pictures are, to look for missing and duplicate ones"] = None,
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Count a data set's photos and captions; photos shared between splits are an error."""
    from dataclasses import asdict

    from haav.cli import output
    from haav.data.annotations import check_dataset, load_dataset
    from haav.photos import sources

    pictures = sources.digests(sources.find_photos(images.split(","))) if images else None
    check = check_dataset(load_dataset(path), pictures)
    print_json(asdict(check)) if json else output.print_check(check)
    return 1 if check.shared or check.missing else 0


def textdb(
    *,
    out: Annotated[str, "directory to write"],
    captions: Annotated[str, "data sets whose training captions go in, with commas"] = "",
    text: Annotated[str, "text files, a sentence a line, with commas"] = "",
    visual_genome: Annotated[str, "attributes.json, relationships.json, with commas"] = "",
    exclude: Annotated[str | None, "text file of Visual Genome or COCO image ids to leave out"] = None,
    limit: Annotated[int | None, "at most as many sentences, an even sample (60000: 25 MB when shipped)"] = None,
    clip_text_model: Annotated[str | None, "for clip_text views: a hub name or a folder (default: MiniLM)"] = None,
) -> int:
    """Make the text database that photos are described from. Only training captions ever enter."""
    from haav.cli import output
    from haav.views.retrieval import sentences
    from haav.views.retrieval.build import build_textdb

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
    store: Annotated[str, "view store with the view that the bridge starts from"],
    dataset: Annotated[str, "data set with train and val photos of the store"],
    textdb: Annotated[str, "text database with the captions of its training photos"],
    out: Annotated[str, "directory to write"],
    view: Annotated[str | None, "where it starts from: a view of the photo and its crops (default: regions)"] = None,
    epochs: Annotated[int, "passes over the photos, for each fold"] = 30,
    folds: Annotated[int, "photos of a fold are served by a bridge trained on the other folds"] = 5,
    seed: Annotated[int, "of everything random"] = 0,
) -> int:
    """Learn the way from photos to sentences on training captions; report recall on val."""
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
