"""Commands that train and score models: train, predict, evaluate, calibrate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haav.cli.common import Json, Models, Overrides, Split, listed, load_captioner, print_json
from haav.errors import ConfigError, printable, unknown

if TYPE_CHECKING:
    from haav.data.annotations import Photo


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
    from haav.pretrained import read_config
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
            start = None if init is None else read_config(init)
            config = load_config(file=find_recipe(recipe), flags=flags_from(overrides or []), init=start)
            outcome = loop.train(config, folder, init, report, output.say)
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
    predictions: Annotated[str, "captions to score: of haav caption --out, COCO results, JSONL or {id: caption}"],
    references: Annotated[str, "reference captions: COCO or Karpathy JSON, {id: [captions]}, CSV or JSONL"],
    split: Annotated[str | None, "split of the references, if they have several"] = None,
    compare: Annotated[str | None, "second file of captions of the same photos"] = None,
    match_by: Annotated[
        str | None, "what photos are matched by: name, stem or id (default: what fits most photos)"
    ] = None,
    skip_failed: Annotated[bool, "leave out photos that haav caption could not read"] = False,
    objects: Annotated[str | None, "objects in each photo, for CHAIR: JSON {id: [names]}"] = None,
    skip: Annotated[str, "metrics to skip, comma-separated: METEOR, SPICE"] = "",
    json: Json = False,
) -> int:
    """Score captions with BLEU, METEOR, ROUGE-L, CIDEr and SPICE, or compare two files of captions."""
    from dataclasses import asdict

    from haav.cli import output
    from haav.data.predictions import load_objects, load_references, match, read_predictions, without_failed
    from haav.evaluate.scores import SLOW
    from haav.evaluate.scores import compare as compare_reports
    from haav.evaluate.scores import evaluate as score

    for name in listed(skip):
        if name not in SLOW:
            raise ConfigError(unknown("metric to skip", name, SLOW))
    photos: Sequence[Photo] = load_references(references, split)
    files = [read_predictions(path) for path in (predictions, compare) if path]  # read all before scoring any
    captions, photos = without_failed(files, photos, match_by, skip_failed)
    for file in files:
        for name, error in file.failed.items():
            print(f"left out: {printable(name)}: {printable(error, lines=True)}", file=sys.stderr)
    labels = load_objects(objects, photos) if objects else None
    said = [match(part, photos, match_by) for part in captions]
    wanted = {photo.id: photo.captions for photo in photos}
    first, *others = (score(part, wanted, labels, listed(skip)) for part in said)
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
    """Calibrate the confidence of words and captions. Prints the calibration error.

    It is fitted on reference captions and, if the model directory has all that its views need, on pictures that show
    nothing. Pictures unlike the training photos are flagged from then on.
    """
    from dataclasses import asdict, replace

    from haav.cli import output
    from haav.data.annotations import load_dataset
    from haav.inference.calibrate import calibrate as fit_confidence
    from haav.inference.captioner import Captioner
    from haav.inference.predict import predict
    from haav.pretrained import saved_dtype
    from haav.store import Store

    if split == "test":
        raise ConfigError("confidence is fitted on val, never on test.")
    if "," in model:
        raise ConfigError("give one model; calibrate the members of an ensemble one by one.")
    if not Path(model).is_dir():
        raise ConfigError(f"'{model}' is not a model directory. Shipped models are calibrated already.")
    captioner = load_captioner(model, overrides)
    data = load_dataset(dataset, split)
    with Store(store) as opened:
        with output.progress("photos") as progress:
            captions = dict(predict(captioner, opened, data.split(split), progress=progress, seed=0))
        missing = set(opened.missing(captioner.views[0], [photo.id for photo in data.split("train")]))
        known = [photo for photo in data.split("train") if photo.id not in missing]
        fitted = fit_confidence(captioner, opened, known, data.split(split), captions)
    saved = Captioner.from_pretrained(model)  # reloaded, so that decode settings of this command are not saved
    saved.novelty = fitted.novelty
    saved.with_config(replace(saved.config, confidence=fitted.confidence)).save_pretrained(model, saved_dtype(model))
    print_json({**asdict(fitted.confidence), **fitted.report})
    return 0
