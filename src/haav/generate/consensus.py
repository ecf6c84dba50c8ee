"""Re-rank captions by agreement with the sentences retrieved for a photo (consensus re-ranking, Devlin 2015).

A search returns captions that the model finds about equally probable. The retrieved sentences are a second opinion at
no extra cost: people wrote them for similar photos. Agreement is computed as in CIDEr-D, from shared n-grams. Rare
words count more. The rarity of a word is derived from its rank in the vocabulary, which is sorted by frequency.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from haav.config import DecodeConfig
from haav.text import Vocabulary, tokenize
from haav.types import Caption

LONGEST = 4
"""length of the longest n-grams that are compared"""
SPREAD = 6.0
"""standard deviation of the length penalty, in words"""
END = "<eos>"

Grams = dict[tuple[str, ...], float]


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
        others = [self._vectors(tokenize(sentence)) for sentence in sentences]
        agreements = []
        for words in captions:
            vectors = self._vectors(words)
            agreements.append(sum(_alike(vectors, other) for other in others) / max(1, len(others)))
        return agreements

    def _vectors(self, words: Sequence[str]) -> tuple[int, list[Grams]]:
        """The length of a caption, and the weights of its n-grams for n = 1 … LONGEST"""
        whole = (*words, END)
        rarity = [math.log(1 + self.ranks.get(word, len(self.ranks))) for word in whole]
        vectors: list[Grams] = []
        for length in range(1, LONGEST + 1):
            weights: defaultdict[tuple[str, ...], float] = defaultdict(float)
            for start in range(len(whole) - length + 1):
                weights[whole[start : start + length]] += sum(rarity[start : start + length])
            norm = math.sqrt(sum(weight * weight for weight in weights.values()))
            vectors.append({gram: weight / norm for gram, weight in weights.items()} if norm else {})
        return len(whole), vectors


def _alike(caption: tuple[int, list[Grams]], sentence: tuple[int, list[Grams]]) -> float:
    total = 0.0
    for mine, theirs in zip(caption[1], sentence[1], strict=True):
        total += sum(min(weight, theirs[gram]) * theirs[gram] for gram, weight in mine.items() if gram in theirs)
    return total / LONGEST * math.exp(-((caption[0] - sentence[0]) ** 2) / (2 * SPREAD**2))
