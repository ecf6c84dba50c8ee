from __future__ import annotations

from haav.types import PhotoView, ViewSpec
from haav.views import clip
from haav.views.base import PhotoBatch, extractors
from haav.views.patches import ClipExtractor
from haav.views.pooling import pool
from haav.views.regions import crops


@extractors.register("patch_regions")
class PatchRegionsExtractor(ClipExtractor):
    """The photo and its crops in CLIP's embedding space: what retrieval searches with.

    The photo has the class token's embedding. A crop has the mean of the patch tokens under it, passed through the
    same projection: fifteen crops for the price of one pass of the network.
    """

    name = "patch_regions"
    spec = ViewSpec(clip.EMBEDDING, 15, boxes=True)

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        hidden, boxes = self.tower.hidden(photos), crops()
        pooled = pool(clip.patch_map(hidden), boxes)
        pooled[:, 0] = hidden[:, 0]
        return [PhotoView(tokens, boxes=boxes) for tokens in self.tower.embed(pooled)]
