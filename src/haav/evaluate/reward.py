"""The reward of self-critical training: CIDEr-D against references that were tokenised and weighed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from haav.evaluate.cider import Cider
from haav.evaluate.ptb import tokenize

END = "<end of caption>"
"""a word like any other, which no caption can contain"""


class CiderReward:
    def __init__(
        self, references: Mapping[str, Sequence[str]], end_token: bool = True, per_caption: bool = False
    ) -> None:
        """`references`: captions by photo.

        `end_token`: the end of a caption counts as a word; without it a caption that stops short loses nothing
        (the release's way). `per_caption`: document frequency by caption (the release's) instead of by photo.
        """
        self.end_token, self.per_caption = end_token, per_caption
        self.rows = {photo: number for number, photo in enumerate(references)}
        self.cider = Cider([[self._words(text, True) for text in texts] for texts in references.values()], per_caption)

    @property
    def signature(self) -> str:
        end = "counted" if self.end_token else "not counted"
        return f"CIDEr-D, end of caption {end}, document frequency by {'caption' if self.per_caption else 'photo'}"

    def __call__(
        self, photos: Sequence[str], captions: Sequence[Sequence[str]], ended: Sequence[Sequence[bool]] | None = None
    ) -> NDArray[np.float64]:
        """(B, K) rewards of K captions of each photo; `ended`: whether each came to its end (default: all)"""
        each = [len(texts) for texts in captions]
        rows = np.repeat([self.rows[photo] for photo in photos], each)
        whole = ended if ended is not None else [[True] * size for size in each]
        words = [
            self._words(text, end)
            for texts, ends in zip(captions, whole, strict=True)
            for text, end in zip(texts, ends, strict=True)
        ]
        return self.cider.score(rows, words).reshape(len(photos), -1)

    def _words(self, text: str, ended: bool) -> list[str]:
        words = " ".join(tokenize(text)).split()
        return [*words, END] if self.end_token and ended else words
