from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded import efficientnet


def grid_map(photos: PhotoBatch, device: str = "cpu") -> Tensor:
    """(B, 1280, 9, 9), computed once per batch"""

    def compute() -> Tensor:
        with torch.no_grad():
            pixels = photos.pixels(efficientnet.SIZE, Image.Resampling.BICUBIC).to(device)
            features: Tensor = efficientnet.load_efficientnet(device)(pixels)
            return features.cpu()

    return photos.once("efficientnet_lite2", compute)


@extractors.register("grid")
class GridExtractor(Extractor):
    """EfficientNet-Lite2's last map: 9 × 9 cells, row by row."""

    name = "grid"
    title = "what the image encoder saw"
    licence = efficientnet.LICENCE
    weights = (efficientnet.WEIGHTS,)
    spec = ViewSpec(
        efficientnet.WIDTH, efficientnet.GRID**2, indices={"row": efficientnet.GRID, "column": efficientnet.GRID}
    )
    exportable = True

    @property
    def fingerprint(self) -> str:
        return f"efficientnet-lite2-{efficientnet.fingerprint()}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        cells = torch.arange(efficientnet.GRID**2)
        indices = {"row": cells // efficientnet.GRID, "column": cells % efficientnet.GRID}
        return [PhotoView(features.flatten(1).T, indices) for features in grid_map(photos, self.device)]
