"""Explain each word of a caption: view weights, attention within views, and counterfactuals.

A weight shows where a model looked, not what it needed. The counterfactuals show how much less probable each word is
without a view, and what the caption would be without a view or with that view alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from haav.data.collate import collate
from haav.errors import ConfigError
from haav.files import make_folder, write_atomically
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import CaptionedPhoto
from haav.model.haav import Haav
from haav.plots import check_installed, new_figure
from haav.studies.html import render_explanation
from haav.text import BOS
from haav.types import Caption, PhotoView

TOP = 12
"""number of tokens of a view that are listed for a word, highest attention first"""


@dataclass(frozen=True)
class Place:
    """What a token of a view stands for, in terms a reader knows."""

    label: str = ""
    """a class, a sentence"""
    box: tuple[float, float, float, float] | None = None
    """x1, y1, x2, y2 as fractions of the photo"""


@dataclass(frozen=True)
class Look:
    """How a word used a view."""

    weight: float
    """weight of the view: last decoder layer, mean over heads"""
    heads: tuple[tuple[float, ...], ...]
    """the same for each decoder layer and head"""
    places: tuple[tuple[int, float], ...]
    """(token, attention) within the view, highest attention first; they may sum to less than 1, as [CLS] has a share"""
    lost: float
    """drop in the probability of the word when the view is removed: p - p without"""


@dataclass(frozen=True)
class ExplainedWord:
    word: str
    probability: float
    confidence: float
    looks: Mapping[str, Look]
    """by view"""


@dataclass(frozen=True)
class Explanation:
    caption: Caption
    words: tuple[ExplainedWord, ...]
    views: Mapping[str, tuple[Place, ...]]
    """what the tokens of each view stand for; empty for a view that the photo lacks"""
    without: Mapping[str, str]
    """view → the caption without it"""
    alone: Mapping[str, str]
    """view → the caption with that view alone; only views that the photo has"""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.caption.to_json(),
            "words": [asdict(word) for word in self.words],
            "views": {name: [asdict(place) for place in places] for name, places in self.views.items()},
            "without": dict(self.without),
            "alone": dict(self.alone),
        }


def explain(
    captioner: Captioner, photos: Sequence[CaptionedPhoto], options: CaptionOptions | None = None
) -> list[Explanation]:
    """Explain the captions that `Captioner.stream` gave the photos with the same options."""
    weighing(captioner)
    views = {name: [photo.views[name] for photo in photos] for name in (photos[0].views if photos else ())}

    def recaption(hidden: Sequence[str]) -> list[Caption]:
        return captioner.caption_extracted(_without(views, hidden), options)

    without = {name: recaption([name]) for name in views}
    alone = {name: recaption([other for other in views if other != name]) for name in views}
    explanations = []
    for index, photo in enumerate(photos):
        assert photo.caption is not None, "a photo that could not be read has nothing to explain"
        present = [name for name, view in photo.views.items() if len(view.tokens)]
        explanations.append(
            Explanation(
                photo.caption,
                _words(captioner, photo.views, photo.caption),
                {name: _places(view) for name, view in photo.views.items()},
                {name: without[name][index].text for name in present if len(present) > 1},
                {name: alone[name][index].text for name in present},
            )
        )
    return explanations


def weighing(captioner: Captioner) -> Haav:
    """The model of a captioner. Raises ConfigError if the model has no view weights."""
    model = captioner.model
    if not isinstance(model, Haav) or not all(part.exposes_weights for part in model.decoder.aggregators):
        raise ConfigError("this model does not weigh views against each other, so there is nothing to explain.")
    return model


def _words(captioner: Captioner, views: Mapping[str, PhotoView], caption: Caption) -> tuple[ExplainedWord, ...]:
    """Teacher-force the caption once with all views and once without each view."""
    model = weighing(captioner)
    device = next(model.parameters()).device
    ids = [word.token for word in caption.words]
    if not ids:
        return ()
    tokens = torch.tensor([[[BOS, *ids[:-1]]]], device=device)
    batch = {name: [view] for name, view in views.items()}
    with torch.no_grad():
        encoded = model.encode(collate([""], batch, device=device).views)
        decoded = model.decode(tokens, model.init_cache(encoded))
        targets = torch.tensor(ids, device=device)[None, None, :, None]
        probability = decoded.logprobs.gather(-1, targets).exp()[0, 0, :, 0]
        lost = {}
        for name, view in views.items():
            if not len(view.tokens):
                lost[name] = torch.zeros(len(ids))
            elif sum(len(other.tokens) > 0 for other in views.values()) == 1:
                lost[name] = probability
            else:
                blind = model(collate([""], _without(batch, [name]), device=device).views, tokens)
                lost[name] = probability - blind.logprobs.gather(-1, targets).exp()[0, 0, :, 0]
    assert decoded.weights is not None
    trust = decoded.weights[0, 0]  # (T, M, H, V)
    looks = decoded.looks_by_view(encoded)
    return tuple(
        ExplainedWord(
            word.text,
            probability[step].item(),
            word.confidence,
            {
                name: Look(
                    trust[step, -1, :, index].mean().item(),
                    tuple(tuple(layer) for layer in trust[step, :, :, index].tolist()),
                    _top(looks[index][0, :, step].mean(dim=0)[1:]),
                    lost[name][step].item(),
                )
                for index, name in enumerate(model.encoding.names)
                if name in views
            },
        )
        for step, word in enumerate(caption.words)
    )


def _without(extracted: Mapping[str, Sequence[PhotoView]], names: Sequence[str]) -> dict[str, list[PhotoView]]:
    return {
        name: [_emptied(view) for view in views] if name in names else list(views) for name, views in extracted.items()
    }


def _emptied(view: PhotoView) -> PhotoView:
    return replace(
        view,
        tokens=view.tokens[:0],
        indices={name: index[:0] for name, index in view.indices.items()},
        boxes=None if view.boxes is None else view.boxes[:0],
        labels=None if view.labels is None else (),
    )


def _places(view: PhotoView) -> tuple[Place, ...]:
    """Label and box of each token. Tokens with a row and a column get the box of their grid cell."""
    count = len(view.tokens)
    labels = view.labels or ("",) * count
    boxes: list[Any] = [None] * count
    if view.boxes is not None:
        boxes = [tuple(round(side, 4) for side in box) for box in view.boxes.tolist()]
    elif {"row", "column"} <= view.indices.keys() and count:
        rows, columns = view.indices["row"], view.indices["column"]
        high, wide = int(rows.max()) + 1, int(columns.max()) + 1
        boxes = [
            (round(c / wide, 4), round(r / high, 4), round((c + 1) / wide, 4), round((r + 1) / high, 4))
            for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
        ]
    return tuple(Place(label, box) for label, box in zip(labels, boxes, strict=True))


def _top(look: Tensor) -> tuple[tuple[int, float], ...]:
    best = look.topk(min(TOP, len(look)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


class Pages:
    """A folder of explanations, with a page, a figure and a data file for each photo."""

    def __init__(self, folder: Path) -> None:
        check_installed("explanations")
        self.folder = make_folder(folder)
        self.taken: set[str] = set()

    def add(self, captioner: Captioner, photo: CaptionedPhoto, options: CaptionOptions | None = None) -> Path:
        """Explain a photo that `Captioner.stream` captioned with these options. Returns the path of its page."""
        (explanation,) = explain(captioner, [photo], options)
        name, image, data = photo.name, photo.image, explanation.to_json()
        assert image is not None
        base = self._free("photo" if name == "-" else Path(name).stem[:100])
        page = self.folder / f"{base}.html"
        text = json.dumps({"image": name, **data}, ensure_ascii=False, indent=1)
        write_atomically(self.folder / f"{base}.json", lambda file: file.write_text(text, encoding="utf-8"))
        write_atomically(self.folder / f"{base}.png", lambda file: draw(file, image, explanation))
        html = render_explanation(Path(name).name, image, data)
        write_atomically(page, lambda file: file.write_text(html, encoding="utf-8"))
        return page

    def _free(self, stem: str) -> str:
        """A file stem that is not in use. Photos of different folders may share a name."""
        base, suffix = stem, 1
        while base in self.taken:
            suffix += 1
            base = f"{stem}-{suffix}"
        self.taken.add(base)
        return base


def draw(file: Path, image: Image.Image, explanation: Explanation) -> None:
    """Draw a figure for a paper: the photo, and the weight of each view at each word."""
    names = list(explanation.views)
    weights = [[word.looks[name].weight for word in explanation.words] for name in names]
    figure = new_figure(4 + 0.55 * len(explanation.words), 3.2)
    left, right = figure.subplots(1, 2, width_ratios=(3, max(1, 0.55 * len(explanation.words))))
    left.imshow(image)
    left.axis("off")
    if explanation.words:
        right.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    right.set_xticks(range(len(explanation.words)), [word.word for word in explanation.words], rotation=45, ha="right")
    right.set_yticks(range(len(names)), names)
    for row, values in enumerate(weights):
        for column, value in enumerate(values):
            right.text(
                column, row, f"{100 * value:.0f}", ha="center", va="center", color="white" if value > 0.5 else "black"
            )
    figure.savefig(file, format="png", dpi=150)
