from __future__ import annotations

import torch
from torch import Tensor

from haav.types import PhotoView, ViewSpec
from haav.views import regions
from haav.views.base import Extractor, PhotoBatch, extractors

SIDE = 5


def squares() -> Tensor:
    """(25, 4): the photo cut into 5 × 5, row by row"""
    cells = torch.arange(SIDE**2)
    corner = torch.stack([cells % SIDE, cells // SIDE], dim=1) / SIDE
    return torch.cat([corner, corner + 1 / SIDE], dim=1)


@extractors.register("cells")
class CellsExtractor(Extractor):
    """A coarse grid, 5 × 5, each cell described by both networks: fewer tokens than `grid`, each of which says more."""

    name = "cells"
    licence = regions.LICENCE
    weights = regions.WEIGHTS
    spec = ViewSpec(regions.WIDTH, SIDE**2, indices={"row": SIDE, "column": SIDE})

    @property
    def fingerprint(self) -> str:
        return regions.fingerprint()

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        cells = torch.arange(SIDE**2)
        indices = {"row": cells // SIDE, "column": cells % SIDE}
        return [PhotoView(tokens, indices) for tokens in regions.describe_regions(photos, squares())]
