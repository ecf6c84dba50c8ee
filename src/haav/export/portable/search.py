"""Plain beam search in numpy, with the same rules and results as `haav.generate`.

It is a second implementation on purpose: docs/explanation/architecture.md says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from haav.config import DecodeConfig
from haav.text import BOS, EOS, PAD, UNK, Vocabulary

Step = Callable[[np.ndarray, list[np.ndarray], int], tuple[np.ndarray, np.ndarray, list[np.ndarray]]]
"""words (B, C), past, position → scores (B, C, words), trust (B, C, V), new past"""


@dataclass(frozen=True)
class Hypothesis:
    """One caption of the search."""

    words: np.ndarray
    """(T,)"""
    logprobs: np.ndarray
    """(T,)"""
    trust: np.ndarray
    """(T, V)"""

    @property
    def logprob(self) -> float:
        return float(self.logprobs.sum())


@dataclass
class Beams:
    words: np.ndarray
    """(B, C, T)"""
    logprobs: np.ndarray
    """(B, C, T)"""
    trust: np.ndarray
    """(B, C, T, V)"""

    @property
    def scores(self) -> np.ndarray:
        scores: np.ndarray = self.logprobs.sum(axis=2)
        return scores

    @property
    def ended(self) -> np.ndarray:
        ended: np.ndarray = (self.words == EOS).any(axis=2) | np.isneginf(self.scores)
        return ended

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = (self.words != PAD).sum(axis=2)
        return lengths


class Search:
    def __init__(self, settings: DecodeConfig, vocabulary: Vocabulary, beam: int, n_best: int) -> None:
        self.settings, self.beam, self.n_best = settings, beam, n_best
        self.never = [PAD, BOS, *([] if settings.allow_unk else [UNK])]
        self.dangling = [] if settings.allow_cut else vocabulary.dangling
        self.nouns = np.array(vocabulary.nouns)

    def __call__(self, step: Step, past: list[np.ndarray], photos: int) -> list[list[Hypothesis]]:
        """The best captions of each photo, best first"""
        most = self.settings.max_words
        scores, trust, past = step(np.full((photos, 1), BOS), past, 0)
        empty = np.zeros((photos, 1, 0), np.float32)
        beams = Beams(empty.astype(np.int64), empty, np.zeros((photos, 1, 0, trust.shape[2]), np.float32))
        rows = np.arange(photos)[:, None]
        for room in range(most, 0, -1):
            logprobs = self._logprobs(scores, beams, room)
            parents, words, chosen = self._choose(beams, logprobs)
            beams = Beams(
                np.concatenate([beams.words[rows, parents], words[..., None]], axis=2),
                np.concatenate([beams.logprobs[rows, parents], chosen[..., None]], axis=2),
                np.concatenate([beams.trust[rows, parents], trust[rows, parents][:, :, None]], axis=2),
            )
            if room == 1 or self._settled(beams).all():
                break
            past = [part[rows, parents] for part in past]
            scores, trust, past = step(words, past, most - room + 1)
        order = top(self._ranked(beams), min(self.n_best, self.beam))
        return [
            [Hypothesis(beams.words[b, c], beams.logprobs[b, c], beams.trust[b, c]) for c in order[b]]
            for b in range(photos)
        ]

    def _logprobs(self, scores: np.ndarray, beams: Beams, room: int) -> np.ndarray:
        """(B, C, words), -inf for forbidden words. An ended caption continues with <pad> at no cost."""
        highest = scores.max(axis=2, keepdims=True)
        logprobs: np.ndarray = scores - (highest + np.log(np.exp(scores - highest).sum(axis=2, keepdims=True)))
        logprobs[..., self.never] = -np.inf
        self._forbid_repeats(logprobs, beams.words)
        self._forbid_doubles(logprobs, beams.words)
        self._forbid_bad_ends(logprobs, beams.words, room)
        ended = beams.ended
        logprobs[ended] = -np.inf
        logprobs[ended, PAD] = 0.0
        return logprobs

    def _forbid_repeats(self, logprobs: np.ndarray, words: np.ndarray) -> None:
        length = self.settings.no_repeat
        if not length or words.shape[2] < length:
            return
        for place in np.ndindex(words.shape[:2]):
            said = words[place].tolist()
            last = said[len(said) - length + 1 :]
            for start in range(len(said) - length + 1):
                if said[start : start + length - 1] == last and said[start + length - 1] != EOS:
                    logprobs[(*place, said[start + length - 1])] = -np.inf

    def _forbid_doubles(self, logprobs: np.ndarray, words: np.ndarray) -> None:
        if not self.settings.no_doubles or not words.shape[2]:
            return
        for place in np.ndindex(words.shape[:2]):
            said = self.nouns[words[place]]
            if said[-1] < 0:
                logprobs[place][np.isin(self.nouns, said[said >= 0])] = -np.inf

    def _forbid_bad_ends(self, logprobs: np.ndarray, words: np.ndarray, room: int) -> None:
        if room == 1 and not self.settings.allow_cut:
            logprobs[..., np.arange(logprobs.shape[2]) != EOS] = -np.inf
        elif room == 2 and self.dangling:
            logprobs[..., self.dangling] = -np.inf
        if words.shape[2] < self.settings.min_words:
            logprobs[..., EOS] = -np.inf
        if self.dangling and words.shape[2]:
            logprobs[np.isin(words[..., -1], self.dangling), EOS] = -np.inf

    def _choose(self, beams: Beams, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Parents, words and their log-probabilities, (B, K) each"""
        photos = len(logprobs)
        words = top(logprobs, min(self.beam, logprobs.shape[2]))
        values = np.take_along_axis(logprobs, words, axis=2)
        grown = np.maximum(beams.lengths[..., None] + (words != PAD), 1)
        scores = ((beams.scores[..., None] + values) / grown**self.settings.length_penalty).reshape(photos, -1)
        size = min(self.beam, scores.shape[1])
        if self.settings.keep_greedy:
            # The greedy caption is the last one, and its best word comes first among its candidates.
            greedy = scores.shape[1] - words.shape[2]
            others = scores.copy()
            others[:, greedy] = -np.inf
            pick = np.concatenate([top(others, size - 1), np.full((photos, 1), greedy)], axis=1)
        else:
            pick = top(scores, size)
        rows = np.arange(photos)[:, None]
        parents, chosen = pick // words.shape[2], words.reshape(photos, -1)[rows, pick]
        chosen_logprobs = logprobs[rows, parents, chosen]
        kept = scores[rows, pick]
        if self.settings.keep_greedy:
            kept[:, :-1] = others[rows, pick[:, :-1]]
        none = np.isneginf(kept)
        return parents, np.where(none, PAD, chosen), np.where(none, -np.inf, chosen_logprobs)

    def _settled(self, beams: Beams) -> np.ndarray:
        """(B,): whether further words cannot change the result"""
        ended, ranked = beams.ended, self._ranked(beams)
        order = top(ranked, min(self.n_best, ranked.shape[1]))
        worst = np.take_along_axis(ranked, order, axis=1)[:, -1]
        hope = np.where(ended, -np.inf, beams.scores / self.settings.max_words**self.settings.length_penalty)
        settled: np.ndarray = np.take_along_axis(ended, order, axis=1).all(axis=1) & (worst >= hope.max(axis=1))
        return settled

    def _ranked(self, beams: Beams) -> np.ndarray:
        ranked: np.ndarray = beams.scores / np.maximum(beams.lengths, 1) ** self.settings.length_penalty
        return ranked


def top(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values of the last axis, the largest first"""
    if count < values.shape[-1] // 4:
        # Sorting thousands of words to find five would take longer than the model.
        some = np.argpartition(-values, count, axis=-1)[..., :count]
        order = np.argsort(-np.take_along_axis(values, some, axis=-1), axis=-1, kind="stable")
        return np.take_along_axis(some, order, axis=-1)
    return np.argsort(-values, axis=-1, kind="stable")[..., :count]
