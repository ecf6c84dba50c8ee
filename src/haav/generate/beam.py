"""Beam search: plain, constrained and diverse.

One implementation serves all three. Captions are kept in banks of equal width, indexed by (group, state). A state is
the set of required words that a caption contains (constrained beam search, Anderson et al. 2017). A group is penalised
for words that earlier groups chose at the same step (diverse beam search, Vijayakumar et al. 2018). Plain beam search
has one bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from haav.generate.loop import Captions, Choice, largest
from haav.text import EOS, PAD


@dataclass(frozen=True)
class Candidates:
    """Words that may continue the captions of one group, (B, S, K, candidates) each"""

    words: np.ndarray
    values: np.ndarray
    """log-probabilities less what diversity takes off, to choose by"""
    logprobs: np.ndarray


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

    def choose(self, captions: Captions, logprobs: Tensor) -> Choice:
        photos, known, words = logprobs.shape
        start = captions.tokens.shape[2] == 0
        # Before the first word, all groups continue one empty caption.
        groups, states = (1, 1) if start else (self.groups, self.states)
        banks = logprobs.view(photos, groups, states, -1, words)
        if self.must:
            banks[:, :, : self.states - 1, :, EOS] = -torch.inf  # a required word is missing
        past, lengths = (part.reshape(photos, groups, states, -1) for part in (captions.scores, captions.lengths))
        chosen: list[Choice] = []
        for group in range(self.groups):
            source = 0 if start else group
            taken = None
            if chosen and self.diversity:
                taken = np.zeros((photos, words), np.float32)
                for other in chosen:
                    np.add.at(taken, (np.arange(photos)[:, None], other.words), 1)
                taken[:, PAD] = 0  # ended captions cost nothing
            filled = self._fill_banks(self._candidates(banks[:, source], taken), past[:, source], lengths[:, source])
            chosen.append(Choice(filled.parents + source * (known // groups), filled.words, filled.logprobs))
        if len(chosen) == 1:
            return chosen[0]
        return Choice(
            np.concatenate([choice.parents for choice in chosen], axis=1),
            np.concatenate([choice.words for choice in chosen], axis=1),
            np.concatenate([choice.logprobs for choice in chosen], axis=1),
        )

    def _candidates(self, logprobs: Tensor, taken: np.ndarray | None) -> Candidates:
        """The words that may continue the captions of one group: logprobs (B, S, K, words)"""
        width = self.beam // self.groups
        wanted = logprobs
        if taken is not None:
            wanted = logprobs - self.diversity * torch.from_numpy(taken).to(logprobs.device)[:, None, None]
        kept, demanded = wanted, sorted({word for choices in self.must for word in choices})
        if demanded:
            # Required words lead to other banks, so they do not compete with the other words of a caption.
            wanted = wanted.index_fill(-1, torch.tensor(demanded, device=wanted.device), -torch.inf)
        # At most `width` words of one caption can be chosen.
        values, words = wanted.topk(min(width, wanted.shape[-1]), dim=-1)
        if demanded:
            values = torch.cat([values, kept[..., demanded]], dim=-1)
            words = torch.cat([words, words.new_tensor(demanded).expand(*words.shape[:-1], -1)], dim=-1)
        own = values if taken is None else logprobs.gather(-1, words)
        return Candidates(*(part.cpu().numpy() for part in (words, values, own)))

    def _fill_banks(self, candidates: Candidates, past: np.ndarray, lengths: np.ndarray) -> Choice:
        """Next banks of one group: past and lengths (B, S, K) → choices (B, S × K)"""
        width = self.beam // self.groups
        words, photos = candidates.words, len(candidates.words)
        grown = np.maximum(lengths[..., None] + (words != PAD), 1)
        scores = ((past[..., None] + candidates.values) / grown**self.length_penalty).reshape(photos, -1)
        size = min(width, scores.shape[1])
        rows = np.arange(photos)[:, None]
        if self.keep_greedy and self.groups == self.states == 1:
            # The greedy caption is the last one, and its best word comes first among its candidates.
            greedy = scores.shape[1] - words.shape[-1]
            others = scores.copy()
            others[:, greedy] = -np.inf
            pick = np.concatenate([largest(others, size - 1), np.full((photos, 1), greedy)], axis=1)
            best = np.concatenate([others[rows, pick[:, :-1]], scores[:, [greedy]]], axis=1)
        else:
            reached = self._reached(words).reshape(photos, -1)
            banks = [np.where(reached == state, scores, -np.inf) for state in range(self.states)]
            picks = [largest(bank, size) for bank in banks]
            pick = np.concatenate(picks, axis=1)
            best = np.concatenate([bank[rows, indices] for bank, indices in zip(banks, picks, strict=True)], axis=1)
        # A bank with fewer candidates than places is padded with captions of probability 0.
        empty = np.isneginf(best)
        return Choice(
            pick // words.shape[-1],
            np.where(empty, PAD, words.reshape(photos, -1)[rows, pick]),
            np.where(empty, np.float32(-np.inf), candidates.logprobs.reshape(photos, -1)[rows, pick]),
        )

    def _reached(self, words: np.ndarray) -> np.ndarray:
        """The state that each candidate word leads to: words (B, S, K, candidates) → the same shape"""
        state = np.broadcast_to(np.arange(words.shape[1])[:, None, None], words.shape)
        for index, choices in enumerate(self.must):
            state = state | (np.isin(words, choices).astype(np.int64) << index)
        return state

    def settled(self, captions: Captions, max_words: int) -> np.ndarray:
        ended = captions.ended
        if self.groups > 1:
            return np.asarray(ended.all(axis=1))
        best = self.result(captions)
        rows = np.arange(len(best))[:, None]
        # Log-probabilities only fall. Divided by the maximum length, they bound the final score of unfinished captions.
        hope = np.where(ended, -np.inf, captions.scores / max_words**self.length_penalty).max(axis=1)
        settled: np.ndarray = ended[rows, best].all(axis=1) & (self._ranked(captions)[rows, best[:, -1:]][:, 0] >= hope)
        return settled

    def result(self, captions: Captions) -> np.ndarray:
        # Captions, in all groups, that contain all required words
        last = np.arange(captions.tokens.shape[1]).reshape(self.groups, self.states, -1)[:, -1].ravel()
        wanted = min(self.n_best or self.beam, len(last))
        best: np.ndarray = last[largest(self._ranked(captions)[:, last], wanted)]
        return best

    def _ranked(self, captions: Captions) -> np.ndarray:
        ranked: np.ndarray = captions.scores / np.maximum(captions.lengths, 1) ** self.length_penalty
        return ranked
