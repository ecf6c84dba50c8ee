"""Re-rank captions by agreement with the sentences retrieved for a photo (consensus re-ranking, Devlin 2015).

A search returns captions that the model finds about equally probable. The retrieved sentences are a second opinion at
no extra cost: people wrote them for similar photos. Agreement is computed as in CIDEr-D, from shared n-grams. Rare
words count more. The rarity of a word is derived from its rank in the vocabulary, which is sorted by frequency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from haav.config import DecodeConfig
from haav.text import Vocabulary, tokenize
from haav.types import Caption

LONGEST = 4
"""length of the longest n-grams that are compared"""
SPREAD = 6.0
"""standard deviation of the length penalty, in words"""
END = "<eos>"


def by_consensus(
    captions: Sequence[Caption], agreements: Sequence[float | None], settings: DecodeConfig
) -> list[Caption]:
    """Captions sorted by log-probability + `consensus` · agreement. None, without sentences, leaves their order."""
    if not settings.consensus:
        return list(captions)
    total = [
        caption.logprob + settings.consensus * share if share is not None else 0.0
        for caption, share in zip(captions, agreements, strict=True)
    ]
    return [captions[index] for index in sorted(range(len(total)), key=lambda index: -total[index])]


class Consensus:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ranks = vocabulary.ids

    def __call__(self, captions: Sequence[Sequence[str]], sentences: Sequence[str]) -> list[float]:
        """Mean agreement of each caption with the sentences, from 0 to 1. Captions are given as words."""
        texts = [(*words, END) for words in [*captions, *map(tokenize, sentences)]]
        lengths = np.array([len(words) for words in texts])
        # Words are numbered from 1, and n-grams by the numbers of their words. 0 is padding.
        numbers = {word: number for number, word in enumerate(dict.fromkeys(chain.from_iterable(texts)), start=1)}
        rarity = np.array([0.0, *(math.log(1 + self.ranks.get(word, len(self.ranks))) for word in numbers)])
        words = np.zeros((len(texts), lengths.max(initial=0) + LONGEST - 1), np.int64)
        for row, text in zip(words, texts, strict=True):
            row[: len(text)] = [numbers[word] for word in text]
        total = np.zeros((len(captions), len(sentences)))
        for length in range(1, LONGEST + 1):
            vectors = _vectors(words, rarity, lengths, length)
            mine, theirs = vectors[: len(captions), None], vectors[None, len(captions) :]
            total += (np.minimum(mine, theirs) * theirs).sum(axis=2)
        apart = lengths[: len(captions), None] - lengths[None, len(captions) :]
        total *= np.exp(-(apart**2) / (2 * SPREAD**2)) / LONGEST
        agreements: list[float] = (total.sum(axis=1) / max(1, len(sentences))).tolist()
        return agreements


def _vectors(words: np.ndarray, rarity: np.ndarray, lengths: np.ndarray, length: int) -> np.ndarray:
    """(texts, n-grams): unit vectors of the weights of the n-grams of `length` words that occur in any of the texts"""
    windows = np.lib.stride_tricks.sliding_window_view(words, length, axis=1)
    inside = np.arange(windows.shape[1]) <= lengths[:, None] - length
    rows, _ = inside.nonzero()
    grams = windows[inside]
    codes = grams @ len(rarity) ** np.arange(length)
    unique, columns = np.unique(codes, return_inverse=True)
    vectors = np.zeros((len(words), len(unique)))
    np.add.at(vectors, (rows, columns), rarity[grams].sum(axis=1))
    norms = np.sqrt((vectors**2).sum(axis=1, keepdims=True))
    unit: np.ndarray = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit
