"""What flows between the parts: named fields with documented shapes.

Axes: B photos, C captions of one photo, V views, S tokens of a view, T words, D width, H heads,
L encoder layers kept, M decoder layers. Masks are True where a token is real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # captions and settings are of use where there is no torch: haav.export.portable
    from torch import Tensor

Progress = Callable[[int, int], None]
"""long work tells it (done, to do)"""


def quiet(done: int, todo: int) -> None:
    """The progress that nobody watches."""


@dataclass(frozen=True)
class ViewSpec:
    """What a model must know of a view before it has seen one."""

    dim: int = field(metadata={"doc": "width of the view's tokens", "low": 1})
    max_tokens: int = field(metadata={"doc": "most tokens a photo can have", "low": 1})
    indices: dict[str, int] = field(
        default_factory=dict,
        metadata={"doc": "integer positions a token carries and their range, e.g. {crop: 5, rank: 16}", "low": 1},
    )
    boxes: bool = field(default=False, metadata={"doc": "whether tokens carry a box (x1, y1, x2, y2) in 0..1"})


@dataclass(frozen=True)
class View:
    """One view of a batch of photos. A row of `mask` without a True is a photo that lacks the view."""

    tokens: Tensor
    """(B, S, D_view), any float type"""
    mask: Tensor
    """(B, S) bool"""
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    """name → (B, S) int64"""
    boxes: Tensor | None = None
    """(B, S, 4): x1, y1, x2, y2 as fractions of the photo"""
    labels: tuple[tuple[str, ...], ...] | None = None
    """for each photo, what a reader calls each of its tokens: a class, a sentence"""

    def to(self, device: Any) -> View:
        return View(
            self.tokens.to(device),
            self.mask.to(device),
            {name: index.to(device) for name, index in self.indices.items()},
            None if self.boxes is None else self.boxes.to(device),
            self.labels,
        )


@dataclass(frozen=True)
class PhotoView:
    """One view of one photo, as an extractor makes it and the store keeps it. No tokens: the photo lacks the view."""

    tokens: Tensor
    """(S, D_view) float"""
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    """name → (S,) int64"""
    boxes: Tensor | None = None
    """(S, 4): x1, y1, x2, y2 as fractions of the photo"""
    labels: tuple[str, ...] | None = None
    """what a reader calls each token: a class, a sentence"""


Views = Mapping[str, View]
"""Views of the same photos by name. A name that is left out is absent for every photo."""


@dataclass(frozen=True)
class Batch:
    """Photos for one step of training or prediction."""

    ids: tuple[str, ...]
    views: Views
    captions: Tensor | None
    """(B, C, T) int64: <bos> … <eos>, <pad> behind; rows of <pad> where a photo has fewer captions; None: unlabelled"""


@dataclass(frozen=True)
class EmbeddedView:
    """A view in the model's width, its [CLS] in front."""

    tokens: Tensor
    """(B, 1+S, D)"""
    mask: Tensor
    """(B, 1+S) bool; [CLS] is real exactly where the photo has the view"""


@dataclass(frozen=True)
class EncodedViews:
    """What the decoder reads: per view, the encoder's tokens, [CLS] first."""

    names: tuple[str, ...]
    tokens: tuple[Tensor, ...]
    """per view (B, L, 1+S, D), the last layer last"""
    masks: tuple[Tensor, ...]
    """per view (B, 1+S) bool"""
    present: Tensor
    """(B, V) bool: views the decoder may use; in training, view dropout has thinned it"""

    @property
    def cls(self) -> Tensor:
        """(B, V, L, D): the view-level representation that the contrastive loss compares"""
        import torch

        return torch.stack([tokens[:, :, 0] for tokens in self.tokens], dim=1)

    @property
    def cls_mask(self) -> Tensor:
        """(B, V) bool: whether the photo has the view at all"""
        import torch

        return torch.stack([mask[:, 0] for mask in self.masks], dim=1)


@dataclass(frozen=True)
class KeyValues:
    """What attention looks up: (..., H, S, D/H) twice."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Source:
    """Keys and values of one token sequence, with the tokens that are real."""

    memory: KeyValues
    """(B, L, H, S, D/H)"""
    mask: Tensor
    """(B, S) bool"""

    def keep(self, photos: Tensor) -> Source:
        return Source(KeyValues(self.memory.keys[photos], self.memory.values[photos]), self.mask[photos])


@dataclass(frozen=True)
class Memory:
    """One decoder layer's cross-attention keys and values: made once a photo, shared by its captions."""

    sources: tuple[Source, ...]
    """one a view, or a single one that holds the tokens of all views"""
    present: Tensor
    """(B, V) bool"""
    owners: Tensor | None = None
    """of a single source, (B, S, V) float: 1 where a token is seen and is the view's"""

    def keep(self, photos: Tensor) -> Memory:
        owners = None if self.owners is None else self.owners[photos]
        return Memory(tuple(source.keep(photos) for source in self.sources), self.present[photos], owners)


@dataclass(frozen=True)
class Aggregated:
    context: Tensor
    """(B, N, D) for N query words of a photo"""
    weights: Tensor | None
    """(B, N, H, V): how much each head trusts each view at each word; None where a variant has no such thing"""
    looks: tuple[Tensor, ...] = ()
    """per source (B, L, H, N, S): where each head looks, [CLS] of a view first; () where views are not kept apart"""


@dataclass(frozen=True)
class Cache:
    """Everything a decoding step needs of the past. Passed in and returned, never hidden in modules."""

    memory: tuple[Memory, ...]
    """per decoder layer; the same whatever happens to the beams"""
    words: tuple[KeyValues, ...]
    """per decoder layer (B, C, H, P, D/H) of the P words read so far; empty before the first"""
    length: int = 0

    def reorder(self, beams: Tensor) -> Cache:
        """Caption c of the result continues caption `beams[b, c]`, (B, C') int64. Memory is not touched."""

        def pick(past: Tensor) -> Tensor:
            index = beams[:, :, None, None, None].expand(-1, -1, *past.shape[2:])
            return past.gather(1, index)

        return replace(self, words=tuple(KeyValues(pick(past.keys), pick(past.values)) for past in self.words))

    def keep(self, photos: Tensor) -> Cache:
        """Go on with some photos only, (B',) int64."""
        words = tuple(KeyValues(past.keys[photos], past.values[photos]) for past in self.words)
        return replace(self, memory=tuple(layer.keep(photos) for layer in self.memory), words=words)


@dataclass(frozen=True)
class Decoded:
    logits: Tensor
    """(B, C, T, words): next-word scores; for an ensemble, the log of its mean probability"""
    weights: Tensor | None
    """(B, C, T, M, H, V): the across-view (Lv2) weights of every decoder layer and head"""
    cache: CacheLike
    looks: tuple[tuple[Tensor, ...], ...] = ()
    """per decoder layer, per source (B, L, H, C·T, S): where in it each head looks (Lv1)"""

    def looks_by_view(self, encoded: EncodedViews) -> list[Tensor]:
        """Per view (B, H, C·T, 1+S), [CLS] first: where in the view the last decoder layer looks at the last encoder
        layer; sums to 1 where the photo has the view"""
        import torch

        whole = torch.cat(self.looks[-1], dim=-1)[:, -1]
        parts = torch.split(whole, [mask.shape[1] for mask in encoded.masks], dim=-1)
        return [part / part.sum(dim=-1, keepdim=True).clamp(min=1e-9) for part in parts]

    @property
    def logprobs(self) -> Tensor:
        """(B, C, T, words) float32"""
        return self.logits.float().log_softmax(dim=-1)


@dataclass(frozen=True)
class EnsembleEncoded:
    """The encodings of an ensemble's members, and how much each may say about each photo."""

    members: tuple[EncodedViews, ...]
    shares: Tensor
    """(B, members): 1 / (members that can see the photo), 0 for those that cannot"""

    @property
    def present(self) -> Tensor:
        """(B, members) bool: who can see the photo"""
        return self.shares > 0


@dataclass(frozen=True)
class EnsembleCache:
    members: tuple[Cache, ...]
    shares: Tensor

    def reorder(self, beams: Tensor) -> EnsembleCache:
        return replace(self, members=tuple(member.reorder(beams) for member in self.members))

    def keep(self, photos: Tensor) -> EnsembleCache:
        return EnsembleCache(tuple(member.keep(photos) for member in self.members), self.shares[photos])


CacheLike = Cache | EnsembleCache


@dataclass(frozen=True)
class Word:
    text: str
    token: int
    """its place in the vocabulary"""
    logprob: float
    confidence: float
    """share of such words that people use too: the word's probability, calibrated on val"""
    views: Mapping[str, float] | None
    """view → weight (last decoder layer, mean over heads); they sum to 1, or are all 0 where a photo has no view at
    all; None where the variant has no weights"""

    def to_json(self) -> dict[str, Any]:
        probability = round(math.exp(self.logprob), 4)
        data: dict[str, Any] = {"word": self.text, "probability": probability, "confidence": round(self.confidence, 4)}
        if self.views is not None:
            data["views"] = {name: round(weight, 4) for name, weight in self.views.items()}
        return data


VIEW_COLOURS = ("#00677f", "#c77700", "#1a6b2f", "#8e2a82", "#3b49b7", "#a3262b")


@dataclass(frozen=True, repr=False)
class Caption:
    text: str
    words: tuple[Word, ...]
    logprob: float
    confidence: float
    """mean of its words': the share of them that people would use too"""
    n_best: tuple[Caption, ...] = ()
    """further captions, the best first"""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Caption({self.text!r}, confidence={self.confidence:.2f})"

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"caption": self.text, "confidence": round(self.confidence, 4)}
        data["words"] = [word.to_json() for word in self.words]
        return data | ({"n_best": [other.to_json() for other in self.n_best]} if self.n_best else {})

    def _repr_html_(self) -> str:
        """In a notebook: each word over a bar of its view weights"""
        names = list(next((word.views for word in self.words if word.views), {}))
        colours = dict(zip(names, cycle(VIEW_COLOURS), strict=False))
        cells = []
        for word in self.words:
            shares = (word.views or {}).items()
            bars = "".join(
                f'<span title="{escape(name)} {share:.0%}" style="display:inline-block;height:6px;'
                f'width:{100 * share:.1f}%;background:{colours[name]}"></span>'
                for name, share in shares
            )
            cells.append(
                f'<span style="display:inline-block;margin:0 .2em" title="{word.confidence:.0%} sure">'
                f'{escape(word.text)}<span style="display:flex;min-width:3em">{bars}</span></span>'
            )
        legend = " ".join(f'<span style="color:{colour}">■ {escape(name)}</span>' for name, colour in colours.items())
        return f'<div style="font-size:1.2em">{"".join(cells)}</div><div><small>{legend}</small></div>'
