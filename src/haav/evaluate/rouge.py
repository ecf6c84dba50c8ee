"""ROUGE-L (Lin 2004) as COCO's tools compute it: best precision and best recall over the references, β = 1.2."""

from __future__ import annotations

from collections.abc import Sequence

from haav.evaluate.ngrams import Caption

BETA = 1.2


def rouge_l(caption: Caption, references: Sequence[Caption]) -> float:
    caption = caption or [""]  # COCO's split gives an empty caption one empty word
    positions: dict[str, int] = {}
    for position, word in enumerate(caption):
        positions[word] = positions.get(word, 0) | (1 << position)
    common = [_longest_common(positions, len(caption), reference or [""]) for reference in references]
    precision = max(common) / len(caption)
    recall = max(length / max(len(reference), 1) for length, reference in zip(common, references, strict=True))
    if not precision or not recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def _longest_common(positions: dict[str, int], length: int, reference: Caption) -> int:
    """Length of the longest common subsequence. The bits of one integer hold a row of the table (Hyyrö 2004)."""
    everything = (1 << length) - 1
    open_places = everything
    for word in reference:
        here = open_places & positions.get(word, 0)
        open_places = ((open_places + here) | (open_places - here)) & everything
    return length - open_places.bit_count()
