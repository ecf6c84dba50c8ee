"""Why this word: which view it trusted, where it looked, and what it would have been without.

A weight says where a model looked, not what it needed. So beside the weights stand counterfactuals: how much less
probable each word is without a view, and what would be said with a view taken away or left alone.
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
from haav.model.haav import Haav
from haav.photos.images import load_image
from haav.plots import check_installed, new_figure
from haav.studies.page import render
from haav.text import BOS, UNK
from haav.types import Caption, PhotoView

TOP = 12
"""tokens of a view that are told for a word, the most looked at first"""


@dataclass(frozen=True)
class Place:
    """A token of a view as a reader knows it"""

    label: str = ""
    """a class, a sentence"""
    box: tuple[float, float, float, float] | None = None
    """x1, y1, x2, y2 as fractions of the photo"""


@dataclass(frozen=True)
class Look:
    """How a word used a view"""

    weight: float
    """its trust in the view: last decoder layer, mean over heads"""
    heads: tuple[tuple[float, ...], ...]
    """the same for each decoder layer and head"""
    places: tuple[tuple[int, float], ...]
    """(token, share of the look) within the view, the most looked at first; they may not sum to 1: [CLS] has a share"""
    lost: float
    """how much less probable the word is when the view is taken away: p - p without"""


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
    """what each view's tokens are; a view that the photo lacks has none"""
    without: Mapping[str, str]
    """view → the caption when it is taken away"""
    alone: Mapping[str, str]
    """view → the caption when nothing else is there; only of views that the photo has"""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.caption.to_json(),
            "words": [asdict(word) for word in self.words],
            "views": {name: [asdict(place) for place in places] for name, places in self.views.items()},
            "without": dict(self.without),
            "alone": dict(self.alone),
        }


def explain(captioner: Captioner, seen: Mapping[str, Sequence[PhotoView]], **options: Any) -> list[Explanation]:
    """Of each photo, by its views as `Captioner.look` gives them. `options`: as `caption_views` takes them"""
    weighing(captioner)
    captions = captioner.caption_seen(seen, **options)
    without = {name: captioner.caption_seen(_without(seen, [name]), **options) for name in seen}
    others = {name: [other for other in seen if other != name] for name in seen}
    alone = {name: captioner.caption_seen(_without(seen, others[name]), **options) for name in seen}
    found = []
    for photo, caption in enumerate(captions):
        own = {name: views[photo] for name, views in seen.items()}
        present = [name for name, view in own.items() if len(view.tokens)]
        found.append(
            Explanation(
                caption,
                _words(captioner, own, caption),
                {name: _places(view) for name, view in own.items()},
                {name: without[name][photo].text for name in present if len(present) > 1},
                {name: alone[name][photo].text for name in present},
            )
        )
    return found


def weighing(captioner: Captioner) -> Haav:
    """Its model, if that weighs views; else there is nothing to explain"""
    model = captioner.model
    if not isinstance(model, Haav) or not all(part.exposes_weights for part in model.decoder.aggregators):
        raise ConfigError("this model does not weigh views against each other, so there is nothing to explain.")
    return model


def _words(captioner: Captioner, own: Mapping[str, PhotoView], caption: Caption) -> tuple[ExplainedWord, ...]:
    """The caption read once more, whole, with everything and with each view taken away"""
    model = weighing(captioner)
    device = next(model.parameters()).device
    ids = [captioner.vocabulary.ids.get(word.text, UNK) for word in caption.words]
    if not ids:
        return ()
    tokens = torch.tensor([[[BOS, *ids[:-1]]]], device=device)
    seen = {name: [view] for name, view in own.items()}
    with torch.no_grad():
        encoded = model.encode(collate([""], seen, device=device).views)
        decoded = model.decode(tokens, model.start(encoded))
        targets = torch.tensor(ids, device=device)[None, None, :, None]
        probability = decoded.logprobs.gather(-1, targets).exp()[0, 0, :, 0]
        lost = {}
        for name, view in own.items():
            if not len(view.tokens):
                lost[name] = torch.zeros(len(ids))
            elif sum(len(other.tokens) > 0 for other in own.values()) == 1:
                lost[name] = probability
            else:
                blind = model(collate([""], _without(seen, [name]), device=device).views, tokens)
                lost[name] = probability - blind.logprobs.gather(-1, targets).exp()[0, 0, :, 0]
    assert decoded.weights is not None
    trust = decoded.weights[0, 0]  # (T, M, H, V)
    looks = decoded.looks_by_view(encoded)
    return tuple(
        ExplainedWord(
            word.text,
            probability[at].item(),
            word.confidence,
            {
                name: Look(
                    trust[at, -1, :, number].mean().item(),
                    tuple(tuple(layer) for layer in trust[at, :, :, number].tolist()),
                    _top(looks[number][0, :, at].mean(dim=0)[1:]),
                    lost[name][at].item(),
                )
                for number, name in enumerate(model.encoding.names)
                if name in own
            },
        )
        for at, word in enumerate(caption.words)
    )


def _without(seen: Mapping[str, Sequence[PhotoView]], names: Sequence[str]) -> dict[str, list[PhotoView]]:
    return {name: [_emptied(view) for view in views] if name in names else list(views) for name, views in seen.items()}


def _emptied(view: PhotoView) -> PhotoView:
    return replace(
        view,
        tokens=view.tokens[:0],
        indices={name: index[:0] for name, index in view.indices.items()},
        boxes=None if view.boxes is None else view.boxes[:0],
        labels=None if view.labels is None else (),
    )


def _places(view: PhotoView) -> tuple[Place, ...]:
    """Boxes where it has them, cells where it has rows and columns, labels where it has them"""
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
    """A folder of explanations: a page, a figure and data for each photo"""

    def __init__(self, folder: Path) -> None:
        check_installed("explanations")
        self.folder = make_folder(folder)
        self.taken: set[str] = set()

    def add(
        self, captioner: Captioner, name: str, picture: bytes, views: Sequence[str] | None = None, **options: Any
    ) -> Path:
        """Explain a photo → its page. `options`: as `Captioner.caption` takes them"""
        image = load_image(picture)
        (found,) = explain(captioner, captioner.look([image], views), **options)
        data = found.to_json()
        base = self._free("photo" if name == "-" else Path(name).stem[:100])
        page = self.folder / f"{base}.html"
        text = json.dumps({"image": name, **data}, ensure_ascii=False, indent=1)
        write_atomically(self.folder / f"{base}.json", lambda file: file.write_text(text, encoding="utf-8"))
        write_atomically(self.folder / f"{base}.png", lambda file: draw(file, image, found))
        write_atomically(page, lambda file: file.write_text(render(Path(name).name, image, data), encoding="utf-8"))
        return page

    def _free(self, stem: str) -> str:
        """Photos of different folders may have one name"""
        base, number = stem, 1
        while base in self.taken:
            number += 1
            base = f"{stem}-{number}"
        self.taken.add(base)
        return base


def draw(file: Path, image: Image.Image, found: Explanation) -> None:
    """A figure for a paper: the photo, and for each word the weight of each view"""
    names = list(found.views)
    weights = [[word.looks[name].weight for word in found.words] for name in names]
    figure = new_figure(4 + 0.55 * len(found.words), 3.2)
    left, right = figure.subplots(1, 2, width_ratios=(3, max(1, 0.55 * len(found.words))))
    left.imshow(image)
    left.axis("off")
    if found.words:
        right.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    right.set_xticks(range(len(found.words)), [word.word for word in found.words], rotation=45, ha="right")
    right.set_yticks(range(len(names)), names)
    for row, values in enumerate(weights):
        for column, value in enumerate(values):
            right.text(
                column, row, f"{100 * value:.0f}", ha="center", va="center", color="white" if value > 0.5 else "black"
            )
    figure.savefig(file, format="png", dpi=150)
