"""The paper's two control studies (§4.4, Fig. 3) over a whole split, with statistics instead of an example.

Noise: tokens of one view are zeroed. Does the decoder trust that view less at every word? Mask: an object is covered
for one view only. Does the decoder trust that view less at the word of the object? Weights are those of the last
decoder layer. The words are those of the caption of the undisturbed photo, so that steps can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from haav.data.collate import collate
from haav.data.loader import ShuffledBatches, StoredPhotos, build_loader
from haav.errors import ConfigError, DataError, unknown
from haav.evaluate.chair import class_names, mentioned
from haav.evaluate.statistics import bootstrap_means, percentile_interval
from haav.inference.captioner import Captioner
from haav.model.haav import Haav
from haav.plots import new_figure
from haav.studies.explain import weighing
from haav.text import BOS, UNK
from haav.types import Caption, PhotoView, Progress, Views, quiet
from haav.views import views_that_give

COVERS = ("grey", "blur")
RESAMPLES = 2000


@dataclass(frozen=True)
class Change:
    """Change of a view's weight over photos: disturbed minus clean."""

    photos: int
    clean: float
    disturbed: float
    mean: float
    low: float
    high: float
    """95 % interval of the mean, by bootstrap over photos"""
    effect: float
    """Cohen's d of the paired differences: their mean divided by their standard deviation"""
    photos_that_drop: float
    steps_that_drop: float


def change(clean: Sequence[Sequence[float]], disturbed: Sequence[Sequence[float]], seed: int = 0) -> Change:
    """Compare the weights at the steps of each photo, clean and disturbed."""
    differences = [np.subtract(after, before) for before, after in zip(clean, disturbed, strict=True)]
    if not differences:
        raise DataError("no photo is left to measure on.")
    means = np.array([steps.mean() for steps in differences])
    low, high = percentile_interval(bootstrap_means(means, RESAMPLES, seed))
    spread = means.std(ddof=1) if len(means) > 1 else 0.0
    return Change(
        len(means),
        float(np.mean([np.mean(steps) for steps in clean])),
        float(np.mean([np.mean(steps) for steps in disturbed])),
        float(means.mean()),
        float(low),
        float(high),
        float(means.mean() / spread) if spread else 0.0,
        float((means < 0).mean()),
        float((np.concatenate(differences) < 0).mean()),
    )


Steps = dict[str, list[float]]
"""photo → weight of a view at each step of its caption"""


def noised_weights(
    captioner: Captioner, photos: StoredPhotos, shares: Sequence[float], seed: int = 0, progress: Progress = quiet
) -> tuple[dict[str, Steps], dict[str, dict[float, Steps]]]:
    """View → weights of the clean view; view → share of zeroed tokens → weights of the noised view"""
    model = weighing(captioner)
    generator = torch.Generator().manual_seed(seed)
    clean: dict[str, Steps] = {name: {} for name in captioner.views}
    noised: dict[str, dict[float, Steps]] = {name: {share: {} for share in shares} for name in captioner.views}
    done = 0
    for batch in build_loader(photos, ShuffledBatches(len(photos), 50, shuffle=False), workers=0):
        tokens, lengths = _words(captioner, captioner.caption_views(batch.views))
        before = trust(model, batch.views, tokens)
        for index, name in enumerate(model.encoding.names):
            has = batch.views[name].mask.any(dim=1).tolist()
            rows = [row for row, there in enumerate(has) if there and lengths[row]]
            clean[name] |= {batch.ids[row]: before[row, : lengths[row], index].tolist() for row in rows}
            for share in shares:
                views = {**batch.views, name: _zeroed(batch.views[name], share, generator)}
                after = trust(model, views, tokens)
                noised[name][share] |= {batch.ids[row]: after[row, : lengths[row], index].tolist() for row in rows}
        done += len(batch.ids)
        progress(done, len(photos))
    return clean, noised


def noise_study(
    captioner: Captioner,
    photos: StoredPhotos,
    shares: Sequence[float] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9),
    seed: int = 0,
    progress: Progress = quiet,
) -> dict[str, Any]:
    """For each view: the Change by share of zeroed tokens, and the mean weight at each step, clean and noised."""
    clean_by_photo, noised_by_photo = noised_weights(captioner, photos, shares, seed, progress)
    clean = {name: list(steps.values()) for name, steps in clean_by_photo.items()}
    noised = {
        name: {share: list(steps.values()) for share, steps in parts.items()} for name, parts in noised_by_photo.items()
    }
    return {
        name: {
            "shares": {f"{share:g}": asdict(change(clean[name], noised[name][share], seed)) for share in shares},
            "steps": {"clean": _by_step(clean[name]), "noised": _by_step(noised[name][max(shares)])},
        }
        for name in captioner.views
        if clean[name]
    }


@dataclass(frozen=True)
class Masked:
    """Weights of one photo by view: at the step of the object's word (H,), and at the other steps (steps,)."""

    clean: Mapping[str, list[float]]
    covered: Mapping[str, list[float]]
    others_clean: Mapping[str, list[float]]
    others_covered: Mapping[str, list[float]]


def mask_study(masked: Sequence[Masked], seed: int = 0) -> dict[str, Any]:
    """For each view: the Change of its weight when the object is covered for this view only.

    It is given at the object's word for the mean over heads and for each head, and at the other words.
    """
    changes: dict[str, Any] = {}
    for name in dict.fromkeys(name for case in masked for name in case.clean):
        cases = [case for case in masked if name in case.clean]
        rest = [case for case in cases if case.others_clean[name]]
        heads = range(len(cases[0].clean[name]))
        changes[name] = {
            "at the word": asdict(
                change(
                    [[float(np.mean(case.clean[name]))] for case in cases],
                    [[float(np.mean(case.covered[name]))] for case in cases],
                    seed,
                )
            ),
            "at other words": asdict(
                change([case.others_clean[name] for case in rest], [case.others_covered[name] for case in rest], seed)
            )
            if rest
            else None,
            "heads": [
                asdict(
                    change(
                        [[case.clean[name][head]] for case in cases],
                        [[case.covered[name][head]] for case in cases],
                        seed,
                    )
                )
                for head in heads
            ],
        }
    return changes


def mask_photo(captioner: Captioner, image: Image.Image, cover: str = "grey") -> Masked | None:
    """Cover the largest detected object that the caption names, for one view at a time.

    Returns None if there is no such object. A view that is empty, or becomes empty, is left out.
    """
    if cover not in COVERS:
        raise ConfigError(unknown("cover", cover, COVERS))
    detected = views_that_give("boxes", captioner.views)
    if not detected:
        raise ConfigError(
            "the mask study covers what is detected: it needs a model that reads a view such as 'objects'."
        )
    model = weighing(captioner)
    extracted = captioner.extract([image])
    (caption,) = captioner.caption_extracted(extracted)
    largest = _object(extracted[detected[0]][0], caption)
    if largest is None:
        return None
    step, box = largest
    return watch(captioner, model, extracted, captioner.extract([_covered(image, box, cover)]), caption, step)


def watch(
    captioner: Captioner,
    model: Haav,
    extracted: Mapping[str, Sequence[PhotoView]],
    covered: Mapping[str, Sequence[PhotoView]],
    caption: Caption,
    step: int,
) -> Masked:
    """Weights at the steps of a caption, with all views clean and with one view at a time from the covered photo"""
    tokens, (length,) = _words(captioner, [caption])
    others = [position for position in range(length) if position != step]
    device = next(model.parameters()).device
    views = collate([""], extracted, device=device).views
    clean = trust(model, views, tokens, heads=True)[0, :length]
    parts: tuple[dict[str, list[float]], ...] = ({}, {}, {}, {})
    for index, name in enumerate(model.encoding.names):
        if not len(extracted[name][0].tokens) or not len(covered[name][0].tokens):
            continue
        spoilt = {**views, **collate([""], {name: covered[name]}, device=device).views}
        hidden = trust(model, spoilt, tokens, heads=True)[0, :length]
        for part, weights in zip(parts[:2], (clean, hidden), strict=True):
            part[name] = weights[step, :, index].tolist()
        for part, weights in zip(parts[2:], (clean, hidden), strict=True):
            part[name] = weights[others, :, index].mean(dim=1).tolist() if others else []
    return Masked(*parts)


@torch.no_grad()
def trust(model: Haav, views: Views, tokens: Tensor, heads: bool = False) -> Tensor:
    """Weights of the last decoder layer at each step of captions (B, 1, T): (B, T, V), or (B, T, H, V) with `heads`"""
    device = next(model.parameters()).device
    decoded = model({name: view.to(device) for name, view in views.items()}, tokens.to(device))
    assert decoded.weights is not None
    last: Tensor = decoded.weights[:, 0, :, -1].cpu()
    return last if heads else last.mean(dim=2)


def _words(captioner: Captioner, captions: Sequence[Caption]) -> tuple[Tensor, list[int]]:
    """The decoder's input tokens for the captions, (B, 1, T) with <bos> first, and the lengths of the captions"""
    ids = [[captioner.vocabulary.ids.get(word.text, UNK) for word in caption.words] for caption in captions]
    longest = max(map(len, ids), default=1) or 1
    tokens = torch.full((len(ids), 1, longest), BOS)
    for row, words in enumerate(ids):
        tokens[row, 0, 1 : len(words)] = torch.tensor(words[:-1], dtype=torch.int64)
    return tokens, [len(words) for words in ids]


def _zeroed(view: Any, share: float, generator: torch.Generator) -> Any:
    """Zero a random share of the real tokens of each photo."""
    priority = torch.rand(view.mask.shape, generator=generator).masked_fill(~view.mask, 2.0)
    rank = priority.argsort(dim=1).argsort(dim=1)
    gone = rank < (share * view.mask.sum(dim=1, keepdim=True)).round()
    return replace(view, tokens=view.tokens.masked_fill(gone[..., None], 0.0))


def _by_step(weights: Sequence[Sequence[float]], least: int = 20) -> list[float]:
    """Mean weight at each step that at least `least` captions reach, or all of them if they are fewer"""
    longest = max(map(len, weights))
    steps = [[steps[step] for steps in weights if len(steps) > step] for step in range(longest)]
    return [float(np.mean(values)) for values in steps if len(values) >= min(least, len(weights))]


def _object(objects: PhotoView, caption: Caption) -> tuple[int, tuple[float, ...]] | None:
    """Step and box of the largest object that the caption names, or None"""
    assert objects.boxes is not None
    names = class_names()
    candidates: list[tuple[float, int, tuple[float, ...]]] = []
    for step, word in enumerate(caption.words):
        for named in mentioned([word.text], names):
            for label, box in zip(objects.labels or (), objects.boxes.tolist(), strict=True):
                if named in mentioned([label], names):
                    candidates.append(((box[2] - box[0]) * (box[3] - box[1]), step, tuple(box)))
    if not candidates:
        return None
    _, step, box = max(candidates)
    return step, box


def _covered(image: Image.Image, box: Sequence[float], cover: str) -> Image.Image:
    left, top, right, bottom = (
        round(side * extent) for side, extent in zip(box, (image.width, image.height) * 2, strict=True)
    )
    left, top = min(left, image.width - 1), min(top, image.height - 1)
    place = (left, top, max(right, left + 1), max(bottom, top + 1))
    result = image.copy()
    if cover == "grey":
        result.paste((128, 128, 128), place)
    else:
        result.paste(image.crop(place).filter(ImageFilter.GaussianBlur(max(image.size) / 12)), place)
    return result


def draw(file: Path, study: Mapping[str, Any]) -> None:
    """Draw the figure of the paper. Noise: weights by step and by share. Mask: weights of each head."""
    noise = "steps" in next(iter(study.values()))
    figure = new_figure(3.6 * len(study), 6 if noise else 3.4)
    axes = figure.subplots(2 if noise else 1, len(study), squeeze=False)
    for column, (name, result) in enumerate(study.items()):
        top = axes[0][column]
        top.set_title(name)
        if noise:
            for label, style in (("clean", "o-"), ("noised", "s--")):
                weights = result["steps"][label]
                top.plot(range(1, 1 + len(weights)), weights, style, label=label, markersize=3)
            top.set_xlabel("step")
            below, shares = axes[1][column], result["shares"]
            percentages = [100 * float(share) for share in shares]
            below.plot(percentages, [entry["disturbed"] for entry in shares.values()], "o-", markersize=3)
            below.set_xlabel("tokens zeroed, %")
            below.set_ylabel("weight of the view")
        else:
            heads = range(1, 1 + len(result["heads"]))
            top.bar([head - 0.2 for head in heads], [entry["clean"] for entry in result["heads"]], 0.4, label="clean")
            top.bar(
                [head + 0.2 for head in heads], [entry["disturbed"] for entry in result["heads"]], 0.4, label="masked"
            )
            top.set_xlabel("head")
        top.set_ylabel("weight of the view")
        top.set_ylim(bottom=0)
        top.legend()
    figure.savefig(file, format="png", dpi=150)
