from __future__ import annotations

import torch

from haav.types import PhotoView, ViewSpec
from haav.views import clip
from haav.views.base import PhotoBatch, extractors
from haav.views.patches import SIDE, ClipExtractor, PatchesExtractor
from haav.views.pooling import pool
from haav.views.regions import crops


@extractors.register("patch_regions")
class PatchRegionsExtractor(ClipExtractor):
    """The photo and its crops in CLIP's embedding space: what retrieval searches with.

    The photo has the class token's embedding. A crop has the mean of the patches under it, passed through the same
    projection: fifteen crops for the price of none, and from stored `patches` without the photo.
    """

    name = "patch_regions"
    spec = ViewSpec(clip.EMBEDDING, 15, boxes=True)

    def __init__(self, clip_source: str | None = None, precision: str = "auto", device: str = "cpu") -> None:
        super().__init__(clip_source, precision, device)
        self.patches = PatchesExtractor(clip_source, precision, device)
        self.reads = {self.patches.name: (self.patches.fingerprint,)}

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        patches = torch.stack([view.tokens.float() for view in photos.view(self.patches)])
        pooled = pool(patches[:, 1:].transpose(1, 2).unflatten(2, (SIDE, SIDE)), crops())
        pooled[:, 0] = patches[:, 0]
        return [PhotoView(tokens, boxes=crops()) for tokens in self.tower.embed(pooled)]
