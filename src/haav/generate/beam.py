"""Beam search: plain, constrained and diverse.

One implementation serves all three. Captions are kept in banks of equal width, indexed by (group, state). A state is
the set of required words that a caption contains (constrained beam search, Anderson et al. 2017). A group is penalised
for words that earlier groups chose at the same step (diverse beam search, Vijayakumar et al. 2018). Plain beam search
has one bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haav.generate.loop import Choice, Generated
from haav.text import EOS, PAD


@dataclass(frozen=True)
class BeamSearch:
    """Beam 1 is greedy decoding. An ended caption stays in the beam until better ones replace it."""

    beam: int
    """captions kept, in all groups together"""
    length_penalty: float = 0.0
    """captions are ranked by log-probability / words ** length_penalty: 0 favours short ones, 1 is the mean per word"""
    must: Sequence[Sequence[int]] = ()
    """a caption must contain one word of each set; there are 2 ** len(must) states"""
    groups: int = 1
    diversity: float = 0.5
    """penalty of a word for each time that an earlier group chose it at this step"""
    n_best: int | None = None
    """captions to return; if fewer than the beam, photos finish sooner, with the same result"""
    keep_greedy: bool = False
    """reserve the last place for the greedy caption, so that no less probable one is returned (plain beam only)"""

    def __post_init__(self) -> None:
        assert self.beam % self.groups == 0, "config.py refuses what does not divide"

    @property
    def states(self) -> int:
        return 1 << len(self.must)

    def choose(self, captions: Generated, logprobs: Tensor, room: int) -> Choice:
        photos, known, words = logprobs.shape
        start = captions.tokens.shape[2] == 0
        # Before the first word, all groups continue one empty caption.
        groups, states = (1, 1) if start else (self.groups, self.states)
        banks = logprobs.view(photos, groups, states, -1, words)
        banks[:, :, : self.states - 1, :, EOS] = -torch.inf  # a required word is missing
        past = captions.scores.view(photos, groups, states, -1)
        lengths = captions.lengths.view(photos, groups, states, -1)
        chosen: list[Choice] = []
        for group in range(self.groups):
            source = 0 if start else group
            taken = None
            if chosen and self.diversity:
                taken = banks.new_zeros(photos, words)
                for other in chosen:
                    taken.scatter_add_(1, other.words, torch.ones_like(other.words, dtype=taken.dtype))
                taken[:, PAD] = 0  # ended captions cost nothing
            filled = self._fill_banks(banks[:, source], past[:, source], lengths[:, source], taken)
            chosen.append(Choice(filled.parents + source * (known // groups), filled.words, filled.logprobs))
        return Choice(
            torch.cat([choice.parents for choice in chosen], dim=1),
            torch.cat([choice.words for choice in chosen], dim=1),
            torch.cat([choice.logprobs for choice in chosen], dim=1),
        )

    def _fill_banks(self, logprobs: Tensor, past: Tensor, lengths: Tensor, taken: Tensor | None) -> Choice:
        """Next banks of one group: logprobs (B, S, K, words), past and lengths (B, S, K) → choices (B, S × K)"""
        width = self.beam // self.groups
        wanted = logprobs if taken is None else logprobs - self.diversity * taken[:, None, None]
        demanded = torch.tensor(sorted({word for choices in self.must for word in choices}), device=past.device).long()
        if len(demanded):
            # Required words lead to other banks, so they do not compete with the other words of a caption.
            kept = wanted[..., demanded]
            wanted = wanted.index_fill(-1, demanded, -torch.inf)
        # At most `width` words of one caption can be chosen.
        values, words = wanted.topk(min(width, wanted.shape[-1]), dim=-1)
        if len(demanded):
            values = torch.cat([values, kept], dim=-1)
            words = torch.cat([words, demanded.expand(*words.shape[:-1], -1)], dim=-1)
        grown = lengths[..., None] + (words != PAD)
        scores = ((past[..., None] + values) / grown.clamp(min=1) ** self.length_penalty).flatten(1)
        reached = self._reached(words).flatten(1)
        size = min(width, scores.shape[1])
        if self.keep_greedy and self.groups == self.states == 1:
            # The greedy caption is the last one, and its best word comes first among its candidates.
            greedy = torch.full_like(scores[:, :1], scores.shape[1] - words.shape[-1], dtype=torch.int64)
            others = scores.scatter(1, greedy, -torch.inf).topk(size - 1, dim=1)
            pick = torch.cat([others.indices, greedy], dim=1)
            best = torch.cat([others.values, scores.gather(1, greedy)], dim=1)
        else:
            banks = [scores.masked_fill(reached != state, -torch.inf).topk(size, dim=1) for state in range(self.states)]
            pick = torch.cat([bank.indices for bank in banks], dim=1)
            best = torch.cat([bank.values for bank in banks], dim=1)
        parents, words = pick // words.shape[-1], words.flatten(1).gather(1, pick)
        word_logprobs = logprobs.flatten(1, 2)[torch.arange(len(pick), device=pick.device)[:, None], parents, words]
        # A bank with fewer candidates than places is padded with captions of probability 0.
        empty = best.isneginf()
        return Choice(parents, words.masked_fill(empty, PAD), word_logprobs.masked_fill(empty, -torch.inf))

    def _reached(self, words: Tensor) -> Tensor:
        """The state that each candidate word leads to: words (B, S, K, candidates) → the same shape"""
        state = torch.arange(words.shape[1], device=words.device)[:, None, None].expand_as(words)
        for index, choices in enumerate(self.must):
            state = state | (torch.isin(words, words.new_tensor(list(choices))).long() << index)
        return state

    def settled(self, captions: Generated, max_words: int) -> Tensor:
        ended = captions.ended
        if self.groups > 1:
            return ended.all(dim=1)
        scores, last = self._ranked(captions), self._last_bank(captions)
        wanted = min(self.n_best or self.beam, len(last))
        best, order = scores[:, last].topk(wanted, dim=1)
        # Log-probabilities only fall. Divided by the maximum length, they bound the final score of unfinished captions.
        hope: Tensor = captions.scores / max_words**self.length_penalty
        hope = hope.masked_fill(ended, -torch.inf).amax(dim=1)
        return ended[:, last].gather(1, order).all(dim=1) & (best[:, -1] >= hope)

    def result(self, captions: Generated) -> Tensor:
        last = self._last_bank(captions)
        wanted = min(self.n_best or self.beam, len(last))
        return last[self._ranked(captions)[:, last].topk(wanted, dim=1).indices]

    def _last_bank(self, captions: Generated) -> Tensor:
        """Indices of the captions, in all groups, that contain all required words"""
        every = torch.arange(captions.tokens.shape[1], device=captions.tokens.device)
        return every.view(self.groups, self.states, -1)[:, -1].flatten()

    def _ranked(self, captions: Generated) -> Tensor:
        return captions.scores / captions.lengths.clamp(min=1) ** self.length_penalty
