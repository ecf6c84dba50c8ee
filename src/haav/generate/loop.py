"""The decoding loop. The model is stateless: all state is in the cache that is passed along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from haav.generate.rules import Rule
from haav.text import BOS, EOS, PAD
from haav.types import Decoded, Views


class CaptionModel(Protocol):
    """What decoding needs of a model. `Haav` and `Ensemble` implement it."""

    def encode(self, views: Views) -> Any: ...
    def init_cache(self, encoded: Any) -> Any: ...
    def decode(self, tokens: Tensor, cache: Any) -> Decoded: ...


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
    """(B, K, T, M, H, V) view weights at each word"""

    @property
    def scores(self) -> Tensor:
        """(B, K): log-probability of each caption"""
        return self.logprobs.sum(dim=-1)

    @property
    def lengths(self) -> Tensor:
        """(B, K): words, <eos> included"""
        return (self.tokens != PAD).sum(dim=-1)

    @property
    def ended(self) -> Tensor:
        """(B, K) bool: whether the caption has its <eos>, or is missing"""
        return (self.tokens == EOS).any(dim=-1) | self.scores.isneginf()

    def pick(self, captions: Tensor) -> Generated:
        """Select captions: caption k of the result is caption `captions[b, k]`."""
        photos = torch.arange(len(captions), device=captions.device)[:, None]
        weights = None if self.weights is None else self.weights[photos, captions]
        return Generated(self.tokens[photos, captions], self.logprobs[photos, captions], weights)

    def cpu(self) -> Generated:
        return Generated(self.tokens.cpu(), self.logprobs.cpu(), None if self.weights is None else self.weights.cpu())

    def keep(self, photos: Tensor) -> Generated:
        weights = None if self.weights is None else self.weights[photos]
        return Generated(self.tokens[photos], self.logprobs[photos], weights)


@dataclass(frozen=True)
class Choice:
    """The next words: caption k continues caption `parents[b, k]` with `words[b, k]`, both (B, K) int64."""

    parents: Tensor
    words: Tensor
    logprobs: Tensor
    """(B, K) log-probabilities of these words by the model; -inf marks a missing caption"""


class Strategy(Protocol):
    """Decides which captions continue with which words, when a photo is done, and which captions to return."""

    def choose(self, captions: Generated, logprobs: Tensor, room: int) -> Choice:
        """logprobs (B, C, words): -inf for forbidden words; room: number of words that fit, including this one"""
        ...

    def settled(self, captions: Generated, max_words: int) -> Tensor:
        """(B,) bool: whether further words cannot change the result"""
        ...

    def result(self, captions: Generated) -> Tensor:
        """(B, K) int64: the captions to return, best first"""
        ...


@torch.no_grad()
def generate(
    model: CaptionModel, encoded: Any, strategy: Strategy, rules: Sequence[Rule] = (), max_words: int = 20
) -> Generated:
    """Generate captions of at most `max_words` words, including <eos>.

    Settled photos leave the batch once they are at least half of it, so all halvings together copy the batch at most
    once. Between halvings, only the word caches are reordered. The memory of a photo is not copied for its captions.
    """
    if not len(encoded.present):
        return Generated(torch.zeros(0, 0, 0, dtype=torch.int64), torch.zeros(0, 0, 0), None)
    decoded = model.decode(_first_words(encoded), model.init_cache(encoded))
    photos = torch.arange(len(encoded.present), device=encoded.present.device)
    captions = _no_words(decoded)
    done: list[tuple[Tensor, Generated]] = []
    while len(photos):
        room = max_words - captions.tokens.shape[2]
        logprobs = _next_words(decoded, captions, rules, room)
        choice = strategy.choose(captions, logprobs, room)
        captions = _grow(captions, choice, decoded)
        settled = strategy.settled(captions, max_words) | (room == 1)
        parents, cache = choice.parents, decoded.cache
        if 2 * settled.sum() >= len(photos):
            leaving, staying = settled.nonzero()[:, 0], (~settled).nonzero()[:, 0]
            ready = captions.keep(leaving)
            done.append((photos[leaving], ready.pick(strategy.result(ready))))
            photos, parents = photos[staying], parents[staying]
            captions, cache = captions.keep(staying), cache.keep(staying)
        if len(photos):
            decoded = model.decode(captions.tokens[:, :, -1:], cache.reorder(parents))
    return _in_order(done)


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


def _next_words(decoded: Decoded, captions: Generated, rules: Sequence[Rule], room: int) -> Tensor:
    """(B, C, words) log-probabilities, -inf for forbidden words. An ended caption continues with <pad> at no cost."""
    scores = decoded.logits[:, :, -1].float()
    norm = scores.logsumexp(dim=-1, keepdim=True)
    norm = norm.where(norm.isfinite(), torch.nan)  # so that no rule hides an infinite score
    for rule in rules:
        rule.forbid(scores, captions.tokens, room)
    ended = captions.ended
    logprobs = scores.sub_(norm).masked_fill_(ended[..., None], -torch.inf)
    logprobs[..., PAD].masked_fill_(ended, 0.0)
    return logprobs


def _grow(captions: Generated, choice: Choice, decoded: Decoded) -> Generated:
    kept = captions.pick(choice.parents)
    weights = None
    if decoded.weights is not None:
        photos = torch.arange(len(choice.parents), device=choice.parents.device)[:, None]
        weights = decoded.weights[:, :, -1:][photos, choice.parents]
        weights = weights if kept.weights is None else torch.cat([kept.weights, weights], dim=2)
    return Generated(
        torch.cat([kept.tokens, choice.words[..., None]], dim=2),
        torch.cat([kept.logprobs, choice.logprobs[..., None]], dim=2),
        weights,
    )


def _first_words(encoded: Any) -> Tensor:
    """<bos> for one caption of each photo, (B, 1, 1)."""
    return torch.full((len(encoded.present), 1, 1), BOS, dtype=torch.int64, device=encoded.present.device)


def _no_words(decoded: Decoded) -> Generated:
    logits = decoded.logits
    empty = logits.new_zeros(*logits.shape[:2], 0)
    return Generated(empty.long(), empty.float(), None)


def _in_order(done: list[tuple[Tensor, Generated]]) -> Generated:
    """Concatenate the finished photos in their original order, padded to the longest caption."""
    longest = max(part.tokens.shape[2] for _, part in done)
    most = max(part.tokens.shape[1] for _, part in done)
    order = torch.cat([photos for photos, _ in done]).argsort()
    parts = [_pad(part, most, longest) for _, part in done]
    weights = [part.weights for part in parts if part.weights is not None]
    return Generated(
        torch.cat([part.tokens for part in parts])[order],
        torch.cat([part.logprobs for part in parts])[order],
        torch.cat(weights)[order] if weights else None,
    )


def _pad(part: Generated, captions: int, words: int) -> Generated:
    more, longer = captions - part.tokens.shape[1], words - part.tokens.shape[2]
    pad = torch.nn.functional.pad
    logprobs = pad(part.logprobs, (0, longer))
    # A photo with fewer captions than the others is padded with missing captions.
    logprobs = torch.cat([logprobs, logprobs.new_full((len(logprobs), more, words), -torch.inf)], dim=1)
    weights = None if part.weights is None else pad(part.weights, (0, 0) * 3 + (0, longer, 0, more))
    return replace(part, tokens=pad(part.tokens, (0, longer, 0, more), value=PAD), logprobs=logprobs, weights=weights)
