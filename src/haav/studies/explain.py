"""Explain each word of a caption: view weights, attention within views, and counterfactuals.

A weight shows where a model looked, not what it needed. The counterfactuals show how much less probable each word is
without a view, and what the caption would be without a view or with that view alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from haav.data.collate import collate
from haav.errors import ConfigError
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import CaptionedPhoto
from haav.model.haav import Haav
from haav.text import BOS, FUNCTION, SPECIAL, Vocabulary
from haav.types import Caption, PhotoView, Word
from haav.views import find_extractor_class, view_titles, views_that_give

TOP = 64
"""tokens of a view that are listed for a word, highest attention first: all cells of a heat map"""
ALTERNATIVES = 5
"""other words that are listed for a word"""
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Place:
    """What a token of a view stands for, in terms a reader knows."""

    label: str = ""
    """a class, a sentence"""
    box: Box | None = None
    """x1, y1, x2, y2 as fractions of the photo; of a sentence: the crop that it was retrieved for"""


@dataclass(frozen=True)
class ExplainedView:
    title: str
    """what the view is, in plain words"""
    shows: Literal["heat", "boxes", "sentences"]
    """how its tokens are drawn: a heat map, boxes with labels, or texts"""
    position: int
    """in the model's order of views, which gives its colour"""
    places: tuple[Place, ...]
    """what its tokens stand for; empty if the photo lacks the view"""


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
    instead: str
    """the word that becomes the most probable one when the view is removed; empty if that does not change"""


@dataclass(frozen=True)
class ExplainedWord:
    word: str
    probability: float
    confidence: float
    looks: Mapping[str, Look]
    """by view"""
    alternatives: tuple[tuple[str, float], ...]
    """other words after the same beginning and their probabilities, the most probable first"""

    @property
    def content(self) -> bool:
        """Whether it says something about the photo, unlike articles and prepositions"""
        return self.word not in FUNCTION

    @property
    def disagreement(self) -> float:
        """How differently the views support the word: the largest difference of what it loses without each"""
        lost = [look.lost for look in self.looks.values()]
        return max(lost) - min(lost) if lost else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "content": self.content, "disagreement": self.disagreement}


@dataclass(frozen=True)
class Explanation:
    caption: Caption
    words: tuple[ExplainedWord, ...]
    n_best: tuple[tuple[ExplainedWord, ...], ...]
    """words of the further captions"""
    views: Mapping[str, ExplainedView]
    without: Mapping[str, str]
    """view → the caption without it"""
    alone: Mapping[str, str]
    """view → the caption with that view alone; only views that the photo has"""

    def to_json(self) -> dict[str, Any]:
        data = {
            **self.caption.to_json(),
            "words": [word.to_json() for word in self.words],
            "views": {name: asdict(view) for name, view in self.views.items()},
            "without": dict(self.without),
            "alone": dict(self.alone),
        }
        for other, words in zip(data.get("n_best", ()), self.n_best, strict=True):
            other["words"] = [word.to_json() for word in words]
        rounded: dict[str, Any] = _rounded(data)
        return rounded


def _rounded(data: Any) -> Any:
    """JSON data with four digits after the point: enough to draw, a third of the size"""
    if isinstance(data, Mapping):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_rounded(value) for value in data]
    return round(data, 4) if isinstance(data, float) else data


def explain(
    captioner: Captioner, photos: Sequence[CaptionedPhoto], options: CaptionOptions | None = None
) -> list[Explanation]:
    """Explain the captions that `Captioner.stream` gave the photos with the same options."""
    weighing(captioner)
    views = {name: [photo.views[name] for photo in photos] for name in (photos[0].views if photos else ())}

    @cache  # of two views, being without one is having the other alone
    def recaption(hidden: frozenset[str]) -> list[Caption]:
        return captioner.caption_extracted(_without(views, hidden), single)

    single = replace(options or CaptionOptions(), n_best=1)
    without = {name: recaption(frozenset([name])) for name in views}
    alone = {name: recaption(frozenset(views) - {name}) for name in views}
    titles = view_titles(captioner.views)
    explanations = []
    for index, photo in enumerate(photos):
        assert photo.caption is not None, "a photo that could not be read has nothing to explain"
        present = [name for name, view in photo.views.items() if len(view.tokens)]
        explanations.append(
            Explanation(
                photo.caption,
                _words(captioner, photo.views, photo.caption),
                tuple(_words(captioner, photo.views, other) for other in photo.caption.n_best),
                {
                    name: ExplainedView(titles[name], _shows(name), captioner.views.index(name), _places(name, view))
                    for name, view in photo.views.items()
                },
                {name: without[name][index].text for name in present if len(present) > 1},
                {name: alone[name][index].text for name in present},
            )
        )
    return explanations


def weighing(captioner: Captioner) -> Haav:
    """The model of a captioner. Raises ConfigError if the model has no view weights."""
    model = captioner.model
    if not isinstance(model, Haav) or not model.decoder.exposes_weights:
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
        likeliest = decoded.logprobs[0, 0].argmax(dim=-1)
        lost, instead = {}, {}
        for name, view in views.items():
            instead[name] = likeliest
            if not len(view.tokens):
                lost[name] = torch.zeros(len(ids))
            elif sum(len(other.tokens) > 0 for other in views.values()) == 1:
                lost[name] = probability
            else:
                blind = model(collate([""], _without(batch, [name]), device=device).views, tokens)
                lost[name] = probability - blind.logprobs.gather(-1, targets).exp()[0, 0, :, 0]
                instead[name] = blind.logprobs[0, 0].argmax(dim=-1)
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
                    _changed(int(likeliest[step]), int(instead[name][step]), word, captioner.vocabulary),
                )
                for index, name in enumerate(model.encoding.names)
                if name in views
            },
            _alternatives(decoded.logprobs[0, 0, step], word.token, captioner.vocabulary),
        )
        for step, word in enumerate(caption.words)
    )


def _changed(likeliest: int, instead: int, word: Word, vocabulary: Vocabulary) -> str:
    return "" if instead in (likeliest, word.token) else vocabulary.words[instead]


def _alternatives(logprobs: Tensor, token: int, vocabulary: Vocabulary) -> tuple[tuple[str, float], ...]:
    best = logprobs.topk(min(ALTERNATIVES + 1 + len(SPECIAL), len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    others = [(vocabulary.words[other], share) for other, share in pairs if other >= len(SPECIAL) and other != token]
    return tuple(others[:ALTERNATIVES])


def _without(extracted: Mapping[str, Sequence[PhotoView]], names: Collection[str]) -> dict[str, list[PhotoView]]:
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


def _shows(name: str) -> Literal["heat", "boxes", "sentences"]:
    if views_that_give("sentences", [name]):
        return "sentences"
    return "boxes" if views_that_give("boxes", [name]) else "heat"


def _places(name: str, view: PhotoView) -> tuple[Place, ...]:
    """Label and box of each token. A token with a row and a column has the box of its grid cell, one with a crop the
    box of the crop."""
    extractor_class = find_extractor_class(name)
    crops = extractor_class.crop_boxes() if extractor_class is not None else None
    count = len(view.tokens)
    labels = view.labels or ("",) * count
    boxes: list[Any] = [None] * count
    if view.boxes is not None:
        boxes = view.boxes.tolist()
    elif "crop" in view.indices and crops is not None:
        boxes = crops[view.indices["crop"]].tolist()
    elif {"row", "column"} <= view.indices.keys() and count:
        rows, columns = view.indices["row"], view.indices["column"]
        high, wide = int(rows.max()) + 1, int(columns.max()) + 1
        boxes = [
            (c / wide, r / high, (c + 1) / wide, (r + 1) / high)
            for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
        ]
    return tuple(Place(label, _box(box)) for label, box in zip(labels, boxes, strict=True))


def _box(sides: Sequence[float] | None) -> Box | None:
    if sides is None:
        return None
    x1, y1, x2, y2 = (round(side, 4) for side in sides)
    return x1, y1, x2, y2


def _top(look: Tensor) -> tuple[tuple[int, float], ...]:
    best = look.topk(min(TOP, len(look)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
