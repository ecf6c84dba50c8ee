"""Reward of self-critical training: CIDEr-D against references that are tokenised and weighted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from haav.evaluate.cider import Cider
from haav.evaluate.ptb import tokenize

END = "<end of caption>"
"""an ordinary word to CIDEr, which no caption can contain"""


class CiderReward:
    def __init__(
        self, references: Mapping[str, Sequence[str]], end_token: bool = True, per_caption: bool = False
    ) -> None:
        """`references`: captions by photo.

        `end_token`: the end of a caption counts as a word. Without it, as in the release, a truncated caption loses
        nothing. `per_caption`: document frequency by caption, as in the release, instead of by photo.
        """
        self.end_token, self.per_caption = end_token, per_caption
        self.rows = {photo: row for row, photo in enumerate(references)}
        self.cider = Cider([[self._words(text, True) for text in texts] for texts in references.values()], per_caption)

    @property
    def signature(self) -> str:
        end = "counted" if self.end_token else "not counted"
        return f"CIDEr-D, end of caption {end}, document frequency by {'caption' if self.per_caption else 'photo'}"

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
        return self.cider.score(rows, words).reshape(len(photos), -1)

    def _words(self, text: str, ended: bool) -> list[str]:
        words = " ".join(tokenize(text)).split()
        return [*words, END] if self.end_token and ended else words
