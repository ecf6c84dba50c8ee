"""How captions are worded, whatever they are about: variety, length, and the ways in which captioners go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from haav.evaluate.ngrams import Caption
from haav.text import DANGLING


def wording(captions: Sequence[Caption]) -> dict[str, float]:
    """Shares are of captions unless said otherwise; all are 0 where there are no captions."""
    count = max(len(captions), 1)
    words = list(chain.from_iterable(captions))
    pairs = [pair for caption in captions for pair in pairwise(caption)]
    return {
        "words a caption": len(words) / count,
        "vocabulary used": len(set(words)),
        "distinct captions": len({tuple(caption) for caption in captions}) / count,
        "distinct-1": len(set(words)) / max(len(words), 1),  # of the words said, not of captions
        "distinct-2": len(set(pairs)) / max(len(pairs), 1),
        "truncated": sum(bool(caption) and caption[-1] in DANGLING for caption in captions) / count,
        "repetitive": sum(map(_repeats, captions)) / count,
        "empty": sum(not caption for caption in captions) / count,
    }


def _repeats(caption: Caption) -> bool:
    """A word right after itself, or three words in a row twice"""
    triples = list(zip(caption, caption[1:], caption[2:], strict=False))
    return any(first == second for first, second in pairwise(caption)) or len(set(triples)) < len(triples)
