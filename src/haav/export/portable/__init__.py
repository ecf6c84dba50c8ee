"""A captioner that needs numpy and onnxruntime, but not torch. It runs what `haav export` writes.

    python -m haav.export.portable EXPORTED photo.jpg …

The captions are identical to those of the exported model (tests/export/test_export.py). Decoding is plain beam search
with its rules. Sampling, required words and groups are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
from PIL import Image

from haav.config import MAX_CAPTIONS, ConfidenceConfig, DecodeConfig
from haav.errors import CheckpointError, ConfigError
from haav.export.portable.search import Hypothesis, Search
from haav.export.portable.views import SENTENCES, Arrays, PortableExtractors, session
from haav.files import json_of
from haav.inference.caption import build_caption, choose_captions
from haav.inference.novelty import Novelty, summarise
from haav.photos.images import Picture, is_picture, load_image
from haav.text import Vocabulary
from haav.types import Caption

FORMAT = "haav-portable-3"
ABOUT, READER, STEP, WORDS = "portable.json", "reader.onnx", "step.onnx", "vocabulary.json"


class PortableCaptioner:
    """
    >>> captioner = PortableCaptioner("exported")              # doctest: +SKIP
    >>> captioner.caption("photo.jpg").text                    # doctest: +SKIP
    'a dog laying down beside a little couch'
    """

    def __init__(self, directory: str | Path, threads: int = 0) -> None:
        """`threads`: 0 uses all cores."""
        folder = Path(directory)
        try:
            about = json_of((folder / ABOUT).read_text(encoding="utf-8"))
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']!r}, not {FORMAT!r}")
            self.vocabulary = Vocabulary.from_json(json_of((folder / WORDS).read_text(encoding="utf-8")))
            self.views: dict[str, Any] = about["views"]
            self.layers = int(about["layers"])
            self.past_width = int(about["past"])
            self.decode = DecodeConfig(**about["decode"])
            self.confidence = ConfidenceConfig(**about["confidence"])
            self.novelty = Novelty.load(folder, {name: int(spec["dim"]) for name, spec in self.views.items()})
            self.extractors = PortableExtractors(folder, about["extractors"], threads) if about["extractors"] else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder} is not what `haav export` writes, or is damaged: {error}.\n"
                "  Make it with: haav export MODEL --out DIR"
            ) from None
        self.reader = session(folder / READER, threads)
        self.step = session(folder / STEP, threads)
        self.memory = tuple(output.name for output in self.reader.get_outputs())

    @overload
    def caption(  # type: ignore[overload-overlap]  # a text, bytes and an array are sequences, and still one photo
        self, photos: Picture, *, batch: int = 8, beam: int | None = None, n_best: int = 1
    ) -> Caption: ...

    @overload
    def caption(
        self, photos: Sequence[Picture], *, batch: int = 8, beam: int | None = None, n_best: int = 1
    ) -> list[Caption]: ...

    def caption(
        self, photos: Picture | Sequence[Picture], *, batch: int = 8, beam: int | None = None, n_best: int = 1
    ) -> Caption | list[Caption]:
        """The caption of one photo, or a list of captions of several photos. `batch` photos are decoded at once."""
        if batch < 1:
            raise ConfigError(f"a batch has at least 1 photo, not {batch}.")
        single = is_picture(photos)
        pictures = [cast(Picture, photos)] if single else list(cast(Sequence[Picture], photos))
        captions: list[Caption] = []
        for start in range(0, len(pictures), batch):
            images = [load_image(picture) for picture in pictures[start : start + batch]]
            captions += self.caption_extracted(self.extract(images), beam=beam, n_best=n_best)
        return captions[0] if single else captions

    def extract(self, images: Sequence[Image.Image]) -> dict[str, list[Arrays]]:
        """Extract the views of upright RGB pictures."""
        if self.extractors is None:
            raise ConfigError(
                "this export takes views, not photos: its model reads views that cannot be exported.\n"
                "  Give views as arrays: caption_extracted."
            )
        return self.extractors(images)

    def caption_extracted(
        self, extracted: Mapping[str, Sequence[Arrays]], *, beam: int | None = None, n_best: int = 1
    ) -> list[Caption]:
        """Caption photos from the views that `extract` returns."""
        beam = max(n_best, self.decode.beam) if beam is None else beam
        if beam > MAX_CAPTIONS:
            raise ConfigError(f"beam must be at most {MAX_CAPTIONS}, not {beam}.")
        if not 1 <= n_best <= beam:
            raise ConfigError(f"n_best must be from 1 to the beam, {beam}, not {n_best}.")
        photos = len(next(iter(extracted.values()))) if extracted else 0
        if not photos:
            return []
        memory = dict(zip(self.memory, self.reader.run(None, self._feed(extracted, photos)), strict=True))
        sentences = self._sentences(extracted)
        search = Search(self.decode, self.vocabulary, beam, beam if sentences and self.decode.consensus else n_best)
        results = search(
            lambda words, past, position: self._next(words, past, position, memory), self._no_past(photos), photos
        )
        return [
            choose_captions(
                self._captions(hypotheses),
                sentences[photo] if sentences else (),
                self._novelty(extracted, photo),
                n_best,
                self.vocabulary,
                self.decode,
                self.confidence,
            )
            for photo, hypotheses in enumerate(results)
        ]

    def _novelty(self, extracted: Mapping[str, Sequence[Arrays]], photo: int) -> float | None:
        views = extracted.get(self.novelty.view) if self.novelty is not None else None
        if self.novelty is None or not views or not len(views[photo]["tokens"]):
            return None
        return self.novelty(summarise(views[photo]["tokens"], views[photo].get("boxes")))

    def _sentences(self, extracted: Mapping[str, Sequence[Arrays]]) -> list[list[str]] | None:
        for name, spec in self.views.items():
            views = extracted.get(name, [])
            if "rank" in spec["indices"] and any(SENTENCES in view for view in views):
                return [[str(text) for text in view.get(SENTENCES, ())] for view in views]
        return None

    def _feed(self, extracted: Mapping[str, Sequence[Arrays]], photos: int) -> Arrays:
        """Inputs of the reader, padded to the longest photo of each view. A missing view is absent for every photo."""
        feed: Arrays = {}
        for name, spec in self.views.items():
            views = extracted.get(name, [])
            longest = max((len(view["tokens"]) for view in views), default=0)
            shapes: dict[str, tuple[tuple[int, ...], Any]] = {"tokens": ((spec["dim"],), np.float32)}
            shapes |= dict.fromkeys(spec["indices"], ((), np.int64))
            if spec["boxes"]:
                shapes["boxes"] = ((4,), np.float32)
            for part, (shape, dtype) in shapes.items():
                padded = np.zeros((photos, longest, *shape), dtype)
                for row, view in enumerate(views):
                    padded[row, : len(view[part])] = view[part]
                feed[f"{name}.{part}"] = padded
            lengths = np.array([len(view["tokens"]) for view in views] or [0] * photos)
            feed[f"{name}.mask"] = np.arange(longest) < lengths[:, None]
        return feed

    def _no_past(self, photos: int) -> list[np.ndarray]:
        """The empty past: keys beside values (B, 1, 0, 2D) of each layer"""
        return [np.zeros((photos, 1, 0, self.past_width), np.float32) for _ in range(self.layers)]

    def _next(
        self, words: np.ndarray, past: list[np.ndarray], position: int, memory: Arrays
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """words (B, C) → scores (B, C, words) of the next words, trust (B, C, V), the past including `words`"""
        feed = {"words": words, "position": np.array(position)} | memory
        # The graph numbers captions through all photos.
        rows = words.size
        feed |= {f"past.{index}": part.reshape(rows, *part.shape[2:]) for index, part in enumerate(past)}
        wanted = {value.name for value in self.step.get_inputs()}
        scores, trust, *known = self.step.run(None, {name: value for name, value in feed.items() if name in wanted})
        return scores, trust, [part.reshape(*words.shape, *part.shape[1:]) for part in known]

    def _captions(self, hypotheses: list[Hypothesis]) -> list[Caption]:
        possible = [self._caption(hypothesis) for hypothesis in hypotheses if hypothesis.logprob > -math.inf]
        if not possible:
            raise ConfigError("no caption fits decode.max_words and the other rules.")
        return possible

    def _caption(self, hypothesis: Hypothesis) -> Caption:
        weights = hypothesis.trust.tolist() if hypothesis.trust.shape[1] else None
        words, logprobs = hypothesis.words.tolist(), hypothesis.logprobs.tolist()
        return build_caption(words, logprobs, weights, list(self.views), self.vocabulary, self.confidence)
