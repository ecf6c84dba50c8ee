from __future__ import annotations

import torch

from haav.types import PhotoView, ViewSpec
from haav.views.base import PhotoBatch, extractors
from haav.views.embedded import clip
from haav.views.embedded.patches import SIDE, ClipExtractor, PatchesExtractor
from haav.views.embedded.pooling import pool
from haav.views.embedded.regions import crops


@extractors.register("patch_regions")
class PatchRegionsExtractor(ClipExtractor):
    """The photo and its crops described by CLIP. Retrieval searches with these tokens.

    The photo is described by its class token and the mean of its patches. A crop has no class token, so it is described
    by the mean of the patches under it, twice. The regions need no further pass through CLIP and can be computed from
    stored `patches` without the photo.
    """

    name = "patch_regions"
    title = "parts of the photo"
    spec = ViewSpec(2 * clip.CONFIG.width, 15, boxes=True)

    def __init__(self, clip_source: str | None = None, precision: str = "auto", device: str = "cpu") -> None:
        super().__init__(clip_source, precision, device)
        self.patches = PatchesExtractor(clip_source, precision, device)
        self.reads = {self.patches.name: (self.patches.fingerprint,)}

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        patches = torch.stack([view.tokens.float() for view in photos.view(self.patches)])
        means = pool(patches[:, 1:].transpose(1, 2).unflatten(2, (SIDE, SIDE)), crops())
        first = torch.cat([patches[:, :1], means[:, 1:]], dim=1)
        return [PhotoView(tokens, boxes=crops()) for tokens in torch.cat([first, means], dim=2)]
