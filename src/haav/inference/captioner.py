"""A model with its words: views in, captions with their view weights out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from haav.config import Config, override
from haav.data.collate import collate
from haav.errors import ConfigError, unknown
from haav.generate.build import build_rules, build_strategy, demanded, forbidden
from haav.generate.consensus import by_consensus
from haav.generate.loop import Generated, collapse_repeats, generate
from haav.inference.confidence import confidence
from haav.inference.parallel import side_by_side
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.photos.images import Picture, load_image
from haav.pretrained import find_model, load_pretrained, save_pretrained
from haav.provenance import accepted_by_all
from haav.text import PAD, Vocabulary
from haav.types import Caption, EncodedViews, PhotoView, Views, Word
from haav.views.live import Eyes

Part = TypeVar("Part")
Result = TypeVar("Result")


def load(model: str | Path = "best", device: torch.device | str = "cpu", **options: Any) -> Captioner:
    """The captioner that is shipped, or that of a model directory.

    >>> import haav                                            # doctest: +SKIP
    >>> haav.load().caption("photo.jpg").text                  # doctest: +SKIP
    'a dog laying down beside a little couch'
    """
    return Captioner.from_pretrained(model, device, **options)


class Captioner:
    """
    >>> captioner = Captioner.from_pretrained("my-model")      # doctest: +SKIP
    >>> captioner.caption("photo.jpg").text                    # doctest: +SKIP
    'a dog laying down beside a little couch'

    Nothing in it changes while it works: any number of threads may use one.
    """

    def __init__(
        self, model: Haav | Ensemble, config: Config, vocabulary: Vocabulary, eyes: Eyes | None = None
    ) -> None:
        """`eyes`: what photos are looked at with; without, it captions views only"""
        if len(vocabulary) != config.model.vocabulary_size:
            raise ConfigError(f"the vocabulary has {len(vocabulary)} words, the model {config.model.vocabulary_size}.")
        self.model = model.eval()
        self.config = config
        self.vocabulary = vocabulary
        self.eyes = eyes
        self.joined = False
        """made of several saved models: no one config describes it"""

    @classmethod
    def from_pretrained(cls, directory: str | Path, device: torch.device | str = "cpu", **options: Any) -> Captioner:
        """`options`: of the extractors of its views, e.g. `clip_model`"""
        directory = find_model(directory)
        model, config, vocabulary = load_pretrained(directory, device)
        options = {"device": str(device)} | options
        return cls(model, config, vocabulary, Eyes(config.model.views, directory, config.made_by, **options))

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
        made_by = accepted_by_all([captioner.config.made_by for captioner in captioners])
        model = replace(first.config.model, max_words=most)
        config = replace(first.config, model=model, decode=decode, made_by=made_by)
        eyes = [captioner.eyes for captioner in captioners if captioner.eyes is not None]
        together = Eyes.together(eyes) if len(eyes) == len(captioners) else None
        joined = cls(Ensemble([captioner.model for captioner in captioners]), config, first.vocabulary, together)
        joined.joined = True
        return joined

    def with_config(self, config: Config) -> Captioner:
        """The same model with other settings"""
        changed = Captioner(self.model, config, self.vocabulary, self.eyes)
        changed.joined = self.joined
        return changed

    @property
    def views(self) -> tuple[str, ...]:
        """The views it reads, by name"""
        return tuple(dict.fromkeys(name for member in self.model.members for name in member.encoding.embed.names))

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype = torch.float32) -> None:
        if self.joined:
            raise ConfigError("an ensemble of several models cannot be saved as one; save each, and join them again.")
        save_pretrained(directory, self.model, self.config, self.vocabulary, dtype)

    def caption(
        self,
        photos: Picture | Sequence[Picture],
        *,
        views: Sequence[str] | None = None,
        batch: int = 8,
        **options: Any,
    ) -> Any:
        """The caption of a photo, or a list of captions of a list of them: paths, bytes, PIL images or arrays.

        `views`: only these of the model's; `options`: as `caption_views` takes them.
        """
        if isinstance(photos, (str, Path, bytes, Image.Image, np.ndarray)):
            return self.caption([photos], views=views, **options)[0]

        def work(at: int, seed: int | None) -> list[Caption]:
            images = [load_image(photo) for photo in photos[at : at + batch]]
            return self.caption_seen(self.look(images, views), seed=seed, **options)

        parts = range(0, len(photos), batch)
        return list(chain.from_iterable(self.side_by_side(work, parts, options.pop("seed", None), **options)))

    def side_by_side(
        self, work: Callable[[Part, int | None], Result], parts: Iterable[Part], seed: int | None, **settings: Any
    ) -> Iterator[Result]:
        """`work` of each part and of a seed of its own, in order: at once where the model is on the CPU.

        Samples without a seed follow torch's own random numbers, whichever part comes first.
        """
        if seed is None and settings.get("method", self.config.decode.method) == "sample":
            seed = int(torch.randint(2**31, ()))
        seeded = ((part, None if seed is None else seed + number) for number, part in enumerate(parts))
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        return (side_by_side if on_cpu else map)(lambda part: work(*part), seeded)

    def look(self, images: Sequence[Image.Image], views: Sequence[str] | None = None) -> dict[str, list[PhotoView]]:
        """Upright RGB pictures → the model's views of them, or those that are named"""
        if self.eyes is None:
            raise ConfigError("this captioner was made without eyes; load it from a model directory.")
        for name in views or ():
            if name not in self.views:
                raise ConfigError(unknown("view", name, self.views))
        return self.eyes(images, [name for name in self.views if views is None or name in views])

    def caption_seen(self, seen: Mapping[str, Sequence[PhotoView]], **options: Any) -> list[Caption]:
        """Captions of photos by their views as `look` gives them"""
        photos = len(next(iter(seen.values()))) if seen else 0
        return self.caption_views(collate([""] * photos, seen).views, **options)

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
        sentences = _sentences(views, self.views) if decode.consensus else None
        strategy = build_strategy(decode, self.vocabulary, must, None if sentences else n_best, generator)
        rules = build_rules(decode, self.vocabulary, never)
        with torch.no_grad():
            encoded = self.model.encode({name: view.to(device) for name, view in views.items()})
            found = generate(self.model, encoded, strategy, rules, decode.max_words)
        names = encoded.names if isinstance(encoded, EncodedViews) else ()
        if decode.collapse_repeats:
            found = collapse_repeats(found)
        found = found.cpu()
        captions = []
        for photo in range(len(found.tokens)):
            possible = self._captions(found, photo, names)
            best = by_consensus(possible, sentences[photo] if sentences else (), self.vocabulary, decode)[:n_best]
            captions.append(replace(best[0], n_best=tuple(best[1:])))
        return captions

    def _captions(self, found: Generated, photo: int, names: tuple[str, ...]) -> list[Caption]:
        captions = (self._caption(found, photo, rank, names) for rank in range(found.tokens.shape[1]))
        possible = [caption for caption in captions if caption.logprob > -math.inf]
        if not possible:
            raise ConfigError(
                "no caption says all that must be said within max_words and the other rules.\n"
                "  Demand fewer words, forbid fewer, or raise decode.max_words."
            )
        return possible

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


def _sentences(views: Views, order: Sequence[str]) -> Sequence[Sequence[str]] | None:
    """What was retrieved for each photo, nearest first, if a view says it: one whose tokens have a rank and a text"""
    for name in order:
        view = views.get(name)
        if view is not None and view.labels is not None and "rank" in view.indices:
            return view.labels
    return None
