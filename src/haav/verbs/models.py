"""Models: describe, convert, train, predict, calibrate, evaluate."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

from haav.errors import ConfigError, DataError, ImageError, unknown
from haav.verbs.common import Overrides, fetch_weights_of, listed, load_captioner, print_json


def describe(
    *,
    preset: Annotated[str | None, "starting point: paper, release or best (default)"] = None,
    encoding: Annotated[str | None, "how views are encoded: shared, unshared, concat_views, model_per_view"] = None,
    aggregator: Annotated[
        str | None, "how words draw on views: joint, hierarchical, concat_tokens, mean, max, sigmoid, tanh"
    ] = None,
    contrastive: Annotated[str | None, "train with the contrastive loss: true or false"] = None,
    config: Annotated[str | None, "a YAML file of settings on top of the preset"] = None,
    json: Annotated[bool, "print JSON"] = False,
    overrides: Overrides | None = None,
) -> int:
    """What a configuration is made of: parameters by part, views, FLOPs and how they grow."""
    from haav import terminal
    from haav.config import Given
    from haav.describe import describe
    from haav.presets import flags_from, load_config

    flags = flags_from(overrides or [])
    short = {
        ("model", "encoding"): ("--encoding", encoding),
        ("model", "aggregator"): ("--aggregator", aggregator),
        ("contrast", "enabled"): ("--contrastive", contrastive),
    }
    flags |= {path: Given(value, flag) for path, (flag, value) in short.items() if value is not None}
    description = describe(load_config(preset, config, flags))
    if json:
        print_json(description.to_json())
    else:
        terminal.print_description(description)
    return 0


def convert(
    source: Annotated[str, "a checkpoint of the authors' released code: .safetensors or .pth"],
    out: Annotated[str, "model directory to write"],
    *,
    vocabulary: Annotated[str | None, "its words by id: a JSON list, or one a line"] = None,
    heads: Annotated[int, "attention heads: the file does not say"] = 8,
) -> int:
    """Turn a checkpoint of the authors' released code into a model directory of haav."""
    from haav.convert import convert, save

    converted = convert(source, vocabulary, heads)
    save(converted, out)
    model = converted.captioner.config.model
    print(f"{out}: {len(model.views)} views, width {model.d_model}, {model.vocabulary_size} words.")
    if not converted.named:
        print("No --vocabulary was given, so its words are numbers (word4, word5, …).", file=sys.stderr)
    return 0


def train(
    recipe: Annotated[str | None, "a recipe by name (toy, coco-xe, …) or a YAML file; not with --resume"] = None,
    *,
    out: Annotated[str | None, "folder for the run"] = None,
    init: Annotated[str | None, "model directory to start from"] = None,
    resume: Annotated[str | None, "folder of a run to go on with"] = None,
    epochs: Annotated[int | None, "with --resume: as many in all instead of the recipe's"] = None,
    overrides: Overrides | None = None,
) -> int:
    """Train a model by a recipe, or go on with a run that was stopped. Ctrl-C saves and stops."""
    from haav import terminal
    from haav.presets import flags_from, load_config
    from haav.recipes import find_recipe
    from haav.train import loop

    if (recipe is None) == (resume is None):
        raise ConfigError("give a recipe to begin, or --resume RUN to go on: one of the two.")
    if resume is not None and (overrides or init or out):
        raise ConfigError("a resumed run keeps its settings; only --epochs can change.")
    if recipe is not None and out is None:
        raise ConfigError("name a folder for the run with --out.")
    folder = str(resume or out)
    with terminal.training() as report:
        if recipe is not None:
            config = load_config(file=find_recipe(recipe), flags=flags_from(overrides or []))
            outcome = loop.train(config, folder, init, report)
        else:
            outcome = loop.resume(folder, epochs, report)
    if not terminal.first_process():
        return 0
    position = outcome.position
    best = f"best CIDEr on val {100 * position.best:.1f} at step {position.best_step}, in {folder}/best."
    if position.best == float("-inf"):
        best = (
            f"no val photos to choose by: the last model is in {folder}/best." if outcome.finished else "no score yet."
        )
    skipped = f" {position.skipped} steps were skipped: their loss was not finite." if position.skipped else ""
    if outcome.finished:
        print(f"{folder}: {position.step} steps, {best}{skipped}")
        return 0
    print(f"stopped at step {position.step}.{skipped}\n  Go on with: haav train --resume {folder}", file=sys.stderr)
    return 130


def pack(
    model: Annotated[str, "model directory, e.g. RUN/best"],
    *,
    out: Annotated[str, "model directory to write"],
    bridge: Annotated[str | None, "for text views: the bridge that its photos were extracted with"] = None,
    textdb: Annotated[str | None, "for text views: the text database that its photos were extracted with"] = None,
    like: Annotated[str | None, "take both from this model, e.g. best"] = None,
) -> int:
    """Make a model small and complete: then it captions photos on any machine."""
    from haav.bundle import pack

    parts = pack(model, out, bridge, textdb, like)
    sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts.items())
    print(f"{out}: {sum(parts.values()) / 1e6:.1f} MB ({sizes}).")
    return 0


def export(
    model: Annotated[str, "a model that is shipped, or a model directory"],
    *,
    out: Annotated[str, "folder to write"],
) -> int:
    """Write a model as ONNX graphs; `python -m haav.portable` captions with them where there is no torch."""
    from haav.export import export

    parts = export(model, out)
    print(f"{out}: {len(parts)} files, {sum(parts.values()) / 1e6:.1f} MB.")
    print(f"  Try it: python -m haav.portable {out} photo.jpg")
    return 0


def predict(
    *,
    store: Annotated[str, "view store with the photos' views"],
    out: Annotated[str, "file to write"],
    model: Annotated[str, "a model that is shipped, or a model directory; several with commas: an ensemble"] = "best",
    baseline: Annotated[str | None, "no model at all: nearest or consensus of the retrieved sentences"] = None,
    dataset: Annotated[str | None, "data set whose photos are captioned; without it, all photos of the store"] = None,
    split: Annotated[str, "of the data set: train, val or test"] = "val",
    format: Annotated[str, "coco: results by file name; coco-server: by COCO's numbers, as its server wants"] = "coco",
    batch: Annotated[int, "photos at once"] = 50,
    seed: Annotated[int, "of captions drawn with --decode.method sample"] = 0,
    device: Annotated[str, "where the model runs: cpu, cuda, …"] = "cpu",
    overrides: Overrides | None = None,
) -> int:
    """Caption the photos of a split from their stored views."""
    from haav import predict, terminal
    from haav.data.annotations import Photo, load_dataset
    from haav.files import check_writable
    from haav.predictions import names_for, save_predictions
    from haav.store import Store

    check_writable(Path(out))  # what cannot end well is said before the work, not after
    captioner = None if baseline else load_captioner(model, overrides, device)
    with Store(store) as opened, terminal.progress("photos") as progress:
        if dataset:
            photos = load_dataset(dataset, split).split(split)
        else:
            names_from = captioner.views[0] if captioner else predict.sentence_view(opened)
            photos = tuple(Photo(name, split) for name in opened.ids(names_from))
        if not photos:
            raise ConfigError(f"{dataset or store} has no photos in split '{split}'.")
        names = names_for(format, photos)
        if captioner is None:
            captions = dict(predict.retrieved(opened, photos, baseline or ""))
        else:
            found = predict.predict(captioner, opened, photos, batch, progress, seed)
            captions = {photo: caption.text for photo, caption in found}
    save_predictions(out, captions, names)
    print(f"{out}: {len(captions):,} captions.")
    return 0


def calibrate(
    model: Annotated[str, "model directory; its confidence is fitted and saved"],
    *,
    store: Annotated[str, "view store with the photos' views"],
    dataset: Annotated[str, "data set with references"],
    split: Annotated[str, "split to fit on: val"] = "val",
    overrides: Overrides | None = None,
) -> int:
    """Fit the confidence of words to how often people use them of the same photo; report the calibration error."""
    from dataclasses import replace

    from haav import predict, terminal
    from haav.captioner import Captioner
    from haav.data.annotations import load_dataset
    from haav.pretrained import saved_dtype
    from haav.store import Store

    if split == "test":
        raise ConfigError("confidence is fitted on val, never on test.")
    if "," in model:
        raise ConfigError("confidence belongs to one model: calibrate each for itself.")
    if not Path(model).is_dir():
        raise ConfigError(
            f"'{model}' is not a model directory of yours: what is shipped is calibrated and stays as it is."
        )
    captioner = load_captioner(model, overrides)
    photos = load_dataset(dataset, split).split(split)
    with Store(store) as opened, terminal.progress("photos") as progress:
        captions = dict(predict.predict(captioner, opened, photos, progress=progress, seed=0))
    settings, report = predict.calibrate(captions, photos)
    saved = Captioner.from_pretrained(model)  # as it was: decode settings of this command are not the model's
    saved.with_config(replace(saved.config, confidence=settings)).save_pretrained(model, saved_dtype(model))
    print_json({"offset": settings.offset, "slope": settings.slope, **report})
    return 0


def evaluate(
    *,
    predictions: Annotated[str, "captions: COCO results, JSONL or {id: caption}"],
    references: Annotated[str, "COCO captions JSON, Karpathy JSON, {id: [captions]}, CSV or JSONL"],
    split: Annotated[str | None, "split of the references, where they have several"] = None,
    compare: Annotated[str | None, "another file of captions of the same photos"] = None,
    objects: Annotated[str | None, "for hallucination (CHAIR): JSON {id: [names of what is there]}"] = None,
    skip: Annotated[str, "metrics to leave out: METEOR, SPICE"] = "",
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Score captions: BLEU, METEOR, ROUGE-L, CIDEr, SPICE with 95 % intervals; compare two files of them."""
    from dataclasses import asdict

    from haav import terminal
    from haav.evaluate.scores import SLOW
    from haav.evaluate.scores import compare as compare_reports
    from haav.evaluate.scores import evaluate as score
    from haav.predictions import load_objects, load_predictions, load_references, match

    for name in listed(skip):
        if name not in SLOW:
            raise ConfigError(unknown("metric to leave out", name, SLOW))
    photos = load_references(references, split)
    wanted = {photo.id: photo.captions for photo in photos}
    labels = load_objects(objects, photos) if objects else None
    files = [predictions, *([compare] if compare else [])]
    said = [match(load_predictions(path), photos) for path in files]  # all are read before any is scored
    first, *others = (score(captions, wanted, labels, listed(skip)) for captions in said)
    second = others[0] if others else None
    differences = compare_reports(first, second) if second else None
    if json:
        data = first.to_json()
        if second and differences:
            data["compare"] = second.to_json()
            data["difference"] = {name: asdict(found) for name, found in differences.items()}
        print_json(data)
    else:
        terminal.print_report(first, second, differences)
    return 0


def control(
    study: Annotated[str, "noise: tokens of a view are zeroed; mask: an object is covered for one view"],
    *,
    out: Annotated[str, "folder for the figure and the numbers"],
    store: Annotated[str | None, "noise: store with the views of the photos"] = None,
    dataset: Annotated[str | None, "data set that says which photos; for mask, without it all"] = None,
    split: Annotated[str, "of the data set: train, val or test"] = "val",
    images: Annotated[str | None, "mask: folder, tar or list of photos"] = None,
    limit: Annotated[int | None, "at most as many photos"] = None,
    cover: Annotated[str, "mask: grey or blur"] = "grey",
    model: Annotated[str, "a model that is shipped, or a model directory"] = "best",
    seed: Annotated[int, "of everything random"] = 0,
) -> int:
    """The paper's control studies: does the decoder trust a view less when it is spoilt?"""
    from haav import control, sources, terminal
    from haav.data.annotations import load_dataset
    from haav.data.loader import StoredPhotos
    from haav.files import make_folder, write_atomically
    from haav.images import load_image
    from haav.plots import check_installed
    from haav.shards import open_store

    check_installed("the study")
    folder = make_folder(out)
    captioner = load_captioner(model, None)
    if study == "noise":
        if store is None or dataset is None:
            raise ConfigError("the noise study needs --store and --dataset.")
        photos = load_dataset(dataset).split(split)[:limit]
        made_by = captioner.config.made_by
        stored = StoredPhotos(open_store(store), captioner.views, photos, vocabulary=None, made_by=made_by)
        with terminal.progress("photos") as progress:
            found = control.noise_study(captioner, stored, seed=seed, progress=progress)
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
        with terminal.progress("photos") as progress:
            for number, ref in enumerate(refs, 1):
                try:
                    case = control.mask_photo(captioner, load_image(ref.read()), cover)
                    masked += [case] if case is not None else []
                except ImageError as error:
                    print(f"{terminal.printable(ref.id)}: {error}", file=sys.stderr)
                progress(number, len(refs))
        found = control.mask_study(masked, seed)
    else:
        raise ConfigError(unknown("study", study, ["noise", "mask"]))
    if not found:
        raise DataError("there is nothing to measure on: no photo, or none whose caption names an object it has.")
    text = json_format.dumps(found, indent=1)
    write_atomically(folder / f"{study}.json", lambda file: file.write_text(text, encoding="utf-8"))
    write_atomically(folder / f"{study}.png", lambda file: control.draw(file, found))
    terminal.print_control(study, found)
    return 0


def ablate(
    grid: Annotated[str, "a grid by name (encodings, decoders, views, …) or a YAML file"],
    *,
    out: Annotated[str, "folder for the runs and the table; what is done in it is not repeated"],
    workers: Annotated[int, "runs side by side"] = 1,
    overrides: Overrides | None = None,
) -> int:
    """Train a grid of named runs and put their scores and costs into one table."""
    from haav import ablate

    settings = {flag.removeprefix("--"): value for flag, value in overrides or []}
    found = ablate.load_grid(grid)
    ablate.run_grid(found, out, settings, workers, lambda line: print(line, file=sys.stderr, flush=True))
    print((Path(out) / "table.md").read_text(encoding="utf-8"))
    return 0


def report(
    folders: Annotated[list[str], "folders that haav ablate wrote"],
    *,
    out: Annotated[str, "HTML file to write"],
    images: Annotated[str | None, "folder, tar or list of the photos, to show ten of them"] = None,
) -> int:
    """One page of one or more grids: bars with intervals, cost against quality, curves, captions side by side."""
    from haav import sources
    from haav.files import check_writable, write_atomically
    from haav.report import render_report

    check_writable(Path(out))
    photos = {ref.id: ref for ref in sources.find_photos(listed(images))} if images else None
    text = render_report(folders, photos)
    write_atomically(Path(out), lambda file: file.write_text(text, encoding="utf-8"))
    print(out)
    return 0
