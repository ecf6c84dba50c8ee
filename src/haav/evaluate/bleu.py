"""BLEU-1 … 4 (Papineni et al. 2002) of a corpus, with closest reference length, as COCO's tools compute it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from haav.evaluate.ngrams import ORDERS, Counts, Ints

SMALL, TINY = 1e-9, 1e-15
"""COCO's constants: a corpus without any match scores slightly above 0"""


def bleu_stats(captions: Counts, references: Counts, photo: Ints) -> NDArray[np.float64]:
    """(N, 10): clipped matches by order, n-grams by order, length, and length of the closest reference.

    `photo` is the index of the caption that each reference belongs to, in ascending order.
    """
    # Matches are clipped at the highest count in any reference.
    keys, most = _most(photo[references.caption], references.gram, references.count)
    reference_counts = _lookup(keys, most, captions.caption, captions.gram)
    said = np.maximum(captions.words[:, None] - np.arange(ORDERS), 0)
    return np.concatenate(
        [
            captions.sums(np.minimum(reference_counts, captions.count)),
            said,
            captions.words[:, None],
            _closest(captions.words, references.words, photo)[:, None],
        ],
        axis=1,
    )


def bleu(stats: NDArray[Any]) -> NDArray[np.float64]:
    """(…, 10) sums of statistics → (…, 4)"""
    matched, said = stats[..., :ORDERS], stats[..., ORDERS : 2 * ORDERS]
    product = np.cumprod((matched + TINY) / (said + SMALL), axis=-1)
    ratio = (stats[..., 8] + TINY) / (stats[..., 9] + SMALL)
    brevity = np.exp(np.minimum(0.0, 1 - 1 / ratio))
    return np.asarray(product ** (1 / np.arange(1, ORDERS + 1)) * brevity[..., None])


def _most(photo: Ints, gram: Ints, count: Ints) -> tuple[tuple[Ints, Ints], Ints]:
    """The n-grams of each photo, and the highest count of each in any of its references"""
    order = np.lexsort((gram, photo))
    photo, gram, count = photo[order], gram[order], count[order]
    first = np.flatnonzero(np.diff(photo, prepend=-1) | np.diff(gram, prepend=-1))
    return (photo[first], gram[first]), np.maximum.reduceat(count, first) if len(first) else count


def _lookup(keys: tuple[Ints, Ints], values: Ints, photo: Ints, gram: Ints) -> Ints:
    """Values of (photo, n-gram) pairs in a sorted table, 0 if a pair is not in it"""
    width = 1 + max(int(keys[1].max(initial=0)), int(gram.max(initial=0)))
    table, wanted = keys[0] * width + keys[1], photo * width + gram
    places = np.minimum(np.searchsorted(table, wanted), max(len(table) - 1, 0))
    if not len(table):
        return np.zeros(len(wanted), dtype=np.int64)
    return np.where(table[places] == wanted, values[places], 0)


def _closest(words: Ints, references: Ints, photo: Ints) -> Ints:
    """Reference length closest to that of each caption. Of two that are equally close, the shorter."""
    order = np.lexsort((references, np.abs(references - words[photo]), photo))
    first = np.flatnonzero(np.diff(photo[order], prepend=-1))
    return references[order][first]
