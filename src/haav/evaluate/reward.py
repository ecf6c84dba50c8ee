"""Reward of self-critical training: CIDEr-D against references that are tokenised and weighted once.

CIDEr alone teaches captions that fit many photos a little. `distinct` subtracts the CIDEr-D that a caption would earn
for similar photos, so that words that tell a photo from its neighbours earn more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from haav.evaluate.cider import Cider
from haav.evaluate.ptb import tokenize

END = "<end of caption>"
"""an ordinary word to CIDEr, which no caption can contain"""
SIMILAR = 5
"""similar photos that a caption is compared with"""


class CiderReward:
    def __init__(
        self,
        references: Mapping[str, Sequence[str]],
        end_token: bool = True,
        per_caption: bool = False,
        distinct: float = 0.0,
    ) -> None:
        """`references`: captions by photo; `distinct`: weight of the mean CIDEr-D for similar photos, subtracted.

        `end_token`: the end of a caption counts as a word. Without it, as in the release, a truncated caption loses
        nothing. `per_caption`: document frequency by caption, as in the release, instead of by photo.
        """
        self.end_token, self.per_caption, self.distinct = end_token, per_caption, distinct
        self.rows = {photo: row for row, photo in enumerate(references)}
        words = [[self._words(text, True) for text in texts] for texts in references.values()]
        self.cider = Cider(words, per_caption)
        self.similar = similar_photos(words, SIMILAR) if distinct else None

    @property
    def signature(self) -> str:
        end = "counted" if self.end_token else "not counted"
        less = f", less {self.distinct:g} × that of {SIMILAR} similar photos" if self.distinct else ""
        return (
            f"CIDEr-D, end of caption {end}, document frequency by {'caption' if self.per_caption else 'photo'}{less}"
        )

    def __call__(
        self, photos: Sequence[str], captions: Sequence[Sequence[str]], ended: Sequence[Sequence[bool]] | None = None
    ) -> NDArray[np.float64]:
        """(B, K) rewards of K captions per photo. `ended`: whether each caption is complete (default: all)"""
        sizes = [len(texts) for texts in captions]
        rows = np.repeat([self.rows[photo] for photo in photos], sizes)
        whole = ended if ended is not None else [[True] * size for size in sizes]
        words = [
            self._words(text, end)
            for texts, ends in zip(captions, whole, strict=True)
            for text, end in zip(texts, ends, strict=True)
        ]
        scores = self.cider.score(rows, words)
        if self.similar is not None and self.similar.size:
            # Each caption is scored for every similar photo of its own photo.
            others = self.similar[rows]
            repeated = [text for text in words for _ in range(others.shape[1])]
            scores = scores - self.distinct * self.cider.score(others.ravel(), repeated).reshape(others.shape).mean(
                axis=1
            )
        return scores.reshape(len(photos), -1)

    def _words(self, text: str, ended: bool) -> list[str]:
        words = " ".join(tokenize(text)).split()
        return [*words, END] if self.end_token and ended else words


def similar_photos(references: Sequence[Sequence[Sequence[str]]], count: int, chunk: int = 1024) -> NDArray[np.int64]:
    """(photos, count): the other photos whose references are most alike, by tf-idf of their words, best first"""
    words = {word: column for column, word in enumerate(sorted({w for texts in references for t in texts for w in t}))}
    matrix = np.zeros((len(references), len(words)), dtype=np.float32)
    for row, texts in enumerate(references):
        for text in texts:
            for word in text:
                matrix[row, words[word]] += 1
    matrix *= np.log(len(references) / np.maximum((matrix > 0).sum(axis=0), 1)).astype(np.float32)
    matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
    count = min(count, len(references) - 1)
    nearest = np.empty((len(references), count), dtype=np.int64)
    for start in range(0, len(references), chunk):
        alike = matrix[start : start + chunk] @ matrix.T
        own = np.arange(len(alike))
        alike[own, start + own] = -np.inf
        best = np.argpartition(-alike, count - 1, axis=1)[:, :count] if count else nearest[start : start + chunk]
        order = np.argsort(-np.take_along_axis(alike, best, axis=1), axis=1, kind="stable")
        nearest[start : start + chunk] = np.take_along_axis(best, order, axis=1)
    return nearest
