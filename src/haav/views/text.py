"""Text views: the sentences nearest to a photo and to its crops, by the learned bridge."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from haav.bridge import CrossFitted
from haav.errors import ViewError
from haav.textdb import TextDatabase
from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.regions import CROPS, RegionsExtractor


class TextExtractor(Extractor):
    """Tokens are the vectors of the retrieved sentences, labels the sentences.

    Guards: a photo never gets its own captions, and is served by a bridge that has not seen it.
    """

    licence = "of the captions in the text database"
    needs_images = False
    crops: str
    per_crop: int

    def __init__(self, bridge: str | CrossFitted | None = None, textdb: str | TextDatabase | None = None) -> None:
        if bridge is None or textdb is None:
            raise ViewError(
                f"view '{self.name}' needs a bridge and a text database.\n"
                "  Make them with: haav textdb build, haav bridge; then give --bridge DIR --textdb DIR."
            )
        self.bridge = _load_bridge(bridge) if isinstance(bridge, str) else bridge
        self.textdb = _load_textdb(textdb) if isinstance(textdb, str) else textdb
        if self.bridge.encoder != self.textdb.encoder:
            raise ViewError(
                f"the bridge leads to vectors of {self.bridge.encoder}, the text database holds those of "
                f"{self.textdb.encoder}: make both with one sentence encoder."
            )
        count = len(range(15)[CROPS[self.crops]])
        self.spec = ViewSpec(
            self.textdb.vectors.shape[1], count * self.per_crop, indices={"crop": count, "rank": self.per_crop}
        )

    @property
    def fingerprint(self) -> str:
        return f"bridge-{self.bridge.fingerprint}-textdb-{self.textdb.fingerprint}-{self.crops}-{self.per_crop}"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        regions = photos.once("regions", lambda: RegionsExtractor().extract(photos))
        features = torch.stack([view.tokens[CROPS[self.crops]] for view in regions])
        queries = self.bridge(features, photos.ids)
        crops = queries.shape[1]
        askers: list[str | None] = [photo for photo in photos.ids for _ in range(crops)]
        _, rows = self.textdb.search(queries.flatten(0, 1), self.per_crop, exclude_owner=askers)
        return [self._view(own) for own in rows.view(len(photos), crops * self.per_crop)]

    def _view(self, rows: Tensor) -> PhotoView:
        places = torch.arange(len(rows))
        return PhotoView(
            self.textdb.vectors[rows],
            indices={"crop": places // self.per_crop, "rank": places % self.per_crop},
            labels=tuple(self.textdb.entries[row].sentence for row in rows.tolist()),
        )


@extractors.register("text_whole")
class TextWholeExtractor(TextExtractor):
    name, crops, per_crop = "text_whole", "whole", 16


@extractors.register("text_five")
class TextFiveExtractor(TextExtractor):
    name, crops, per_crop = "text_five", "five", 4


@extractors.register("text_nine")
class TextNineExtractor(TextExtractor):
    name, crops, per_crop = "text_nine", "nine", 2


@cache
def _load_bridge(path: str) -> CrossFitted:
    return CrossFitted.load(path)


@cache
def _load_textdb(path: str) -> TextDatabase:
    return TextDatabase.load(path)
