"""Rules that forbid next words, given the words so far. A rule never changes the scores of other words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from haav.text import EOS


class Rule(Protocol):
    def forbid(self, scores: Tensor, words: Tensor, room: int) -> None:
        """Set scores (B, C, words) to -inf in place, given the words (B, C, T) so far.

        `room` is the number of words that fit, including the next one.
        """
        ...


@dataclass(frozen=True)
class Never:
    """Words that are always forbidden."""

    ids: Sequence[int]

    def forbid(self, scores: Tensor, words: Tensor, room: int) -> None:
        scores[..., list(self.ids)] = -torch.inf


@dataclass(frozen=True)
class Prefix:
    """The first words are given. Other rules hold for the words after them."""

    ids: Sequence[int]
    others: Sequence[Rule] = ()

    def forbid(self, scores: Tensor, words: Tensor, room: int) -> None:
        step = words.shape[2]
        if step >= len(self.ids):
            for rule in self.others:
                rule.forbid(scores, words, room)
            return
        word = self.ids[step]
        scores[..., :word] = scores[..., word + 1 :] = -torch.inf


@dataclass(frozen=True)
class Ending:
    """A caption has at least `min_words` words, does not end on a dangling word ("a man with a"), and ends in time."""

    min_words: int = 0
    dangling: Sequence[int] = ()
    """words that a caption must not end with"""
    in_time: bool = True
    """if only one more word fits, it must be <eos>"""

    def forbid(self, scores: Tensor, words: Tensor, room: int) -> None:
        if room == 1 and self.in_time:
            scores[..., :EOS] = scores[..., EOS + 1 :] = -torch.inf
        elif room == 2 and self.dangling:
            scores[..., list(self.dangling)] = -torch.inf
        if words.shape[2] < self.min_words:
            scores[..., EOS] = -torch.inf
        if self.dangling and words.shape[2]:
            hanging = torch.isin(words[..., -1], words.new_tensor(self.dangling))
            scores[..., EOS].masked_fill_(hanging, -torch.inf)


class NoDoubles:
    """After a function word, no word that was said before, in singular or plural: "a knife and a knife".

    After another word it may be said: "a baby elephant next to an adult elephant".
    """

    def __init__(self, nouns: Sequence[int]) -> None:
        """`nouns`: those of a vocabulary"""
        self.nouns = torch.tensor(nouns)
        self.count = int(self.nouns.max()) + 1

    def forbid(self, scores: Tensor, words: Tensor, room: int) -> None:
        if not words.shape[2]:
            return
        nouns = self.nouns.to(words.device)
        said = nouns[words]
        # The last column stands for function words and is never used.
        used = torch.zeros(*said.shape[:2], self.count + 1, dtype=torch.bool, device=words.device)
        used.scatter_(2, said.where(said >= 0, self.count), True)
        used[..., -1] = False
        used &= said[..., -1:] < 0
        scores.masked_fill_(used[..., nouns], -torch.inf)


@dataclass(frozen=True)
class NoRepeats:
    """No sequence of `length` words occurs twice."""

    length: int

    def forbid(self, scores: Tensor, words: Tensor, room: int) -> None:
        before = self.length - 1
        if words.shape[2] < self.length:
            return
        windows = words.unfold(2, self.length, 1)
        said = (windows[..., :before] == words[:, :, None, words.shape[2] - before :]).all(dim=-1)
        # Where the last words have not occurred before, scatter <eos>, whose score is written back unchanged.
        repeated = windows[..., -1].where(said, EOS)
        scores.scatter_(2, repeated, scores.gather(2, repeated).masked_fill(said & (repeated != EOS), -torch.inf))
