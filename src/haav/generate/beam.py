"""The most probable captions that a search of bounded width finds.

One search serves the plain beam, the constrained beam and the diverse beam: captions live in banks of equal
width, (groups, states). A state is the set of demanded words that a caption has said (constrained beam search,
Anderson et al. 2017); a group is kept away from the words that groups before it have just chosen (diverse beam
search, Vijayakumar et al. 2018). Plain beam search has one bank.
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
    """Beam 1 is greedy decoding. An ended caption keeps its place with its score until better ones push it out."""

    beam: int
    """captions kept, all groups together"""
    length_penalty: float = 0.0
    """captions compete by log-probability / words ** length_penalty: 0 favours short ones, 1 is the mean of a word"""
    must: Sequence[Sequence[int]] = ()
    """one word of each of these sets is said; the banks are 2 ** len(must)"""
    groups: int = 1
    diversity: float = 0.5
    """what a word costs for each time that a group before has chosen it at this step"""
    n_best: int | None = None
    """how many captions are wanted; fewer than the beam lets photos finish sooner, with the same result"""
    keep_greedy: bool = False
    """the last place is always the greedy caption's, so that none is found that is less probable (plain beam only)"""

    def __post_init__(self) -> None:
        assert self.beam % self.groups == 0, "config.py refuses what does not divide"

    @property
    def states(self) -> int:
        return 1 << len(self.must)

    def choose(self, captions: Generated, logprobs: Tensor, room: int) -> Choice:
        photos, known, words = logprobs.shape
        start = captions.tokens.shape[2] == 0
        # Before the first word all groups go on from one caption that has said nothing.
        groups, states = (1, 1) if start else (self.groups, self.states)
        banks = logprobs.view(photos, groups, states, -1, words)
        banks[:, :, : self.states - 1, :, EOS] = -torch.inf  # something that must be said is missing
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
            own = self._fill_banks(banks[:, source], past[:, source], lengths[:, source], taken)
            chosen.append(Choice(own.parents + source * (known // groups), own.words, own.logprobs))
        return Choice(
            torch.cat([choice.parents for choice in chosen], dim=1),
            torch.cat([choice.words for choice in chosen], dim=1),
            torch.cat([choice.logprobs for choice in chosen], dim=1),
        )

    def _fill_banks(self, logprobs: Tensor, past: Tensor, lengths: Tensor, taken: Tensor | None) -> Choice:
        """One group: logprobs (B, S, K, words), past and lengths (B, S, K) → its next banks, (B, S × K) choices"""
        width = self.beam // self.groups
        wanted = logprobs if taken is None else logprobs - self.diversity * taken[:, None, None]
        demanded = torch.tensor(sorted({word for choices in self.must for word in choices}), device=past.device).long()
        if len(demanded):
            # They lead to other banks, so they do not compete with the rest of a caption's words.
            kept = wanted[..., demanded]
            wanted = wanted.index_fill(-1, demanded, -torch.inf)
        # No more than `width` words of one caption can win.
        values, words = wanted.topk(min(width, wanted.shape[-1]), dim=-1)
        if len(demanded):
            values = torch.cat([values, kept], dim=-1)
            words = torch.cat([words, demanded.expand(*words.shape[:-1], -1)], dim=-1)
        grown = lengths[..., None] + (words != PAD)
        scores = ((past[..., None] + values) / grown.clamp(min=1) ** self.length_penalty).flatten(1)
        reached = self._reached(words).flatten(1)
        size = min(width, scores.shape[1])
        if self.keep_greedy and self.groups == self.states == 1:
            # The greedy caption is the last; its words come first, the best of them in front.
            greedy = torch.full_like(scores[:, :1], scores.shape[1] - words.shape[-1], dtype=torch.int64)
            others = scores.scatter(1, greedy, -torch.inf).topk(size - 1, dim=1)
            pick = torch.cat([others.indices, greedy], dim=1)
            best = torch.cat([others.values, scores.gather(1, greedy)], dim=1)
        else:
            banks = [scores.masked_fill(reached != state, -torch.inf).topk(size, dim=1) for state in range(self.states)]
            pick = torch.cat([bank.indices for bank in banks], dim=1)
            best = torch.cat([bank.values for bank in banks], dim=1)
        parents, words = pick // words.shape[-1], words.flatten(1).gather(1, pick)
        own = logprobs.flatten(1, 2)[torch.arange(len(pick), device=pick.device)[:, None], parents, words]
        # A bank with fewer candidates than places is filled up with captions that are none.
        empty = best.isneginf()
        return Choice(parents, words.masked_fill(empty, PAD), own.masked_fill(empty, -torch.inf))

    def _reached(self, words: Tensor) -> Tensor:
        """The state that each candidate word leads to: words (B, S, K, candidates) → the same shape"""
        state = torch.arange(words.shape[1], device=words.device)[:, None, None].expand_as(words)
        for number, choices in enumerate(self.must):
            state = state | (torch.isin(words, words.new_tensor(list(choices))).long() << number)
        return state

    def settled(self, captions: Generated, max_words: int) -> Tensor:
        ended = captions.ended
        if self.groups > 1:
            return ended.all(dim=1)
        scores, last = self._ranked(captions), self._last_bank(captions)
        wanted = min(self.n_best or self.beam, len(last))
        best, order = scores[:, last].topk(wanted, dim=1)
        # Log-probabilities only fall; divided by the most words there can be, they bound what is to come.
        hope: Tensor = captions.scores / max_words**self.length_penalty
        hope = hope.masked_fill(ended, -torch.inf).amax(dim=1)
        return ended[:, last].gather(1, order).all(dim=1) & (best[:, -1] >= hope)

    def result(self, captions: Generated) -> Tensor:
        last = self._last_bank(captions)
        wanted = min(self.n_best or self.beam, len(last))
        return last[self._ranked(captions)[:, last].topk(wanted, dim=1).indices]

    def _last_bank(self, captions: Generated) -> Tensor:
        """The captions, of every group, that have said all that must be said"""
        every = torch.arange(captions.tokens.shape[1], device=captions.tokens.device)
        return every.view(self.groups, self.states, -1)[:, -1].flatten()

    def _ranked(self, captions: Generated) -> Tensor:
        return captions.scores / captions.lengths.clamp(min=1) ** self.length_penalty
