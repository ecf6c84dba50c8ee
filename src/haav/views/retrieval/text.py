"""Text views: the sentences nearest to a photo and its crops, retrieved with the learned bridge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from haav.errors import ViewError
from haav.provenance import check_made_by
from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, TracedView, build_extractor, extractors, weights_of
from haav.views.embedded.regions import CROPS, crops
from haav.views.options import ExtractorOptions
from haav.views.retrieval.bridge import CrossFitted
from haav.views.retrieval.textdb import TextDatabase
from haav.weights.load_once import load_once


def text_spec(textdb: TextDatabase, crops: str, per_crop: int) -> ViewSpec:
    count = len(range(15)[CROPS[crops]])
    return ViewSpec(textdb.vectors.shape[1], count * per_crop, indices={"crop": count, "rank": per_crop})


def nearest_texts(textdb: TextDatabase, queries: Tensor, photos: Sequence[str], per_crop: int) -> list[PhotoView]:
    """queries (B, crops, D) of the named photos → their nearest sentences, without their own captions"""
    crops = queries.shape[1]
    owners: list[str | None] = [photo for photo in photos for _ in range(crops)]
    _, rows = textdb.search(queries.flatten(0, 1), per_crop, exclude_owner=owners)
    return [
        replace(
            text_view(textdb, nearest),
            labels=tuple(textdb.entries[row].sentence for row in nearest.flatten().tolist()),
        )
        for nearest in rows.view(len(photos), crops, per_crop)
    ]


def text_view(textdb: TextDatabase, rows: Tensor) -> PhotoView:
    """rows (crops, per crop) of the nearest sentences → the view, without labels"""
    crops, per_crop = rows.shape
    positions = torch.arange(crops * per_crop)
    indices = {"crop": positions // per_crop, "rank": positions % per_crop}
    return PhotoView(textdb.vectors[rows.flatten()], indices)


class TextExtractor(Extractor):
    """Tokens are the vectors of the retrieved sentences. Labels are the sentences.

    A photo never gets its own captions. Its bridge was not trained on it.
    """

    title = "captions of similar photos"
    licence = "of the captions in the text database"
    needs, gives = ("bridge", "textdb"), ("sentences",)
    exportable = True
    crops: str
    per_crop: int

    def __init__(
        self,
        bridge: str | Path | CrossFitted | None = None,
        textdb: str | Path | TextDatabase | None = None,
        clip_source: str | Path | None = None,
        precision: str = "auto",
        device: str = "cpu",
    ) -> None:
        """`clip_source`, `precision`, `device`: options of the view that the bridge reads"""
        super().__init__(device)
        self.options = ExtractorOptions(device, precision, clip_source=clip_source)
        if bridge is None or textdb is None:
            raise ViewError(
                f"view '{self.name}' needs a bridge and a text database.\n"
                "  Make them with: haav textdb, haav bridge; then give --bridge DIR --textdb DIR.\n"
                "  A model that is to caption photos needs them in its directory: haav pack."
            )
        self.bridge = bridge if isinstance(bridge, CrossFitted) else _load_bridge(str(bridge))
        self.textdb = textdb if isinstance(textdb, TextDatabase) else load_textdb(str(textdb))
        if self.bridge.encoder != self.textdb.encoder:
            raise ViewError(
                f"the bridge leads to vectors of {self.bridge.encoder}, the text database holds those of "
                f"{self.textdb.encoder}: make both with one sentence encoder."
            )
        self.spec = text_spec(self.textdb, self.crops, self.per_crop)
        self.reads = {self.bridge.view: self.bridge.made_by}

    @classmethod
    def weights_with(cls, options: ExtractorOptions) -> tuple[str, ...]:
        if options.bridge is None:
            return ()
        bridge = options.bridge if isinstance(options.bridge, CrossFitted) else _load_bridge(str(options.bridge))
        return weights_of([bridge.view], options)

    @classmethod
    def crop_boxes(cls) -> Tensor:
        return crops()[CROPS[cls.crops]]

    @property
    def fingerprint(self) -> str:
        return self._fingerprint(self.bridge.fingerprint, self.textdb.fingerprint)

    @property
    def origin(self) -> str:
        return self._fingerprint(self.bridge.origin, self.textdb.origin)

    def _fingerprint(self, bridge: str, textdb: str) -> str:
        return f"bridge-{bridge}-textdb-{textdb}-{self.crops}-{self.per_crop}"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        return nearest_texts(self.textdb, self._queries(photos), photos.ids, self.per_crop)

    def _queries(self, photos: PhotoBatch) -> Tensor:
        """(B, crops, D)"""
        regions = photos.once(self.bridge.view, lambda: self._regions.extract(photos))
        features = torch.stack([view.tokens[CROPS[self.crops]] for view in regions])
        return self.bridge(features, photos.ids)

    def trace(self, photo: PhotoBatch) -> TracedView:
        _, rows = self.textdb.search(self._queries(photo)[0], self.per_crop, backend="torch")
        return TracedView(text_view(self.textdb, rows), rows.flatten(), self.textdb.sentences)

    @cached_property
    def _regions(self) -> Extractor:
        """The extractor of the view that the bridge was trained on, for photos whose features are not stored."""
        extractor = build_extractor(self.bridge.view, self.options)
        check_made_by(self.reads, {extractor.name: extractor.origin}, "the one installed", "the bridge")
        return extractor


@extractors.register("text_whole")
class TextWholeExtractor(TextExtractor):
    name, crops, per_crop = "text_whole", "whole", 16


@extractors.register("text_five")
class TextFiveExtractor(TextExtractor):
    name, crops, per_crop = "text_five", "five", 4


@extractors.register("text_nine")
class TextNineExtractor(TextExtractor):
    name, crops, per_crop = "text_nine", "nine", 2


@load_once
def _load_bridge(path: str) -> CrossFitted:
    return CrossFitted.load(path)


@load_once
def load_textdb(path: str) -> TextDatabase:
    return TextDatabase.load(path)
