"""The decoding loop. The model is stateless: all state is in the cache that is passed along.

Scores stay on the model's device. Of each step a few candidates per caption come to the host, where numpy decides what
becomes of them: dozens of operations on a handful of numbers, which cost torch more than the model's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from haav.generate.rules import Rule
from haav.text import BOS, EOS, PAD
from haav.types import Decoded, Views


class CaptionModel(Protocol):
    """What decoding needs of a model. `Haav` and `Ensemble` implement it."""

    def encode(self, views: Views) -> Any: ...
    def init_cache(self, encoded: Any) -> Any: ...
    def decode(self, tokens: Tensor, cache: Any, weighed: int | None = None) -> Decoded: ...


@dataclass(frozen=True)
class Generated:
    """Captions of each photo, the best first. A log-probability of -inf marks a missing caption.

    NaN marks a caption of a model whose scores were not finite.
    """

    tokens: Tensor
    """(B, K, T) int64, <eos> included, <pad> after it"""
    logprobs: Tensor
    """(B, K, T) float32: log-probability of each word by the model, independent of the strategy; 0 at <pad>"""
    weights: Tensor | None
    """(B, K, T, M, H, V) view weights at each word, of the decoder layers that were asked"""

    @property
    def scores(self) -> Tensor:
        """(B, K): log-probability of each caption"""
        return self.logprobs.sum(dim=-1)

    @property
    def lengths(self) -> Tensor:
        """(B, K): words, <eos> included"""
        return (self.tokens != PAD).sum(dim=-1)

    def cpu(self) -> Generated:
        return Generated(self.tokens.cpu(), self.logprobs.cpu(), None if self.weights is None else self.weights.cpu())


@dataclass(frozen=True)
class Choice:
    """The next words: caption k continues caption `parents[b, k]` with `words[b, k]`, both (B, K) int64."""

    parents: np.ndarray
    words: np.ndarray
    logprobs: np.ndarray
    """(B, K) log-probabilities of these words by the model; -inf marks a missing caption"""


@dataclass(frozen=True)
class Captions:
    """Captions in the making, on the host. The fields are those of `Generated`, as arrays."""

    tokens: np.ndarray
    logprobs: np.ndarray
    weights: np.ndarray | None = None

    @cached_property
    def scores(self) -> np.ndarray:
        """(B, C): log-probability of each caption"""
        scores: np.ndarray = self.logprobs.sum(axis=2)
        return scores

    @cached_property
    def lengths(self) -> np.ndarray:
        """(B, C): words, <eos> included"""
        lengths: np.ndarray = (self.tokens != PAD).sum(axis=2)
        return lengths

    @cached_property
    def ended(self) -> np.ndarray:
        """(B, C) bool: whether the caption has its <eos>, or is missing"""
        ended: np.ndarray = (self.tokens == EOS).any(axis=2) | np.isneginf(self.scores)
        return ended

    def pick(self, photos: np.ndarray, captions: np.ndarray) -> Captions:
        """Caption k of photo b of the result is caption `captions[b, k]` of photo `photos[b]`."""
        places = photos[:, None], captions
        weights = None if self.weights is None else self.weights[places]
        return Captions(self.tokens[places], self.logprobs[places], weights)

    def grow(self, choice: Choice, weights: Tensor | None) -> Captions:
        """`weights` (B, C, 1, M, H, V): those with which the words were chosen"""
        photos = np.arange(len(self.tokens))
        kept = self.pick(photos, choice.parents)
        grown = None
        if weights is not None:
            grown = weights.float().cpu().numpy()[photos[:, None], choice.parents]
            grown = grown if kept.weights is None else np.concatenate([kept.weights, grown], axis=2)
        return Captions(
            np.concatenate([kept.tokens, choice.words[..., None]], axis=2),
            np.concatenate([kept.logprobs, choice.logprobs[..., None]], axis=2),
            grown,
        )


class Strategy(Protocol):
    """Decides which captions continue with which words, when a photo is done, and which captions to return."""

    def choose(self, captions: Captions, logprobs: Tensor) -> Choice:
        """logprobs (B, C, words): -inf for forbidden words"""
        ...

    def settled(self, captions: Captions, max_words: int) -> np.ndarray:
        """(B,) bool: whether further words cannot change the result"""
        ...

    def result(self, captions: Captions) -> np.ndarray:
        """(B, K) int64: the captions to return, best first"""
        ...


@torch.no_grad()
def generate(
    model: CaptionModel,
    encoded: Any,
    strategy: Strategy,
    rules: Sequence[Rule] = (),
    max_words: int = 20,
    weighed: int | None = 0,
) -> Generated:
    """Generate captions of at most `max_words` words, including <eos>.

    `weighed`: how many of the last decoder layers give their view weights; None: all.

    Settled photos leave the batch once they are at least half of it, so all halvings together copy the batch at most
    once. Between halvings, only the word caches are reordered. The memory of a photo is not copied for its captions.
    """
    device = encoded.present.device
    photos = np.arange(len(encoded.present))
    captions = Captions(np.zeros((len(photos), 1, 0), np.int64), np.zeros((len(photos), 1, 0), np.float32))
    words, cache = np.full((len(photos), 1, 1), BOS), model.init_cache(encoded)
    done: list[tuple[np.ndarray, Captions]] = []
    while len(photos):
        decoded = model.decode(torch.from_numpy(words).to(device), cache, weighed)
        room = max_words - captions.tokens.shape[2]
        choice = strategy.choose(captions, _next_words(decoded, captions, rules, room))
        captions = captions.grow(choice, decoded.weights)
        continued = choice.parents + words.shape[1] * np.arange(len(photos))[:, None]
        settled = strategy.settled(captions, max_words) | (room == 1)
        staying = None
        if 2 * settled.sum() >= len(photos):
            leaving, staying = settled.nonzero()[0], (~settled).nonzero()[0]
            everyone = np.broadcast_to(np.arange(captions.tokens.shape[1]), captions.tokens.shape[:2])
            ready = captions.pick(leaving, everyone[leaving])
            done.append((photos[leaving], ready.pick(np.arange(len(leaving)), strategy.result(ready))))
            photos, captions, continued = photos[staying], captions.pick(staying, everyone[staying]), continued[staying]
        words = captions.tokens[:, :, -1:]
        if len(photos):
            rows = torch.from_numpy(continued.ravel()).to(device)
            cache = decoded.cache.reorder(rows, None if staying is None else torch.from_numpy(staying).to(device))
    return _in_order(done, device)


def collapse_repeats(generated: Generated) -> Generated:
    """Remove immediate repetitions of a word, as the release does before it scores a caption."""
    again = generated.tokens == torch.nn.functional.pad(generated.tokens, (1, 0), value=PAD)[..., :-1]
    order = again.long().argsort(dim=-1, stable=True)  # moves the words that stay to the front
    kept, logprobs = ~again.gather(-1, order), generated.logprobs.gather(-1, order)
    weights = generated.weights
    if weights is not None:
        index = order[..., None, None, None].expand_as(weights)
        weights = weights.gather(2, index) * kept[..., None, None, None]
    none = logprobs.isneginf()
    return Generated(generated.tokens.gather(-1, order).where(kept, PAD), logprobs.where(kept | none, 0.0), weights)


def _next_words(decoded: Decoded, captions: Captions, rules: Sequence[Rule], room: int) -> Tensor:
    """(B, C, words) log-probabilities, -inf for forbidden words. An ended caption continues with <pad> at no cost."""
    scores = decoded.logits[:, :, -1].float().contiguous()
    norm = scores.logsumexp(dim=-1, keepdim=True)
    norm = norm + (norm - norm)  # NaN if it is infinite, so that no rule hides an infinite score
    for rule in rules:
        rule.forbid(scores, captions.tokens, room)
    logprobs = scores.sub_(norm)
    (ended,) = captions.ended.ravel().nonzero()
    if len(ended):
        size = logprobs.shape[2]
        rows = torch.from_numpy(ended).to(logprobs.device)
        logprobs.view(-1, size).index_fill_(0, rows, -torch.inf)
        logprobs.view(-1).index_fill_(0, rows * size + PAD, 0.0)
    return logprobs


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values of the last axis, the largest first. NaN counts as the largest."""
    return np.argsort(np.where(np.isnan(values), -np.inf, -values), axis=-1, kind="stable")[..., :count]


def _in_order(done: list[tuple[np.ndarray, Captions]], device: torch.device) -> Generated:
    """Concatenate the finished photos in their original order, padded to the longest caption."""
    if not done:
        return Generated(torch.zeros(0, 0, 0, dtype=torch.int64), torch.zeros(0, 0, 0), None)
    longest = max(part.tokens.shape[2] for _, part in done)
    most = max(part.tokens.shape[1] for _, part in done)
    order = np.concatenate([photos for photos, _ in done]).argsort()
    parts = [_pad(part, most, longest) for _, part in done]

    def joined(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)[order]).to(device)

    weights = [part.weights for part in parts if part.weights is not None]
    return Generated(
        joined([part.tokens for part in parts]),
        joined([part.logprobs for part in parts]),
        joined(weights) if weights else None,
    )


def _pad(part: Captions, captions: int, words: int) -> Captions:
    """A photo with fewer captions than the others is padded with missing captions."""
    more, longer = (0, captions - part.tokens.shape[1]), (0, words - part.tokens.shape[2])
    logprobs = np.pad(part.logprobs, ((0, 0), (0, 0), longer))
    return Captions(
        np.pad(part.tokens, ((0, 0), more, longer), constant_values=PAD),
        np.pad(logprobs, ((0, 0), more, (0, 0)), constant_values=-np.inf),
        None if part.weights is None else np.pad(part.weights, ((0, 0), more, longer, *((0, 0),) * 3)),
    )
