"""Commands that train and score models: train, predict, evaluate, calibrate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from haav.cli.common import Json, Models, Overrides, Split, listed, load_captioner, print_json
from haav.errors import ConfigError, unknown


def train(
    recipe: Annotated[str | None, "name of a recipe (toy, coco-xe, …) or a YAML file; not with --resume"] = None,
    *,
    out: Annotated[str | None, "folder for the run"] = None,
    init: Annotated[str | None, "model directory to start from"] = None,
    resume: Annotated[str | None, "folder of a run to resume"] = None,
    epochs: Annotated[int | None, "with --resume: total number of epochs, instead of the recipe's"] = None,
    overrides: Overrides | None = None,
) -> int:
    """Train a model with a recipe, or resume a run. Ctrl-C saves and stops."""
    from haav.cli import output
    from haav.config.load import find_recipe, flags_from
    from haav.model.build import load_config
    from haav.train import loop

    if (recipe is None) == (resume is None):
        raise ConfigError("give either a recipe, or --resume RUN.")
    if resume is not None and (overrides or init or out):
        raise ConfigError("a resumed run keeps its settings; only --epochs can change.")
    if recipe is not None and out is None:
        raise ConfigError("a new run needs a folder: --out DIR.")
    folder = str(resume or out)
    with output.training() as report:
        if recipe is not None:
            config = load_config(file=find_recipe(recipe), flags=flags_from(overrides or []))
            outcome = loop.train(config, folder, init, report)
        else:
            outcome = loop.resume(folder, epochs, report)
    if not output.first_process():
        return 0
    position = outcome.position
    best = f"best CIDEr on val {100 * position.best:.1f} at step {position.best_step}, in {folder}/best."
    if position.best == float("-inf"):
        best = (
            f"no val photos to select a model: the last one is in {folder}/best."
            if outcome.finished
            else "no score yet."
        )
    skipped = f" {position.skipped} steps were skipped because their loss was not finite." if position.skipped else ""
    if outcome.finished:
        print(f"{folder}: {position.step} steps, {best}{skipped}")
        return 0
    print(f"stopped at step {position.step}.{skipped}\n  Resume with: haav train --resume {folder}", file=sys.stderr)
    return 130


def predict(
    *,
    store: Annotated[str, "view store with the views of the photos"],
    out: Annotated[str, "file to write"],
    model: Models = "best",
    baseline: Annotated[
        str | None, "baseline instead of a model: nearest or consensus of the retrieved sentences"
    ] = None,
    dataset: Annotated[str | None, "data set whose photos to caption (default: all photos of the store)"] = None,
    split: Split = "val",
    format: Annotated[str, "output format: coco (by file name) or coco-server (by COCO's image ids)"] = "coco",
    batch: Annotated[int, "photos per batch"] = 50,
    seed: Annotated[int, "random seed of --decode.method sample"] = 0,
    device: Annotated[str, "device of the model, e.g. cuda"] = "cpu",
    overrides: Overrides | None = None,
) -> int:
    """Caption the photos of a split from their stored views."""
    from haav.cli import output
    from haav.data.annotations import Photo, load_dataset
    from haav.data.predictions import names_for, save_predictions
    from haav.files import check_writable
    from haav.inference import predict
    from haav.store import Store

    check_writable(Path(out))  # fail before the work, not after it
    captioner = None if baseline else load_captioner(model, overrides, device)
    with Store(store) as opened, output.progress("photos") as progress:
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
            predicted = predict.predict(captioner, opened, photos, batch, progress, seed)
            captions = {photo: caption.text for photo, caption in predicted}
    save_predictions(out, captions, names)
    print(f"{out}: {len(captions):,} captions.")
    return 0


def evaluate(
    *,
    predictions: Annotated[str, "captions to score: COCO results, JSONL or {id: caption}"],
    references: Annotated[str, "reference captions: COCO or Karpathy JSON, {id: [captions]}, CSV or JSONL"],
    split: Annotated[str | None, "split of the references, if they have several"] = None,
    compare: Annotated[str | None, "second file of captions of the same photos"] = None,
    objects: Annotated[str | None, "objects in each photo, for CHAIR: JSON {id: [names]}"] = None,
    skip: Annotated[str, "metrics to skip, comma-separated: METEOR, SPICE"] = "",
    json: Json = False,
) -> int:
    """Score captions with BLEU, METEOR, ROUGE-L, CIDEr and SPICE, or compare two files of captions."""
    from dataclasses import asdict

    from haav.cli import output
    from haav.data.predictions import load_objects, load_predictions, load_references, match
    from haav.evaluate.scores import SLOW
    from haav.evaluate.scores import compare as compare_reports
    from haav.evaluate.scores import evaluate as score

    for name in listed(skip):
        if name not in SLOW:
            raise ConfigError(unknown("metric to skip", name, SLOW))
    photos = load_references(references, split)
    wanted = {photo.id: photo.captions for photo in photos}
    labels = load_objects(objects, photos) if objects else None
    files = [predictions, *([compare] if compare else [])]
    said = [match(load_predictions(path), photos) for path in files]  # read all files before scoring any
    first, *others = (score(captions, wanted, labels, listed(skip)) for captions in said)
    second = others[0] if others else None
    differences = compare_reports(first, second) if second else None
    if json:
        data = first.to_json()
        if second and differences:
            data["compare"] = second.to_json()
            data["difference"] = {name: asdict(difference) for name, difference in differences.items()}
        print_json(data)
    else:
        output.print_report(first, second, differences)
    return 0


def calibrate(
    model: Annotated[str, "model directory to calibrate; it is changed in place"],
    *,
    store: Annotated[str, "view store with the views of the photos"],
    dataset: Annotated[str, "data set with reference captions"],
    split: Annotated[str, "split to fit on; not test"] = "val",
    overrides: Overrides | None = None,
) -> int:
    """Calibrate the confidence of words on reference captions. Prints the calibration error."""
    from dataclasses import replace

    from haav.cli import output
    from haav.data.annotations import load_dataset
    from haav.inference import predict
    from haav.inference.captioner import Captioner
    from haav.pretrained import saved_dtype
    from haav.store import Store

    if split == "test":
        raise ConfigError("confidence is fitted on val, never on test.")
    if "," in model:
        raise ConfigError("give one model; calibrate the members of an ensemble one by one.")
    if not Path(model).is_dir():
        raise ConfigError(f"'{model}' is not a model directory. Shipped models are calibrated already.")
    captioner = load_captioner(model, overrides)
    photos = load_dataset(dataset, split).split(split)
    with Store(store) as opened, output.progress("photos") as progress:
        captions = dict(predict.predict(captioner, opened, photos, progress=progress, seed=0))
    settings, report = predict.calibrate(captions, photos)
    saved = Captioner.from_pretrained(model)  # reloaded, so that decode settings of this command are not saved
    saved.with_config(replace(saved.config, confidence=settings)).save_pretrained(model, saved_dtype(model))
    print_json({"offset": settings.offset, "slope": settings.slope, **report})
    return 0
