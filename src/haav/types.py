"""Data types that are passed between packages, with documented shapes.

Axes: B photos, C captions of one photo, V views, S tokens of a view, T words, D width, H heads,
L encoder layers kept, M decoder layers. Masks are True where a token is real.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from haav.palette import colours_of

if TYPE_CHECKING:  # haav.export.portable uses captions and settings without torch
    from torch import Tensor

Progress = Callable[[int, int], None]
"""called with (done, todo) during long work"""


def quiet(done: int, todo: int) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class ViewSpec:
    """What a model must know about a view to be built."""

    dim: int = field(metadata={"doc": "width of the view's tokens", "low": 1})
    max_tokens: int = field(metadata={"doc": "most tokens a photo can have", "low": 1})
    indices: dict[str, int] = field(
        default_factory=dict,
        metadata={"doc": "integer positions a token carries and their range, e.g. {crop: 5, rank: 16}", "low": 1},
    )
    boxes: bool = field(default=False, metadata={"doc": "whether tokens carry a box (x1, y1, x2, y2) in 0..1"})


@dataclass(frozen=True)
class View:
    """One view of a batch of photos. A photo whose row of `mask` is all False lacks the view."""

    tokens: Tensor
    """(B, S, D_view), any float type"""
    mask: Tensor
    """(B, S) bool"""
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    """name → (B, S) int64"""
    boxes: Tensor | None = None
    """(B, S, 4): x1, y1, x2, y2 as fractions of the photo"""
    labels: tuple[tuple[str, ...], ...] | None = None
    """for each photo, a readable label of each token: a class or a sentence"""

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
    """One view of one photo, as made by an extractor and stored. Without tokens, the photo lacks the view."""

    tokens: Tensor
    """(S, D_view) float"""
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    """name → (S,) int64"""
    boxes: Tensor | None = None
    """(S, 4): x1, y1, x2, y2 as fractions of the photo"""
    labels: tuple[str, ...] | None = None
    """a readable label of each token: a class or a sentence"""


Views = Mapping[str, View]
"""Views of the same photos by name. A missing name is absent for every photo."""


@dataclass(frozen=True)
class Batch:
    """Photos for one step of training or prediction."""

    ids: tuple[str, ...]
    views: Views
    captions: Tensor | None
    """(B, C, T) int64: <bos> … <eos>, then <pad>; rows of <pad> if a photo has fewer captions; None: unlabelled"""
    weights: Tensor | None = None
    """(B, C): the weight of each caption in the loss; None: 1 each"""


@dataclass(frozen=True)
class EmbeddedView:
    """A view in the width of the model, with [CLS] first."""

    tokens: Tensor
    """(B, 1+S, D)"""
    mask: Tensor
    """(B, 1+S) bool; [CLS] is real exactly where the photo has the view"""


@dataclass(frozen=True)
class EncodedViews:
    """The input of the decoder: the encoder's tokens of each view, [CLS] first."""

    names: tuple[str, ...]
    tokens: tuple[Tensor, ...]
    """per view (B, L, 1+S, D), the last encoder layer last"""
    masks: tuple[Tensor, ...]
    """per view (B, 1+S) bool"""
    present: Tensor
    """(B, V) bool: views that the decoder may use, after view dropout in training"""

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
    """Keys and values of attention, each (..., H, S, D/H)."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Source:
    """Keys and values of one token sequence, or of the same sequence in L encoder layers."""

    memory: KeyValues
    """(B, L·H, S, D/H)"""
    bias: Tensor
    """(B, 1, 1, S), added to scores: 0 at real tokens, the lowest number at others"""

    def keep(self, photos: Tensor) -> Source:
        return Source(KeyValues(self.memory.keys[photos], self.memory.values[photos]), self.bias[photos])


@dataclass(frozen=True)
class Memory:
    """Cross-attention keys and values of one decoder layer, computed once per photo and shared by its captions."""

    sources: tuple[Source, ...]
    """one per view, or a single one with the tokens of all views"""
    present: Tensor
    """(B, V) bool"""
    owners: Tensor | None = None
    """for a single source, (B, S, V) float: 1 if a token is visible and belongs to the view"""
    summary: Tensor | None = None
    """(B, D): the photo as one vector, for decoders that read it with each word"""

    def keep(self, photos: Tensor) -> Memory:
        owners = None if self.owners is None else self.owners[photos]
        summary = None if self.summary is None else self.summary[photos]
        return Memory(tuple(source.keep(photos) for source in self.sources), self.present[photos], owners, summary)


@dataclass(frozen=True)
class Aggregated:
    context: Tensor
    """(B, N, D) for N query words of a photo"""
    weights: Tensor | None
    """(B, N, H, V): weight of each view for each head and word; None if unwanted, or the variant has none"""
    looks: tuple[Tensor, ...] = ()
    """per source (B, L, H, N, S): attention of each head, [CLS] of a view first; () if unwanted, or the variant has
    none"""


@dataclass(frozen=True)
class Cache:
    """The complete state of decoding. It is passed in and returned, never stored in modules."""

    memory: tuple[Memory, ...]
    """per decoder layer; independent of the beams"""
    words: tuple[Tensor, ...]
    """per decoder layer (B·C, P, 2D): keys beside values of the P words read so far; empty before the first"""
    length: int = 0
    state: tuple[Tensor, ...] = ()
    """vectors of a recurrent decoder, each (B·C, D); empty before the first word"""

    def reorder(self, rows: Tensor, photos: Tensor | None = None) -> Cache:
        """Caption n of the result, counted through all photos, continues caption `rows[n]`, (B'·C',) int64.

        Memory is unchanged, or only that of these photos is kept, (B',) int64.
        """
        words = tuple(past.index_select(0, rows) for past in self.words)
        memory = self.memory if photos is None else tuple(layer.keep(photos) for layer in self.memory)
        state = tuple(vectors.index_select(0, rows) for vectors in self.state)
        return replace(self, memory=memory, words=words, state=state)


@dataclass(frozen=True)
class Decoded:
    logits: Tensor
    """(B, C, T, words): next-word scores; for an ensemble, the log of its mean probability"""
    weights: Tensor | None
    """(B, C, T, M, H, V): the across-view (Lv2) weights of the decoder layers that were asked, and of every head"""
    cache: CacheLike
    looks: tuple[tuple[Tensor, ...], ...] = ()
    """per decoder layer, per source (B, L, H, C·T, S): attention of each head within it (Lv1)"""

    def looks_by_view(self, encoded: EncodedViews) -> list[Tensor]:
        """Per view (B, H, C·T, 1+S), [CLS] first: attention of the last decoder layer to the last encoder layer.

        It is normalised within each view. It sums to 1 if the photo has the view.
        """
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
    """The encodings of the members of an ensemble, and the weight of each member for each photo."""

    members: tuple[EncodedViews, ...]
    shares: Tensor
    """(B, members): 1 / (number of members with a view of the photo), 0 for members without one"""

    @property
    def present(self) -> Tensor:
        """(B, members) bool: which members have a view of the photo"""
        return self.shares > 0


@dataclass(frozen=True)
class EnsembleCache:
    members: tuple[Cache, ...]
    shares: Tensor

    def reorder(self, rows: Tensor, photos: Tensor | None = None) -> EnsembleCache:
        members = tuple(member.reorder(rows, photos) for member in self.members)
        return EnsembleCache(members, self.shares if photos is None else self.shares[photos])


CacheLike = Cache | EnsembleCache


@dataclass(frozen=True)
class Word:
    text: str
    token: int
    """id of the word in the vocabulary"""
    logprob: float
    confidence: float
    """probability of the word, calibrated on val: the share of such words that people also use"""
    views: Mapping[str, float] | None
    """view → weight (last decoder layer, mean over heads); the weights sum to 1, or are all 0 if the photo has no view;
    None if the variant has no weights"""

    def to_json(self) -> dict[str, Any]:
        probability = round(math.exp(self.logprob), 4)
        data: dict[str, Any] = {"word": self.text, "probability": probability, "confidence": round(self.confidence, 4)}
        if self.views is not None:
            data["views"] = {name: round(weight, 4) for name, weight in self.views.items()}
        return data


@dataclass(frozen=True, repr=False)
class Caption:
    text: str
    words: tuple[Word, ...]
    logprob: float
    confidence: float
    """calibrated: the expected share of its words that people would also use"""
    n_best: tuple[Caption, ...] = ()
    """further captions, the best first"""
    unfamiliar: bool = False
    """whether the picture is unlike those that the model was trained on"""
    thumbnail: bytes | None = field(default=None, compare=False)
    """a small JPEG of the photo, for notebooks"""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Caption({self.text!r}, confidence={self.confidence:.2f})"

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"caption": self.text, "confidence": round(self.confidence, 4)}
        data["unfamiliar"] = self.unfamiliar
        data["words"] = [word.to_json() for word in self.words]
        return data | ({"n_best": [other.to_json() for other in self.n_best]} if self.n_best else {})

    def _repr_html_(self) -> str:
        """For notebooks: the photo, and each word above a bar of its view weights"""
        names = list(next((word.views for word in self.words if word.views), {}))
        colours = colours_of(names)
        cells = []
        for word in self.words:
            shares = (word.views or {}).items()
            bars = "".join(
                f'<span title="{escape(name)} {share:.0%}" style="display:inline-block;height:6px;'
                f'width:{100 * share:.1f}%;background:{colours[name]}"></span>'
                for name, share in shares
            )
            cells.append(
                f'<span style="display:inline-block;margin:0 .2em .3em 0" title="{word.confidence:.0%} sure">'
                f'{escape(word.text)}<span style="display:flex;min-width:2em">{bars}</span></span>'
            )
        legend = " ".join(f'<span style="color:{colour}">■ {escape(name)}</span>' for name, colour in colours.items())
        sure = f"{self.confidence:.0%} sure" + ("; I may not know this kind of picture" if self.unfamiliar else "")
        photo = ""
        if self.thumbnail is not None:
            source = f"data:image/jpeg;base64,{b64encode(self.thumbnail).decode()}"
            photo = f'<img alt="" src="{source}" style="max-width:320px;border-radius:6px">'
        return (
            '<div style="display:flex;flex-wrap:wrap;gap:1em;align-items:center">'
            f'{photo}<div style="flex:1;min-width:16em"><div style="font-size:1.3em">{"".join(cells)}</div>'
            f"<div><small>{sure} &nbsp; {legend}</small></div></div></div>"
        )
