"""A model with its words: views in, captions with their view weights out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from haav.calibrate import confidence
from haav.config import Config, override
from haav.errors import ConfigError
from haav.generate import (
    Generated,
    build_rules,
    build_strategy,
    collapse_repeats,
    demanded,
    forbidden,
    generate,
)
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.pretrained import load_pretrained, save_pretrained
from haav.text import PAD, Vocabulary
from haav.types import Caption, Views, Word


class Captioner:
    """
    >>> captioner = Captioner.from_pretrained("my-model")      # doctest: +SKIP
    >>> captioner.caption_views(views)[0].text                 # doctest: +SKIP
    'a dog laying down beside a little couch'
    """

    def __init__(self, model: Haav | Ensemble, config: Config, vocabulary: Vocabulary) -> None:
        if len(vocabulary) != config.model.vocabulary_size:
            raise ConfigError(f"the vocabulary has {len(vocabulary)} words, the model {config.model.vocabulary_size}.")
        self.model = model.eval()
        self.config = config
        self.vocabulary = vocabulary
        self.joined = False
        """made of several saved models: no one config describes it"""

    @classmethod
    def from_pretrained(cls, directory: str | Path, device: torch.device | str = "cpu") -> Captioner:
        return cls(*load_pretrained(directory, device))

    @classmethod
    def ensemble(cls, captioners: Sequence[Captioner]) -> Captioner:
        """One captioner that averages the word probabilities of several; they need the same words, not the same views.

        Decode settings and confidence are the first one's.
        """
        if not captioners:
            raise ConfigError("an ensemble needs at least one model.")
        first, *others = captioners
        if not others:
            return first
        for other in others:
            if other.vocabulary != first.vocabulary:
                raise ConfigError(
                    f"an ensemble needs one vocabulary; these have {len(first.vocabulary):,} and "
                    f"{len(other.vocabulary):,} words, or other words at the same places."
                )
        most = min(captioner.config.model.max_words for captioner in captioners)
        decode = first.config.decode
        decode = replace(decode, max_words=min(decode.max_words, most), min_words=min(decode.min_words, most - 1))
        config = replace(first.config, model=replace(first.config.model, max_words=most), decode=decode)
        joined = cls(Ensemble([captioner.model for captioner in captioners]), config, first.vocabulary)
        joined.joined = True
        return joined

    @property
    def views(self) -> tuple[str, ...]:
        """The views it reads, by name"""
        return tuple(dict.fromkeys(name for member in self.model.members for name in member.encoding.embed.names))

    def save_pretrained(self, directory: str | Path) -> None:
        if self.joined:
            raise ConfigError("an ensemble of several models cannot be saved as one; save each, and join them again.")
        save_pretrained(directory, self.model, self.config, self.vocabulary)

    def caption_views(
        self,
        views: Views,
        *,
        must: Sequence[str] = (),
        never: Sequence[str] = (),
        n_best: int = 1,
        seed: int | None = None,
        **settings: Any,
    ) -> list[Caption]:
        """A caption for each photo of the batch; the next `n_best` - 1 in its `n_best`.

        `must` and `never`: words that are said or not ("dog|puppy": one of them); `seed`: of samples;
        `settings`: any of the decode settings, e.g. `beam=1`, `method="sample"`.
        """
        decode = override(self.config, "decode", settings).decode if settings else self.config.decode
        if n_best < 1:
            raise ConfigError(f"n_best must be at least 1, not {n_best}.")
        source = "samples" if decode.method == "sample" else "beam"
        if n_best > getattr(decode, source):
            raise ConfigError(
                f"{n_best} captions a photo need decode.{source} of at least {n_best}, not {getattr(decode, source)}."
            )
        banned = set(forbidden(never, self.vocabulary))
        for choices in demanded(must, self.vocabulary):
            if banned.issuperset(choices):
                word = self.vocabulary.words[choices[0]]
                raise ConfigError(f"'{word}' cannot be demanded and forbidden at once.")
        device = next(self.model.parameters()).device
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        strategy = build_strategy(decode, self.vocabulary, must, n_best, generator)
        rules = build_rules(decode, self.vocabulary, never)
        with torch.no_grad():
            encoded = self.model.encode({name: view.to(device) for name, view in views.items()})
            found = generate(self.model, encoded, strategy, rules, decode.max_words)
        names = encoded.names if isinstance(self.model, Haav) else ()
        if decode.collapse_repeats:
            found = collapse_repeats(found)
        found = found.cpu()
        return [self._captions(found, photo, names, n_best) for photo in range(len(found.tokens))]

    def _captions(self, found: Generated, photo: int, names: tuple[str, ...], n_best: int) -> Caption:
        captions = (self._caption(found, photo, rank, names) for rank in range(found.tokens.shape[1]))
        possible = [caption for caption in captions if caption.logprob > -math.inf][:n_best]
        if not possible:
            raise ConfigError(
                "no caption says all that must be said within max_words and the other rules.\n"
                "  Demand fewer words, forbid fewer, or raise decode.max_words."
            )
        return replace(possible[0], n_best=tuple(possible[1:]))

    def _caption(self, found: Generated, photo: int, rank: int, names: tuple[str, ...]) -> Caption:
        tokens, logprobs = found.tokens[photo, rank].tolist(), found.logprobs[photo, rank].tolist()
        texts = self.vocabulary.decode([token for token in tokens if token != PAD])
        # What a reader asks of a word: the last decoder layer's trust in each view, mean over heads.
        trust = None if found.weights is None else found.weights[photo, rank, :, -1].float().mean(dim=1).tolist()
        words = tuple(
            Word(
                text,
                logprobs[at],
                confidence(logprobs[at], self.config.confidence),
                None if trust is None else dict(zip(names, trust[at], strict=True)),
            )
            for at, text in enumerate(texts)
        )
        sure = sum(word.confidence for word in words) / len(words) if words else 0.0
        return Caption(" ".join(texts), words, sum(logprobs), sure)
