"""What is measured of trained models beside their captions: an ensemble, noised and covered views. And the cost of
more views and the seconds of a step, which need no training.

Each study writes one JSON file per model, {row: {photo: value}}, and does not repeat what is there. The cost of more
views is counted anew, since settings may have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from haav.config import ModelConfig
from haav.data.annotations import Photo, load_dataset
from haav.data.loader import StoredPhotos
from haav.errors import ConfigError, ImageError, TrainingError
from haav.files import json_of, make_folder, write_atomically
from haav.inference.captioner import Captioner
from haav.inference.predict import predict
from haav.photos.images import load_image
from haav.photos.sources import PhotoRef
from haav.store import open_store
from haav.studies.ablate import config_of, data_of, model_folder, score_captions
from haav.studies.control import mask_photo, noised_weights
from haav.studies.describe import cost, count_parameters, with_equal_views
from haav.studies.grid import Grid, Row
from haav.studies.outcomes import RESULT, final_folder, photo_scores, read_outcome
from haav.studies.speed import measure_speed, read_speed
from haav.train.run import RunFiles

STUDY = "study.json"
VIEWS = range(1, 9)
GIGAFLOPS_OF, PARAMETERS_OF = "GFLOP of ", "M parameters of "
"""what the growth study counts of so many views, per photo and in all"""
SHARE = 0.9
"""of the tokens of a view that the noise study zeroes"""
PHOTOS = 1000
"""val photos of the noise and mask studies"""
Values = dict[str, dict[str, float]]
"""row → photo → value"""


@dataclass(frozen=True)
class Trained:
    """A model of a grid with the data that it was trained on."""

    place: Path
    """the folder of its results"""
    run: Path
    """the folder of its training"""
    model: Path

    @classmethod
    def of(cls, grid: Grid, folder: Path, row: Row, seed: int) -> Trained | None:
        """None until the run is done"""
        place = final_folder(grid, folder, row, seed)
        outcome = None if place is None else read_outcome(place)
        if place is None or outcome is None:
            return None
        return cls(place, place / outcome.run, model_folder(place, outcome))

    def captioner(self) -> Captioner:
        if not self.model.exists():
            raise TrainingError(
                f"{self.model} is not here, only the results of its run.\n"
                f"  Copy the model from the machine that trained it, or delete {self.place} to train it again."
            )
        return Captioner.from_pretrained(self.model)

    def photos(self, split: str) -> tuple[list[Photo], str]:
        """Photos with captions, and the path of their store"""
        dataset, store = data_of(self.run, RunFiles(self.run).read()[0])
        return [photo for photo in load_dataset(dataset).split(split) if photo.captions], store


def study_models(
    grid: Grid, folder: Path, images: Mapping[str, PhotoRef], report: Callable[[str], None] = lambda line: None
) -> None:
    """Run the study of a grid with each of its trained models, or with all of them at once."""
    trained = {seed: Trained.of(grid, folder, grid.rows[0], seed) for seed in grid.seeds}
    models = {seed: model for seed, model in trained.items() if model is not None}
    if grid.study == "growth":
        _write(folder / STUDY, {row.name: growth(grid, row) for row in grid.rows})
    elif grid.study == "speed":
        if read_speed(folder / STUDY, grid) is None:
            _write(folder / STUDY, measure_speed(grid, report))
    elif grid.study == "ensemble" and len(models) == len(grid.seeds):
        file = ensemble_file(folder, models.values())
        _once(file, lambda: ensemble(list(models.values()), file.parent))
    elif grid.study in ("noise", "mask"):
        for seed, model in models.items():
            file = model.place / f"{grid.study}-{STUDY}"
            if not file.exists():
                report(f"{grid.title}, seed {seed}: begins")
            _once(file, partial(noise, model) if grid.study == "noise" else partial(mask, model, images))


def study_values(grid: Grid, folder: Path) -> dict[int, Values]:
    """Seed → what the study measured with that model. An ensemble and the growth have one entry."""
    trained = {seed: Trained.of(grid, folder, grid.rows[0], seed) for seed in grid.seeds}
    models = {seed: model for seed, model in trained.items() if model is not None}
    files = {seed: model.place / f"{grid.study}-{STUDY}" for seed, model in models.items()}
    if grid.study == "growth":
        files = {0: folder / STUDY}
    elif grid.study == "ensemble":
        files = {0: ensemble_file(folder, models.values())} if len(models) == len(grid.seeds) else {}
    return {seed: _read(file) for seed, file in files.items() if file.exists()}


def ensemble_file(folder: Path, models: Iterable[Trained]) -> Path:
    """The file of an ensemble's study. Its name depends on the members, so that others are measured anew."""
    outcomes = [read_outcome(model.place) for model in models]
    keys = "".join(outcome.key for outcome in outcomes if outcome is not None)
    return folder / f"of-{hashlib.sha256(keys.encode()).hexdigest()[:16]}" / STUDY


def ensemble(models: list[Trained], folder: Path) -> Values:
    """CIDEr of each photo: of the ensemble, and of its members on average. Its captions are written to the folder."""
    captioner = Captioner.ensemble([model.captioner() for model in models])
    split = json_of((models[0].place / RESULT).read_text(encoding="utf-8"))["split"]
    photos, store = models[0].photos(split)
    captions = {photo: caption.text for photo, caption in predict(captioner, open_store(store), photos, seed=0)}
    score_captions(captions, {photo.id: photo.captions for photo in photos}, make_folder(folder))
    own = [photo_scores(model.place) for model in models]
    return {
        "ensemble": {photo: 100 * score for photo, score in photo_scores(folder).items()},
        "one model": {photo: 100 * float(np.mean([each[photo] for each in own])) for photo in own[0]},
    }


def noise(model: Trained) -> Values:
    """View → photo → percentage points of its weight that the view loses when its tokens are zeroed"""
    captioner = model.captioner()
    photos, store = model.photos("val")
    stored = StoredPhotos(
        open_store(store), captioner.views, photos[:PHOTOS], vocabulary=None, made_by=captioner.config.made_by
    )
    clean, noised = noised_weights(captioner, stored, (SHARE,))
    return {
        view: {photo: _points(np.mean(steps) - np.mean(noised[view][SHARE][photo])) for photo, steps in weights.items()}
        for view, weights in clean.items()
    }


def mask(model: Trained, images: Mapping[str, PhotoRef]) -> Values:
    """View → photo → percentage points of its weight that the view loses at the word of a covered object"""
    if not images:
        raise ConfigError("the mask study covers objects in photos.\n  Give them: --images FOLDER.")
    captioner = model.captioner()
    lost: Values = {}
    for photo in [photo for photo in model.photos("val")[0] if photo.id in images][:PHOTOS]:
        try:
            case = mask_photo(captioner, load_image(images[photo.id].read()))
        except ImageError:
            continue  # a photo that cannot be read has no object to cover
        for view in case.clean if case is not None else ():
            assert case is not None
            change = np.mean(case.clean[view]) - np.mean(case.covered[view])
            lost.setdefault(view, {})[photo.id] = _points(change)
    if not lost:
        raise ConfigError("no caption of a val photo names an object that was found in it: nothing can be covered.")
    return lost


def _points(share: np.floating[Any]) -> float:
    """Percentage points, rounded, since these files are copied to other machines"""
    return round(100 * float(share), 4)


def growth(grid: Grid, row: Row) -> dict[str, float]:
    """How cost and parameters grow with the number of equal views, and both for 1 to 8 views"""
    config = config_of(grid.recipe, {**grid.settings, **row.settings})
    attention: dict[int, int] = {}
    parameters: dict[int, int] = {}
    values: dict[str, float] = {}
    for count in VIEWS:
        model: ModelConfig = with_equal_views(config.model, count)
        alone = replace(config, model=model, contrast=replace(config.contrast, enabled=False))
        each, parts = cost(model), count_parameters(alone)
        attention[count] = each.encoding_attention
        parameters[count] = sum(parts.values()) - parts["view projections"]
        values[f"{GIGAFLOPS_OF}{count}"] = (each.encoding + each.memory + each.step) / 1e9
        values[f"{PARAMETERS_OF}{count}"] = sum(parts.values()) / 1e6
    # By increments, so that a constant part does not count.
    first, second = attention[4] - attention[2], attention[8] - attention[4]
    values["exponent of attention"] = float(np.log2(second / first))
    values["parameters, 8 views to 1"] = parameters[8] / parameters[1]
    return values


def _once(file: Path, measure: Callable[[], Any]) -> None:
    if not file.exists():
        _write(file, measure())


def _write(file: Path, values: Any) -> None:
    text = json.dumps(values, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda new: new.write_text(text, encoding="utf-8"))


def _read(file: Path) -> Values:
    return dict(json_of(file.read_text(encoding="utf-8")))
