"""From encoded views to captions. The model stays untouched: all state is in the cache passed along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from haav.text import BOS, EOS, PAD
from haav.types import Decoded, Views


class CaptionModel(Protocol):
    """What decoding asks of a model; `Haav` and `Ensemble` both have it."""

    def encode(self, views: Views) -> Any: ...
    def start(self, encoded: Any) -> Any: ...
    def decode(self, tokens: Tensor, cache: Any) -> Decoded: ...


@dataclass(frozen=True)
class Generated:
    """Beams of each photo, the most probable first."""

    tokens: Tensor
    """(B, K, T) int64, <eos> included, <pad> after it"""
    logprobs: Tensor
    """(B, K, T) float32 of each word; 0 at <pad>"""
    weights: Tensor | None
    """(B, K, T, M, H, V) view weights at each word"""

    @property
    def scores(self) -> Tensor:
        """(B, K): log-probability of each caption"""
        return self.logprobs.sum(dim=-1)


@torch.no_grad()
def beam_search(
    model: CaptionModel, encoded: Any, beam: int, max_words: int, banned: Sequence[int] = (PAD, BOS)
) -> Generated:
    """The `beam` most probable captions that beam search finds; beam 1 is greedy decoding.

    A finished caption keeps its place with its score until better ones push it out. The search ends
    when every beam of every photo has. Only word caches follow the beams; the photo's memory does not.
    `banned` ids are never said, whatever the model thinks of them.
    """
    decoded = model.decode(_first_words(encoded), model.start(encoded))
    state = _grow(None, decoded, beam, banned)
    while state.tokens.shape[2] < max_words and not state.finished.all():
        decoded = model.decode(state.tokens[:, :, -1:], decoded.cache.reorder(state.parents))
        state = _grow(state, decoded, beam, banned)
    return Generated(state.tokens, state.logprobs, state.weights)


@dataclass(frozen=True)
class _Beams:
    tokens: Tensor
    logprobs: Tensor
    weights: Tensor | None
    parents: Tensor
    """(B, K): which beam of the step before each one continues"""
    finished: Tensor
    """(B, K) bool"""


def _grow(state: _Beams | None, decoded: Decoded, beam: int, banned: Sequence[int]) -> _Beams:
    """Add the best next words: K beams in, K beams out, sorted."""
    step = decoded.logprobs[:, :, -1]
    step[..., list(banned)] = -torch.inf
    words = step.shape[2]
    totals = step
    if state is not None:
        # A finished caption has one continuation: <pad>, at no cost.
        step = step.masked_fill(state.finished[..., None], -torch.inf)
        step[..., PAD].masked_fill_(state.finished, 0.0)
        totals = state.logprobs.sum(dim=-1, keepdim=True) + step
    chosen = totals.flatten(1).topk(min(beam, totals.shape[1] * words), dim=1).indices
    parents, tokens = chosen // words, chosen % words
    logprobs = step.flatten(1).gather(1, chosen)
    weights = None
    if decoded.weights is not None:
        weights = _pick(decoded.weights[:, :, -1:], parents)
    if state is None:
        return _Beams(tokens[..., None], logprobs[..., None], weights, parents, tokens == EOS)
    if weights is not None and state.weights is not None:
        weights = torch.cat([_pick(state.weights, parents), weights], dim=2)
    return _Beams(
        torch.cat([_pick(state.tokens, parents), tokens[..., None]], dim=2),
        torch.cat([_pick(state.logprobs, parents), logprobs[..., None]], dim=2),
        weights,
        parents,
        _pick(state.finished, parents) | (tokens == EOS),
    )


def _pick(per_beam: Tensor, parents: Tensor) -> Tensor:
    """(B, K, ...) → the rows of the chosen beams"""
    photos = torch.arange(len(parents), device=parents.device)[:, None]
    return per_beam[photos, parents]


def _first_words(encoded: Any) -> Tensor:
    """<bos> for one caption of each photo, (B, 1, 1)."""
    return torch.full((len(encoded.present), 1, 1), BOS, dtype=torch.int64, device=encoded.present.device)
