from __future__ import annotations

import torch

from haav.types import PhotoView, ViewSpec
from haav.views.base import PhotoBatch, extractors
from haav.views.embedded import clip, yolo
from haav.views.embedded.objects import MAX_BOXES, detections, keep_boxes
from haav.views.embedded.patches import ClipExtractor
from haav.views.embedded.pooling import pool


@extractors.register("patch_objects")
class PatchObjectsExtractor(ClipExtractor):
    """YOLOv4-tiny's boxes, each described by CLIP's patch tokens under it, its class probabilities and its score.

    Labels are class names. A photo without detections lacks the view.
    """

    name = "patch_objects"
    title = "objects found"
    licence = f"{clip.LICENCE}, {yolo.LICENCE}"
    weights = (clip.WEIGHTS, yolo.WEIGHTS)
    gives = ("boxes",)
    spec = ViewSpec(clip.CONFIG.width + 80 + 1, MAX_BOXES, boxes=True)

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}-yolov4-tiny-{yolo.fingerprint()}"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        maps = clip.patch_map(self.tower.hidden(photos))
        views = []
        for features, objects in zip(maps, keep_boxes(detections(photos, self.device)), strict=True):
            tokens = torch.cat([pool(features, objects.boxes), objects.scores], dim=1)
            views.append(PhotoView(tokens, boxes=objects.boxes, labels=objects.labels))
        return views
