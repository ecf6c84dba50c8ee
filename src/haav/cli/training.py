"""Commands that train and score models: train, predict, evaluate, calibrate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from haav.cli.common import Overrides, listed, load_captioner, print_json
from haav.errors import ConfigError, unknown


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
    from haav.cli import output
    from haav.config.load import find_recipe, flags_from
    from haav.model.build import load_config
    from haav.train import loop

    if (recipe is None) == (resume is None):
        raise ConfigError("give a recipe to begin, or --resume RUN to go on: one of the two.")
    if resume is not None and (overrides or init or out):
        raise ConfigError("a resumed run keeps its settings; only --epochs can change.")
    if recipe is not None and out is None:
        raise ConfigError("name a folder for the run with --out.")
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
            f"no val photos to choose by: the last model is in {folder}/best." if outcome.finished else "no score yet."
        )
    skipped = f" {position.skipped} steps were skipped: their loss was not finite." if position.skipped else ""
    if outcome.finished:
        print(f"{folder}: {position.step} steps, {best}{skipped}")
        return 0
    print(f"stopped at step {position.step}.{skipped}\n  Go on with: haav train --resume {folder}", file=sys.stderr)
    return 130


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

    from haav.cli import output
    from haav.data.predictions import load_objects, load_predictions, load_references, match
    from haav.evaluate.scores import SLOW
    from haav.evaluate.scores import compare as compare_reports
    from haav.evaluate.scores import evaluate as score

    for name in listed(skip):
        if name not in SLOW:
            raise ConfigError(unknown("metric to leave out", name, SLOW))
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
    model: Annotated[str, "model directory; its confidence is fitted and saved"],
    *,
    store: Annotated[str, "view store with the photos' views"],
    dataset: Annotated[str, "data set with references"],
    split: Annotated[str, "split to fit on: val"] = "val",
    overrides: Overrides | None = None,
) -> int:
    """Fit the confidence of words to how often people use them of the same photo; report the calibration error."""
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
        raise ConfigError("confidence belongs to one model: calibrate each for itself.")
    if not Path(model).is_dir():
        raise ConfigError(
            f"'{model}' is not a model directory of yours: what is shipped is calibrated and stays as it is."
        )
    captioner = load_captioner(model, overrides)
    photos = load_dataset(dataset, split).split(split)
    with Store(store) as opened, output.progress("photos") as progress:
        captions = dict(predict.predict(captioner, opened, photos, progress=progress, seed=0))
    settings, report = predict.calibrate(captions, photos)
    saved = Captioner.from_pretrained(model)  # reloaded, so that decode settings of this command are not saved
    saved.with_config(replace(saved.config, confidence=settings)).save_pretrained(model, saved_dtype(model))
    print_json({"offset": settings.offset, "slope": settings.slope, **report})
    return 0
