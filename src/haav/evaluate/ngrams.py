"""Captions as counted n-grams in arrays: what BLEU and CIDEr are made of.

An n-gram is known by a number: `4 · place + n - 1`, so that `number & 3` tells its order. The numbers are given
by chaining: an n-gram is its first n - 1 words' number and its last word, found in a sorted table. Nothing is
hashed, and any vocabulary fits.
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
    """How often each n-gram occurs in each caption: rows sorted by caption, then n-gram."""

    captions: int
    caption: Ints
    gram: Ints
    count: Ints
    words: Ints
    """(captions,): length of each"""

    @property
    def order(self) -> Ints:
        """0 for single words … 3"""
        return self.gram & (ORDERS - 1)

    def sums(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Sum a value of each row by caption and order: (captions, 4)"""
        cells = self.caption * ORDERS + self.order
        sums = np.bincount(cells, weights=values, minlength=self.captions * ORDERS)
        return sums.astype(np.float64, copy=False).reshape(-1, ORDERS)


class NgramTable:
    """Numbers the n-grams of some captions; others that it meets later get numbers above them."""

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
        left = np.arange(len(flat)) - np.repeat(np.cumsum(words) - words, words)  # words before each, in its caption
        numbers, rows = flat, [np.stack([owner, flat * ORDERS])]
        for order in range(1, ORDERS):
            # Each n-gram ends at a word with at least n - 1 before it.
            ends = np.flatnonzero(left >= order)
            keys = np.zeros(len(flat), dtype=np.int64)
            keys[ends] = (numbers[ends - 1] << 31) | flat[ends]
            if learn:
                self.tables.append(np.unique(keys[ends]))
            numbers = np.zeros(len(flat), dtype=np.int64)
            numbers[ends] = _places(self.tables[order - 1], keys[ends])
            rows.append(np.stack([owner[ends], numbers[ends] * ORDERS + order]))
        caption, gram = np.concatenate(rows, axis=1)
        order_of_rows = np.lexsort((gram, caption))
        caption, gram = caption[order_of_rows], gram[order_of_rows]
        first = np.flatnonzero(np.diff(caption, prepend=-1) | np.diff(gram, prepend=-1))
        count = np.diff(first, append=len(caption))
        return Counts(len(captions), caption[first], gram[first], count, words)


def _places(table: Ints, keys: Ints) -> Ints:
    """Where each key stands in the sorted table; keys that are not in it get places behind its end."""
    places = np.searchsorted(table, keys)
    strange = np.ones(len(keys), dtype=bool)
    inside = places < len(table)
    strange[inside] = table[places[inside]] != keys[inside]
    if strange.any():
        places[strange] = len(table) + np.unique(keys[strange], return_inverse=True)[1]
    return places.astype(np.int64)
