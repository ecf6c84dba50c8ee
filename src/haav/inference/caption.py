"""Build captions from the tokens that a search returns. It needs no torch: `haav.export.portable` uses it too."""

from __future__ import annotations

from collections.abc import Sequence

from haav.config import ConfidenceConfig
from haav.inference.confidence import confidence
from haav.text import PAD, Vocabulary
from haav.types import Caption, Word


def build_caption(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    weights: Sequence[Sequence[float]] | None,
    views: Sequence[str],
    vocabulary: Vocabulary,
    settings: ConfidenceConfig,
) -> Caption:
    """`tokens` end with <eos>, then <pad>. `weights`: for each token, the weight of each of `views`"""
    tokens = [token for token in tokens if token != PAD]
    texts = vocabulary.decode(tokens)
    words = tuple(
        Word(
            text,
            tokens[step],
            logprobs[step],
            confidence(logprobs[step], settings),
            None if weights is None else dict(zip(views, weights[step], strict=True)),
        )
        for step, text in enumerate(texts)
    )
    mean = sum(word.confidence for word in words) / len(words) if words else 0.0
    return Caption(" ".join(texts), words, sum(logprobs), mean)
