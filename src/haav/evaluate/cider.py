"""CIDEr (Vedantam et al. 2015): tf-idf weighted n-gram similarity of a caption to its references.

CIDEr in COCO's tools is CIDEr-D: matches are clipped, and captions are penalised if their length differs from that of
the reference. It is also the reward of self-critical training. References are converted to tf-idf vectors once. Any
number of captions is then scored in a few array operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from haav.evaluate.ngrams import ORDERS, Caption, Counts, Ints, NgramTable

SIGMA = 6.0


class Cider:
    def __init__(self, references: Sequence[Sequence[Caption]], per_caption: bool = False) -> None:
        """`references`: those of each photo. `per_caption`: document frequencies are counted over captions, as in the
        release, instead of over photos."""
        self.references = np.array([len(texts) for texts in references], dtype=np.int64)
        photo = np.repeat(np.arange(len(references)), self.references)
        self.table = NgramTable([text for texts in references for text in texts])
        counts = self.table.counts
        documents = len(photo) if per_caption else len(references)
        owner = counts.caption if per_caption else photo[counts.caption]
        frequency = self._document_frequency(owner, counts.gram)
        self.unseen = math.log(max(documents, 1))
        self.idf = self.unseen - np.log(np.maximum(frequency, 1))
        weights, self.norms = self._vectors(counts)
        self.bigrams = np.maximum(counts.words - 1, 0)
        # Rows are sorted by photo and n-gram, so that one search finds an n-gram in all references of a photo.
        self.key = photo[counts.caption] * self.table.size + counts.gram
        order = np.argsort(self.key, kind="stable")
        self.key, self.weight, self.text = self.key[order], weights[order], counts.caption[order]
        self.first = np.cumsum(self.references) - self.references

    def score(
        self, photos: Sequence[int] | Ints, captions: Sequence[Caption], plain: bool = False
    ) -> NDArray[np.float64]:
        """(N,) scores of captions. `photos` are indices of the photos.

        `plain`: the original CIDEr, without clipping and without the length penalty.
        """
        photo = np.asarray(photos, dtype=np.int64)
        counts = self.table.count(captions)
        weights, norms = self._vectors(counts)
        known = np.flatnonzero(counts.gram < self.table.size)
        wanted = photo[counts.caption[known]] * self.table.size + counts.gram[known]
        low, high = np.searchsorted(self.key, wanted, "left"), np.searchsorted(self.key, wanted, "right")
        matches = high - low
        # One row per n-gram of a caption and reference that contains it.
        row = np.repeat(known, matches)
        match = np.arange(len(row)) + np.repeat(low - (np.cumsum(matches) - matches), matches)
        caption_weight, reference_weight = weights[row], self.weight[match]
        product = (caption_weight if plain else np.minimum(caption_weight, reference_weight)) * reference_weight
        pairs = self.references[photo]
        start = np.cumsum(pairs) - pairs
        pair = start[counts.caption[row]] + self.text[match] - self.first[photo[counts.caption[row]]]
        cells = pair * ORDERS + counts.order[row]
        total = (
            np.bincount(cells, weights=product, minlength=int(pairs.sum()) * ORDERS).reshape(-1, ORDERS).astype(float)
        )
        caption = np.repeat(np.arange(len(captions)), pairs)
        text = np.arange(len(caption)) - start[caption] + self.first[photo[caption]]
        scale = norms[caption] * self.norms[text]
        cosine = np.divide(total, scale, out=np.zeros_like(total), where=scale != 0).mean(axis=1)
        if not plain:
            difference = np.maximum(counts.words - 1, 0)[caption] - self.bigrams[text]
            cosine = cosine * np.exp(-(difference**2) / (2 * SIGMA**2))
        return np.asarray(10 * np.bincount(caption, weights=cosine, minlength=len(captions)) / np.maximum(pairs, 1))

    def similarities(self, captions: Sequence[Caption]) -> NDArray[np.float64]:
        """(captions, photos): original CIDEr of every caption with every photo.

        It is a mean of cosines, so each n-gram that a caption shares with a reference contributes one product.
        """
        counts = self.table.count(captions)
        weights, norms = self._vectors(counts)
        scale = norms[counts.caption, counts.order]
        shares = np.divide(weights, scale, out=np.zeros_like(weights), where=scale != 0)
        photo, gram = np.divmod(self.key, self.table.size)
        order = np.argsort(gram, kind="stable")
        photo, gram, text = photo[order], gram[order], self.text[order]
        scale = self.norms[text, gram & (ORDERS - 1)] * self.references[photo]
        reference_shares = np.divide(self.weight[order], scale, out=np.zeros_like(scale), where=scale != 0)
        known = np.flatnonzero(counts.gram < self.table.size)
        low, high = (np.searchsorted(gram, counts.gram[known], side) for side in ("left", "right"))
        total = np.zeros((len(captions), len(self.references)))
        for caption in range(len(captions)):
            start, stop = np.searchsorted(counts.caption[known], [caption, caption + 1])
            matches = high[start:stop] - low[start:stop]
            row = np.repeat(known[start:stop], matches)
            match = np.arange(len(row)) + np.repeat(low[start:stop] - (np.cumsum(matches) - matches), matches)
            products = shares[row] * reference_shares[match]
            total[caption] = np.bincount(photo[match], weights=products, minlength=len(self.references))
        return 10 * total / ORDERS

    def _vectors(self, counts: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """tf-idf of each n-gram of each caption, and (captions, 4) lengths of the vectors"""
        known = counts.gram < self.table.size
        idf = np.full(len(counts.gram), self.unseen)
        idf[known] = self.idf[counts.gram[known]]
        weights = counts.count * idf
        return weights, np.sqrt(counts.sums(weights**2))

    def _document_frequency(self, document: Ints, gram: Ints) -> Ints:
        distinct = np.unique(document * self.table.size + gram)
        return np.bincount(distinct % max(self.table.size, 1), minlength=self.table.size)
