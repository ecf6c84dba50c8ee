"""A model with its words: views in, captions with their view weights out."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from haav.config import Config
from haav.errors import ConfigError
from haav.generate import Generated, beam_search
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

    @classmethod
    def from_pretrained(cls, directory: str | Path, device: torch.device | str = "cpu") -> Captioner:
        return cls(*load_pretrained(directory, device))

    def save_pretrained(self, directory: str | Path) -> None:
        save_pretrained(directory, self.model, self.config, self.vocabulary)

    def caption_views(self, views: Views, beam: int | None = None, max_words: int | None = None) -> list[Caption]:
        """A caption for each photo of the batch, the other beams in its `n_best`."""
        settings = self.config.decode
        beam = settings.beam if beam is None else beam
        max_words = settings.max_words if max_words is None else max_words
        if beam < 1:
            raise ConfigError(f"beam must be at least 1, not {beam}.")
        if not 1 <= max_words <= self.config.model.max_words:
            raise ConfigError(
                f"max_words is between 1 and {self.config.model.max_words} for this model, not {max_words}."
            )
        device = next(self.model.parameters()).device
        with torch.no_grad():
            encoded = self.model.encode({name: view.to(device) for name, view in views.items()})
            found = beam_search(self.model, encoded, beam, max_words)
        names = encoded.names if isinstance(self.model, Haav) else ()
        return [self._captions(found, photo, names) for photo in range(len(found.tokens))]

    def _captions(self, found: Generated, photo: int, names: tuple[str, ...]) -> Caption:
        beams = (self._caption(found, photo, rank, names) for rank in range(found.tokens.shape[1]))
        # A beam wider than the captions there are is filled with impossible ones.
        best, *others = (caption for caption in beams if caption.logprob > -math.inf)
        return Caption(best.text, best.words, best.logprob, tuple(others))

    def _caption(self, found: Generated, photo: int, rank: int, names: tuple[str, ...]) -> Caption:
        tokens, logprobs = found.tokens[photo, rank].tolist(), found.logprobs[photo, rank].tolist()
        texts = self.vocabulary.decode([token for token in tokens if token != PAD])
        # What a reader asks of a word: the last decoder layer's trust in each view, mean over heads.
        trust = None if found.weights is None else found.weights[photo, rank, :, -1].float().mean(dim=1).tolist()
        words = tuple(
            Word(text, logprobs[at], None if trust is None else dict(zip(names, trust[at], strict=True)))
            for at, text in enumerate(texts)
        )
        return Caption(" ".join(texts), words, sum(logprobs))
