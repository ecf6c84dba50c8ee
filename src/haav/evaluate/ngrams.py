"""N-gram counts of captions in arrays, for BLEU and CIDEr.

The id of an n-gram is `4 · place + n - 1`, so `id & 3` is its order (0 for single words). Places are assigned by
chaining: an n-gram is looked up in a sorted table by the place of its first n - 1 words and the id of its last word.
Nothing is hashed, and any vocabulary fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDERS = 4

Ints = NDArray[np.int64]
Caption = Sequence[str]
"""its words"""


@dataclass(frozen=True)
class Counts:
    """Counts of n-grams in captions. Rows are sorted by caption, then by n-gram."""

    captions: int
    caption: Ints
    gram: Ints
    count: Ints
    words: Ints
    """(captions,): length of each caption"""

    @property
    def order(self) -> Ints:
        """0 for single words … 3"""
        return self.gram & (ORDERS - 1)

    def sums(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Sums of values of rows by caption and order: (captions, 4)"""
        cells = self.caption * ORDERS + self.order
        sums = np.bincount(cells, weights=values, minlength=self.captions * ORDERS)
        return sums.astype(np.float64, copy=False).reshape(-1, ORDERS)


class NgramTable:
    """Assigns ids to the n-grams of some captions. N-grams that are met later get higher ids."""

    def __init__(self, captions: Sequence[Caption]) -> None:
        self.word_ids: dict[str, int] = {}
        self.tables: list[Ints] = []
        self.counts = self._count(captions, learn=True)
        self.size = 1 + int(self.counts.gram.max(initial=-1))

    def count(self, captions: Sequence[Caption]) -> Counts:
        return self._count(captions, learn=False)

    def _count(self, captions: Sequence[Caption], learn: bool) -> Counts:
        words = np.array([len(caption) for caption in captions], dtype=np.int64)
        ids = self.word_ids if learn else dict(self.word_ids)  # new words are numbered for this call only
        flat = np.array([ids.setdefault(word, len(ids)) for caption in captions for word in caption], dtype=np.int64)
        owner = np.repeat(np.arange(len(captions)), words)
        left = np.arange(len(flat)) - np.repeat(np.cumsum(words) - words, words)  # words before it in its caption
        gram_ids, rows = flat, [np.stack([owner, flat * ORDERS])]
        for order in range(1, ORDERS):
            # An n-gram ends at a word with at least n - 1 words before it.
            ends = np.flatnonzero(left >= order)
            keys = np.zeros(len(flat), dtype=np.int64)
            keys[ends] = (gram_ids[ends - 1] << 31) | flat[ends]
            if learn:
                self.tables.append(np.unique(keys[ends]))
            gram_ids = np.zeros(len(flat), dtype=np.int64)
            gram_ids[ends] = _places(self.tables[order - 1], keys[ends])
            rows.append(np.stack([owner[ends], gram_ids[ends] * ORDERS + order]))
        caption, gram = np.concatenate(rows, axis=1)
        order_of_rows = np.lexsort((gram, caption))
        caption, gram = caption[order_of_rows], gram[order_of_rows]
        first = np.flatnonzero(np.diff(caption, prepend=-1) | np.diff(gram, prepend=-1))
        count = np.diff(first, append=len(caption))
        return Counts(len(captions), caption[first], gram[first], count, words)


def _places(table: Ints, keys: Ints) -> Ints:
    """Place of each key in the sorted table. Keys that are not in it get places after its end."""
    places = np.searchsorted(table, keys)
    strange = np.ones(len(keys), dtype=bool)
    inside = places < len(table)
    strange[inside] = table[places[inside]] != keys[inside]
    if strange.any():
        places[strange] = len(table) + np.unique(keys[strange], return_inverse=True)[1]
    return places.astype(np.int64)
