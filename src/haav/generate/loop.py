"""The one decoding loop. The model stays untouched: all state is in the cache passed along."""

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
    """What decoding asks of a model; `Haav` and `Ensemble` both have it."""

    def encode(self, views: Views) -> Any: ...
    def init_cache(self, encoded: Any) -> Any: ...
    def decode(self, tokens: Tensor, cache: Any) -> Decoded: ...


@dataclass(frozen=True)
class Generated:
    """Captions of each photo, the best first. One with a log-probability of -inf stands for none."""

    tokens: Tensor
    """(B, K, T) int64, <eos> included, <pad> after it"""
    logprobs: Tensor
    """(B, K, T) float32 of each word by the model, whatever chose it; 0 at <pad>"""
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
        """(B, K) bool: has its <eos>, or can never have one"""
        return (self.tokens == EOS).any(dim=-1) | self.scores.isneginf()

    def pick(self, captions: Tensor) -> Generated:
        """Caption k of the result is caption `captions[b, k]`."""
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
    """The next words: caption k goes on from caption `parents[b, k]` with `words[b, k]`, both (B, K) int64."""

    parents: Tensor
    words: Tensor
    logprobs: Tensor
    """(B, K) of these words by the model; -inf: there is no such caption"""


class Strategy(Protocol):
    """Which captions go on with which words, when a photo needs no more of them, and which are the result."""

    def choose(self, captions: Generated, logprobs: Tensor, room: int) -> Choice:
        """logprobs (B, C, words), -inf where a word is forbidden; room: words that fit, this one included"""
        ...

    def settled(self, captions: Generated, max_words: int) -> Tensor:
        """(B,) bool: what further words would bring cannot change the result"""
        ...

    def result(self, captions: Generated) -> Tensor:
        """(B, K) int64: the captions to return, best first"""
        ...


@torch.no_grad()
def generate(
    model: CaptionModel, encoded: Any, strategy: Strategy, rules: Sequence[Rule] = (), max_words: int = 20
) -> Generated:
    """Write captions of at most `max_words` words, <eos> among them.

    Settled photos leave the batch once they are half of it: what remains is copied at most once over,
    all halvings together. Between, only word caches follow the captions; a photo's memory is never copied for them.
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


def collapse_repeats(found: Generated) -> Generated:
    """Take out words that follow themselves, as the release does before it scores a caption."""
    again = found.tokens == torch.nn.functional.pad(found.tokens, (1, 0), value=PAD)[..., :-1]
    order = again.long().argsort(dim=-1, stable=True)  # what stays moves to the front
    kept, logprobs = ~again.gather(-1, order), found.logprobs.gather(-1, order)
    weights = found.weights
    if weights is not None:
        index = order[..., None, None, None].expand_as(weights)
        weights = weights.gather(2, index) * kept[..., None, None, None]
    none = logprobs.isneginf()
    return Generated(found.tokens.gather(-1, order).where(kept, PAD), logprobs.where(kept | none, 0.0), weights)


def _next_words(decoded: Decoded, captions: Generated, rules: Sequence[Rule], room: int) -> Tensor:
    """(B, C, words) log-probabilities of the words that rules leave; an ended caption goes on with <pad>, for free."""
    scores = decoded.logits[:, :, -1].float()
    norm = scores.logsumexp(dim=-1, keepdim=True)
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
    """Photos that left one after the other, padded to the longest and back in their places."""
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
    # A photo with fewer captions than another has the rest as none.
    logprobs = torch.cat([logprobs, logprobs.new_full((len(logprobs), more, words), -torch.inf)], dim=1)
    weights = None if part.weights is None else pad(part.weights, (0, 0) * 3 + (0, longer, 0, more))
    return replace(part, tokens=pad(part.tokens, (0, longer, 0, more), value=PAD), logprobs=logprobs, weights=weights)
