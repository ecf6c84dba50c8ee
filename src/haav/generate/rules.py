"""Rules that forbid next words, given the words so far. A rule never changes the scores of other words.

What was said is a numpy array: which words to forbid is found out on the host, and scores are touched only where there
is something to forbid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from haav.text import EOS


class Rule(Protocol):
    def forbid(self, scores: Tensor, words: np.ndarray, room: int) -> None:
        """Set scores (B, C, words) to -inf in place, given the words (B, C, T) so far.

        `room` is the number of words that fit, including the next one.
        """
        ...


class Never:
    """Words that are always forbidden."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = torch.tensor(list(ids), dtype=torch.int64)

    def forbid(self, scores: Tensor, words: np.ndarray, room: int) -> None:
        scores.index_fill_(2, self.ids.to(scores.device), -torch.inf)


@dataclass(frozen=True)
class Prefix:
    """The first words are given. Other rules hold for the words after them."""

    ids: Sequence[int]
    others: Sequence[Rule] = ()

    def forbid(self, scores: Tensor, words: np.ndarray, room: int) -> None:
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

    def forbid(self, scores: Tensor, words: np.ndarray, room: int) -> None:
        if room == 1 and self.in_time:
            scores[..., :EOS] = scores[..., EOS + 1 :] = -torch.inf
        elif room == 2 and self.dangling:
            scores[..., list(self.dangling)] = -torch.inf
        if words.shape[2] < self.min_words:
            scores[..., EOS] = -torch.inf
        elif self.dangling and words.shape[2]:
            (captions,) = np.isin(words[..., -1].ravel(), self.dangling).nonzero()
            _forbid(scores, captions, np.full_like(captions, EOS))


class NoDoubles:
    """After a function word, no word that was said before, in singular or plural: "a knife and a knife".

    After another word it may be said: "a baby elephant next to an adult elephant".
    """

    def __init__(self, forms: Sequence[Sequence[int]]) -> None:
        """`forms`: those of a vocabulary"""
        self.forms = forms

    def forbid(self, scores: Tensor, words: np.ndarray, room: int) -> None:
        if not words.shape[2]:
            return
        doubles = [
            (caption, form)
            for caption, said in enumerate(words.reshape(-1, words.shape[2]).tolist())
            if not self.forms[said[-1]]
            for word in said
            for form in self.forms[word]
        ]
        if doubles:
            _forbid(scores, *np.array(doubles).T)


@dataclass(frozen=True)
class NoRepeats:
    """No sequence of `length` words occurs twice."""

    length: int

    def forbid(self, scores: Tensor, words: np.ndarray, room: int) -> None:
        before = self.length - 1
        if words.shape[2] < self.length:
            return
        windows = np.lib.stride_tricks.sliding_window_view(words.reshape(-1, words.shape[2]), self.length, axis=1)
        said = (windows[:, :, :before] == windows[:, -1:, 1:]).all(axis=-1)
        captions, places = (said & (windows[:, :, -1] != EOS)).nonzero()
        _forbid(scores, captions, windows[captions, places, -1])


def _forbid(scores: Tensor, captions: np.ndarray, words: np.ndarray) -> None:
    """Forbid words of captions, which are numbered through all photos."""
    if len(words):
        places = torch.from_numpy(captions * scores.shape[2] + words)
        scores.view(-1).index_fill_(0, places.to(scores.device), -torch.inf)
