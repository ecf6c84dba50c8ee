"""A model with its vocabulary and extractors: photos or views in, captions with view weights out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TypeVar, cast, overload

import torch
from PIL import Image

from haav.config import Config
from haav.data.collate import collate
from haav.errors import CheckpointError, ConfigError, ImageError, unknown
from haav.generate.backends import Backend, check_backend
from haav.generate.build import build_rules, build_strategy, demanded, forbidden
from haav.generate.loop import Generated, collapse_repeats, generate
from haav.inference.caption import build_caption, choose_captions
from haav.inference.novelty import Novelty, novelties, save_novelty
from haav.inference.options import CaptionOptions, OptionValue
from haav.inference.parallel import side_by_side
from haav.inference.stream import CaptionedPhoto, PhotoItem
from haav.model.check_views import check_views
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.photos.images import Picture, is_picture, load_image, to_jpeg
from haav.pretrained import find_model, load_pretrained, save_pretrained
from haav.provenance import accepted_by_all
from haav.text import Vocabulary
from haav.types import Caption, EncodedViews, PhotoView, Views
from haav.views import ExtractorOptions, check_options
from haav.views.batch_size import fitting_batch
from haav.views.live import ViewExtractors

THUMBNAIL = 320
"""longest side of the photo that a notebook shows with a caption"""
Part = TypeVar("Part")
Result = TypeVar("Result")


def load(
    model: str | Path = "best",
    device: torch.device | str | None = None,
    precision: str | None = None,
    options: ExtractorOptions | None = None,
    backend: str = "auto",
) -> Captioner:
    """Load a shipped captioner or a model directory. The arguments are those of `from_pretrained`.

    >>> import haav                                            # doctest: +SKIP
    >>> print(haav.load().caption("photo.jpg"))                # doctest: +SKIP
    a dog laying down beside a little couch
    """
    return Captioner.from_pretrained(model, device, precision, options, backend)


class Captioner:
    """
    >>> captioner = Captioner.from_pretrained("my-model")      # doctest: +SKIP
    >>> captioner.caption("photo.jpg").text                    # doctest: +SKIP
    'a dog laying down beside a little couch'

    A captioner is immutable while it works, so any number of threads may share one.
    """

    def __init__(
        self,
        model: Haav | Ensemble,
        config: Config,
        vocabulary: Vocabulary,
        extractors: ViewExtractors | None = None,
        novelty: Novelty | None = None,
        backend: Backend | None = None,
    ) -> None:
        """`extractors` compute views of photos. Without them, the captioner accepts views only.

        `novelty` tells pictures that are unlike the training photos. Without it, every picture is taken for typical.
        `backend` computes the words; by default torch does. Another one takes the weights as they are when it starts.
        """
        if len(vocabulary) != config.model.vocabulary_size:
            raise ConfigError(f"the vocabulary has {len(vocabulary)} words, the model {config.model.vocabulary_size}.")
        self.model = model.eval()
        self.config = config
        self.vocabulary = vocabulary
        self.extractors = extractors
        self.novelty = novelty
        self.backend = backend or Backend("torch", model)
        self.name = "the model"
        """what errors call it"""
        self.joined = False
        """True for an ensemble of several saved models, which no single config describes"""

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        device: torch.device | str | None = None,
        precision: str | None = None,
        options: ExtractorOptions | None = None,
        backend: str = "auto",
    ) -> Captioner:
        """Load a model directory, or a shipped model by name.

        `device` is that of the model and of the networks of its views (default: cpu). `precision` is that of these
        networks (auto, float32, bfloat16, int8). `options` are all options of its extractors, such as `clip_model`;
        `device` and `precision` replace theirs.

        `backend` computes the words: torch, onnxruntime, or auto. The captions are the same. auto changes to
        onnxruntime after 20 searches if it is installed and can run the model.
        """
        resolved = options or ExtractorOptions()
        if device is not None:
            resolved = replace(resolved, device=str(device))
        if precision is not None:
            resolved = replace(resolved, precision=precision)
        check_options(resolved)
        check_backend(backend)
        directory = find_model(directory)
        model, config, vocabulary = load_pretrained(directory, resolved.device)
        extractors = ViewExtractors(config.model.views, directory, config.made_by, resolved)
        novelty = Novelty.load(directory, {name: spec.dim for name, spec in config.model.views.items()})
        chosen = Backend(backend, model.requires_grad_(False))
        captioner = cls(model, config, vocabulary, extractors, novelty, chosen)
        captioner.name = f"the model {directory}"
        return captioner

    @classmethod
    def ensemble(cls, captioners: Sequence[Captioner]) -> Captioner:
        """One captioner that averages the word probabilities of several.

        They need the same vocabulary, but not the same views. Decode settings and confidence are those of the first.
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
        parts = [captioner.extractors for captioner in captioners if captioner.extractors is not None]
        together = ViewExtractors.together(parts) if len(parts) == len(captioners) else None
        network = Ensemble([captioner.model for captioner in captioners])
        joined = cls(network, config, first.vocabulary, together, first.novelty, Backend(first.backend.name, network))
        joined.joined = True
        return joined

    def with_config(self, config: Config) -> Captioner:
        """The same model with another config"""
        changed = Captioner(self.model, config, self.vocabulary, self.extractors, self.novelty, self.backend)
        changed.name, changed.joined = self.name, self.joined
        return changed

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the views that the model reads"""
        return tuple(dict.fromkeys(name for member in self.model.members for name in member.encoding.embed.names))

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype = torch.float32) -> None:
        if self.joined:
            raise ConfigError("an ensemble of several models cannot be saved as one; save each, and join them again.")
        save_pretrained(directory, self.model, self.config, self.vocabulary, dtype)
        save_novelty(Path(directory), self.novelty)

    def prepare(self) -> None:
        """Start onnxruntime now, if it is to be used, not in the middle of a later call. It takes half a second."""
        self.backend.prepare()

    @overload
    def caption(  # type: ignore[overload-overlap]  # a text, bytes and an array are iterable, and still one photo
        self,
        photos: Picture,
        options: CaptionOptions | None = None,
        *,
        batch: int | None = None,
        errors: Literal["raise", "return"] = "raise",
        **settings: OptionValue,
    ) -> Caption: ...

    @overload
    def caption(
        self,
        photos: Iterable[Picture],
        options: CaptionOptions | None = None,
        *,
        batch: int | None = None,
        errors: Literal["raise"] = "raise",
        **settings: OptionValue,
    ) -> list[Caption]: ...

    @overload
    def caption(
        self,
        photos: Iterable[Picture],
        options: CaptionOptions | None = None,
        *,
        batch: int | None = None,
        errors: Literal["return"],
        **settings: OptionValue,
    ) -> list[Caption | ImageError]: ...

    def caption(
        self,
        photos: Picture | Iterable[Picture],
        options: CaptionOptions | None = None,
        *,
        batch: int | None = None,
        errors: Literal["raise", "return"] = "raise",
        **settings: OptionValue,
    ) -> Caption | list[Caption] | list[Caption | ImageError]:
        """The caption of one photo, or a list of captions of many.

        A photo is a path, bytes, an open file, a PIL image, an array or a tensor. `options`, or
        `settings` by the names of its fields, control decoding: `caption(photo, beam=3, views="patches")`. With
        `errors="return"`, the list has an `ImageError` for each photo that cannot be read.
        """
        resolved = CaptionOptions.of(options, settings)
        if errors not in ("raise", "return"):
            raise ConfigError(unknown("value of errors", str(errors), ("raise", "return")))
        single = is_picture(photos)
        if single or not isinstance(photos, Iterable) or isinstance(photos, Mapping):
            photos, single = [cast(Picture, photos)], True  # reading it raises an ImageError if it is not a picture
        items = [_item(index, photo) for index, photo in enumerate(cast(Iterable[Picture], photos))]
        results: list[Caption | ImageError] = []
        for photo in self.stream(items, resolved, batch):
            if photo.error is not None and (single or errors == "raise"):
                raise photo.error
            results.append(photo.error if photo.caption is None else _with_thumbnail(photo))  # type: ignore[arg-type]
        return results[0] if single else results  # type: ignore[return-value]

    def stream(
        self, items: Iterable[PhotoItem], options: CaptionOptions | None = None, batch: int | None = None
    ) -> Iterator[CaptionedPhoto]:
        """Caption a stream of photos, in order. Each photo is read, extracted and captioned once.

        Batches run in parallel if the model is on the CPU. By default they have 8 photos, or fewer where memory is
        short. The result of a photo that cannot be read has an error.
        """
        resolved = options or CaptionOptions()
        if batch is not None and batch < 1:
            raise ConfigError(f"a batch has at least 1 photo, not {batch}.")
        size = batch or fitting_batch(str(self.device))
        waiting = iter(items)
        batches = iter(lambda: list(islice(waiting, size)), [])

        def work(part: list[PhotoItem], seed: int | None) -> list[CaptionedPhoto]:
            read = [_read(item) for item in part]
            images = [photo.image for photo in read if photo.image is not None]
            if not images:
                return read
            extracted = self.extract(images, resolved.views)
            captions = iter(self.caption_extracted(extracted, replace(resolved, seed=seed)))
            views = (
                dict(zip(extracted, photo_views, strict=True)) for photo_views in zip(*extracted.values(), strict=True)
            )
            return [
                photo if photo.image is None else replace(photo, views=next(views), caption=next(captions))
                for photo in read
            ]

        return chain.from_iterable(self.side_by_side(work, batches, resolved))

    def side_by_side(
        self, work: Callable[[Part, int | None], Result], parts: Iterable[Part], options: CaptionOptions
    ) -> Iterator[Result]:
        """Yield `work(part, seed)` for each part, in order. Parts run in parallel if the model is on the CPU.

        Each part has its own seed. Without a seed, samples depend on torch's random state, not on the order of parts.
        """
        seed = options.seed
        if seed is None and options.decode(self.config).method == "sample":
            seed = int(torch.randint(2**31, ()))
        seeded = ((part, None if seed is None else seed + index) for index, part in enumerate(parts))
        return (side_by_side if self.device.type == "cpu" else map)(lambda part: work(*part), seeded)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def extract(self, images: Sequence[Image.Image], views: Sequence[str] | None = None) -> dict[str, list[PhotoView]]:
        """Extract the views of upright RGB pictures: all views of the model, or the named ones."""
        if self.extractors is None:
            raise ConfigError("this captioner has no extractors; load it from a model directory.")
        for name in views or ():
            if name not in self.views:
                raise ConfigError(unknown("view", name, self.views))
        return self.extractors.extract(images, [name for name in self.views if views is None or name in views])

    def caption_extracted(
        self, extracted: Mapping[str, Sequence[PhotoView]], options: CaptionOptions | None = None
    ) -> list[Caption]:
        """Caption photos from the views that `extract` returns."""
        photos = len(next(iter(extracted.values()))) if extracted else 0
        return self.caption_views(collate([""] * photos, extracted).views, options)

    def caption_views(
        self, views: Views, options: CaptionOptions | None = None, **settings: OptionValue
    ) -> list[Caption]:
        """One caption for each photo of a batch of views. Further captions are in its `n_best`.

        `options`, or `settings` by the names of its fields, control decoding: `caption_views(views, beam=1)`.
        """
        resolved = CaptionOptions.of(options, settings)
        decode = resolved.decode(self.config)
        banned = set(forbidden(resolved.never, self.vocabulary))
        for choices in demanded(resolved.must, self.vocabulary):
            if banned.issuperset(choices):
                word = self.vocabulary.words[choices[0]]
                raise ConfigError(f"'{word}' cannot be demanded and forbidden at once.")
        generator = None if resolved.seed is None else torch.Generator(self.device).manual_seed(resolved.seed)
        sentences = _sentences(views, self.views)
        ranked = sentences is not None and decode.consensus > 0
        strategy = build_strategy(
            decode, self.vocabulary, resolved.must, None if ranked else resolved.n_best, generator
        )
        rules = build_rules(decode, self.vocabulary, resolved.never, resolved.prefix)
        check_views(self.model, views)
        with torch.no_grad():
            encoded = self.model.encode({name: view.to(self.device) for name, view in views.items()})
            generated = generate(self.backend.next_search(), encoded, strategy, rules, decode.max_words, weighed=1)
        if generated.logprobs.isnan().any():
            raise CheckpointError(
                f"the scores of {self.name} are not finite numbers.\n"
                "  Its weights or views are damaged, or its training diverged. "
                "Copy the model again, or train it again with a lower train.lr."
            )
        names = encoded.names if isinstance(encoded, EncodedViews) else ()
        if decode.collapse_repeats:
            generated = collapse_repeats(generated)
        generated = generated.cpu()
        unlikeness = novelties(self.novelty, views, len(generated.tokens))
        return [
            choose_captions(
                self._captions(generated, photo, names),
                sentences[photo] if sentences else (),
                unlikeness[photo],
                resolved.n_best,
                self.vocabulary,
                decode,
                self.config.confidence,
            )
            for photo in range(len(generated.tokens))
        ]

    def _captions(self, generated: Generated, photo: int, names: tuple[str, ...]) -> list[Caption]:
        captions = (self._caption(generated, photo, rank, names) for rank in range(generated.tokens.shape[1]))
        possible = [caption for caption in captions if caption.logprob > -math.inf]
        if not possible:
            raise ConfigError(
                "no caption says all that must be said within max_words and the other rules.\n"
                "  Demand fewer words, forbid fewer, or raise decode.max_words."
            )
        return possible

    def _caption(self, generated: Generated, photo: int, rank: int, names: tuple[str, ...]) -> Caption:
        # The view weights shown for a word are those of the last decoder layer, mean over heads.
        weights = None
        if generated.weights is not None:
            weights = generated.weights[photo, rank, :, -1].float().mean(dim=1).tolist()
        tokens, logprobs = generated.tokens[photo, rank].tolist(), generated.logprobs[photo, rank].tolist()
        return build_caption(tokens, logprobs, weights, names, self.vocabulary, self.config.confidence)


def _item(index: int, photo: Picture) -> PhotoItem:
    name = str(photo) if isinstance(photo, (str, Path)) else f"photo {index}"
    return PhotoItem(name, lambda: photo)


def _with_thumbnail(photo: CaptionedPhoto) -> Caption:
    assert photo.caption is not None
    assert photo.image is not None
    return replace(photo.caption, thumbnail=to_jpeg(photo.image, THUMBNAIL))


def _read(item: PhotoItem) -> CaptionedPhoto:
    try:
        return CaptionedPhoto(item, load_image(item.read()))
    except ImageError as error:
        return CaptionedPhoto(item, error=error)


def _sentences(views: Views, order: Sequence[str]) -> Sequence[Sequence[str]] | None:
    """Retrieved sentences of each photo, nearest first, from the first view whose tokens have a rank and a text"""
    for name in order:
        view = views.get(name)
        if view is not None and view.labels is not None and "rank" in view.indices:
            return view.labels
    return None
