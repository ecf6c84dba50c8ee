"""Statistics of wording that need no references: variety, length and typical errors of captioning models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from haav.evaluate.ngrams import Caption
from haav.text import DANGLING


def wording(captions: Sequence[Caption]) -> dict[str, float]:
    """Shares are of captions unless stated otherwise. All values are 0 if there are no captions."""
    count = max(len(captions), 1)
    words = list(chain.from_iterable(captions))
    pairs = [pair for caption in captions for pair in pairwise(caption)]
    return {
        "words a caption": len(words) / count,
        "vocabulary used": len(set(words)),
        "distinct captions": len({tuple(caption) for caption in captions}) / count,
        "distinct-1": len(set(words)) / max(len(words), 1),  # share of words, not of captions
        "distinct-2": len(set(pairs)) / max(len(pairs), 1),
        "truncated": sum(bool(caption) and caption[-1] in DANGLING for caption in captions) / count,
        "repetitive": sum(map(_repeats, captions)) / count,
        "empty": sum(not caption for caption in captions) / count,
    }


def _repeats(caption: Caption) -> bool:
    """Whether a word directly follows itself, or a sequence of three words occurs twice"""
    triples = list(zip(caption, caption[1:], caption[2:], strict=False))
    return any(first == second for first, second in pairwise(caption)) or len(set(triples)) < len(triples)
