"""Build captions from the tokens that a search returns. It needs no torch: `haav.export.portable` uses it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from haav.config import ConfidenceConfig, DecodeConfig
from haav.generate.consensus import Consensus, by_consensus
from haav.inference.confidence import caption_confidence, confidences
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
    sure = confidences(logprobs[: len(texts)], settings).tolist()
    words = tuple(
        Word(
            text,
            tokens[step],
            logprobs[step],
            sure[step],
            None if weights is None else dict(zip(views, weights[step], strict=True)),
        )
        for step, text in enumerate(texts)
    )
    return Caption(" ".join(texts), words, sum(logprobs), caption_confidence(words, None, None, settings))


def agreements_of(
    captions: Sequence[Caption], sentences: Sequence[str], vocabulary: Vocabulary, decode: DecodeConfig
) -> list[float | None]:
    """Agreement of each caption with the nearest of the sentences. None without sentences"""
    nearest = sentences[: decode.consensus_of]
    if not nearest:
        return [None] * len(captions)
    return [*Consensus(vocabulary)([[word.text for word in caption.words] for caption in captions], nearest)]


def choose_captions(
    captions: Sequence[Caption],
    sentences: Sequence[str],
    novelty: float | None,
    n_best: int,
    vocabulary: Vocabulary,
    decode: DecodeConfig,
    settings: ConfidenceConfig,
) -> Caption:
    """The best of the captions that a search found for one photo, with the next best in its `n_best`.

    `sentences`: those retrieved for the photo, nearest first; `novelty`: of the photo, None if unknown
    """
    agreements = agreements_of(captions, sentences, vocabulary, decode)
    unfamiliar = novelty is not None and 0 < settings.unfamiliar_above < novelty
    judged = [
        replace(
            caption, confidence=caption_confidence(caption.words, agreement, novelty, settings), unfamiliar=unfamiliar
        )
        for caption, agreement in zip(captions, agreements, strict=True)
    ]
    best, *others = by_consensus(judged, agreements, decode)[:n_best]
    return replace(best, n_best=tuple(others))
