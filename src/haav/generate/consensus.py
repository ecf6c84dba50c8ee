"""Which of several captions says what the sentences retrieved for a photo say (consensus re-ranking, Devlin 2015).

A search keeps captions that its model finds about equally probable. The sentences retrieved for the photo are a second
opinion that costs nothing: people wrote them of photos that look alike. Agreement is CIDEr-D's: words and sequences of
words in common, rare ones counting more; how rare a word is, its place in the vocabulary says, which is sorted by
frequency.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from haav.config import DecodeConfig
from haav.text import Vocabulary, tokenize
from haav.types import Caption

LONGEST = 4
"""words of the longest sequence that is compared"""
SPREAD = 6.0
"""words of difference in length that matter"""
END = "<eos>"

Grams = dict[tuple[str, ...], float]


def by_consensus(
    captions: Sequence[Caption], sentences: Sequence[str], vocabulary: Vocabulary, settings: DecodeConfig
) -> list[Caption]:
    """Captions sorted by log-probability + `consensus` · agreement; as they came where there are no sentences"""
    if not sentences or not settings.consensus:
        return list(captions)
    told = sentences[: settings.consensus_of]
    agreed = Consensus(vocabulary)([[word.text for word in caption.words] for caption in captions], told)
    total = [caption.logprob + settings.consensus * share for caption, share in zip(captions, agreed, strict=True)]
    return [captions[at] for at in sorted(range(len(total)), key=lambda at: -total[at])]


class Consensus:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ranks = vocabulary.ids

    def __call__(self, captions: Sequence[Sequence[str]], sentences: Sequence[str]) -> list[float]:
        """How far each caption agrees with the sentences, on average: 0 … 1. Captions come as words."""
        others = [self._vectors(tokenize(sentence)) for sentence in sentences]
        found = []
        for words in captions:
            own = self._vectors(words)
            found.append(sum(_alike(own, other) for other in others) / max(1, len(others)))
        return found

    def _vectors(self, words: Sequence[str]) -> tuple[int, list[Grams]]:
        """Its length, and for sequences of 1 … LONGEST words what each weighs"""
        whole = (*words, END)
        rarity = [math.log(1 + self.ranks.get(word, len(self.ranks))) for word in whole]
        vectors: list[Grams] = []
        for length in range(1, LONGEST + 1):
            weights: defaultdict[tuple[str, ...], float] = defaultdict(float)
            for at in range(len(whole) - length + 1):
                weights[whole[at : at + length]] += sum(rarity[at : at + length])
            norm = math.sqrt(sum(weight * weight for weight in weights.values()))
            vectors.append({gram: weight / norm for gram, weight in weights.items()} if norm else {})
        return len(whole), vectors


def _alike(own: tuple[int, list[Grams]], other: tuple[int, list[Grams]]) -> float:
    total = 0.0
    for mine, theirs in zip(own[1], other[1], strict=True):
        total += sum(min(weight, theirs[gram]) * theirs[gram] for gram, weight in mine.items() if gram in theirs)
    return total / LONGEST * math.exp(-((own[0] - other[0]) ** 2) / (2 * SPREAD**2))
