"""CLIP's patches, the most informative view of a photo."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch.nn import functional as F

from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded import clip
from haav.views.embedded.pooling import squares
from haav.views.embedded.vit import resolve_precision

SIDE = clip.GRID // 2


class ClipExtractor(Extractor):
    """Base class of the views that are computed from CLIP's image tower."""

    licence = clip.LICENCE
    weights: ClassVar[tuple[str, ...]] = (clip.WEIGHTS,)
    exportable = True

    def __init__(self, clip_source: str | None = None, precision: str = "auto", device: str = "cpu") -> None:
        """`clip_source`: weights other than those of the package index; `precision`: auto, float32, bfloat16 or int8"""
        super().__init__(device)
        self.source, self.precision = clip_source, resolve_precision(precision)

    @cached_property
    def tower(self) -> clip.ClipTower:
        return clip.load_clip(self.source, self.precision, self.device)

    @property
    def fingerprint(self) -> str:
        return f"{self.name}-{clip.fingerprint_of(self.source)}-2"


@extractors.register("patches")
class PatchesExtractor(ClipExtractor):
    """The class token, whose box is the whole photo, then 7 × 7 cells: means of 2 × 2 patch tokens, row by row."""

    name = "patches"
    title = "what the image encoder saw"
    spec = ViewSpec(clip.CONFIG.width, 1 + SIDE**2, boxes=True)

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        hidden = self.tower.hidden(photos)
        cells = F.avg_pool2d(clip.patch_map(hidden), 2).flatten(2).transpose(1, 2)
        boxes = torch.cat([torch.tensor([[0.0, 0.0, 1.0, 1.0]]), squares(SIDE)])
        return [PhotoView(tokens, boxes=boxes) for tokens in torch.cat([hidden[:, :1], cells], dim=1)]
