from __future__ import annotations

import torch

from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded import regions
from haav.views.embedded.pooling import squares

SIDE = 5


@extractors.register("cells")
class CellsExtractor(Extractor):
    """A coarse grid of 5 × 5 cells, each described by both networks. It has fewer and wider tokens than `grid`."""

    name = "cells"
    title = "what the image encoder saw"
    licence = regions.LICENCE
    weights = regions.WEIGHTS
    spec = ViewSpec(regions.WIDTH, SIDE**2, indices={"row": SIDE, "column": SIDE})
    exportable = True

    @property
    def fingerprint(self) -> str:
        return regions.fingerprint()

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        cells = torch.arange(SIDE**2)
        indices = {"row": cells // SIDE, "column": cells % SIDE}
        return [PhotoView(tokens, indices) for tokens in regions.describe_regions(photos, squares(SIDE), self.device)]
