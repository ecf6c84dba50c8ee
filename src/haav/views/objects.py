from __future__ import annotations

import torch
from torch import Tensor

from haav.types import PhotoView, ViewSpec
from haav.views import yolo
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.pooling import pool

MIN_SCORE = 0.1
MAX_OVERLAP = 0.45
MAX_BOXES = 50


def detections(photos: PhotoBatch) -> yolo.Detections:
    """The detector's raw output, computed once a batch"""

    def compute() -> yolo.Detections:
        with torch.no_grad():
            return yolo.load_yolo()(photos.pixels(yolo.SIZE))

    return photos.once("yolov4_tiny", compute)


@extractors.register("objects")
class ObjectsExtractor(Extractor):
    """YOLOv4-tiny's boxes, the surest first: features pooled under each box, class probabilities, score.

    Labels are class names. A photo in which nothing is found lacks the view.
    """

    name = "objects"
    licence = yolo.LICENCE
    weights = (yolo.WEIGHTS,)
    spec = ViewSpec(yolo.DEEP[0] + yolo.FINE[0] + 80 + 1, MAX_BOXES, boxes=True)

    @property
    def fingerprint(self) -> str:
        return f"yolov4-tiny-{yolo.fingerprint()}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        found = detections(photos)
        return [self._photo(found, number) for number in range(len(photos))]

    def _photo(self, found: yolo.Detections, photo: int) -> PhotoView:
        best, classes = found.scores[photo].max(dim=1)
        kept = suppress(found.boxes[photo], best, classes)
        boxes = found.boxes[photo, kept].clamp(0, 1)
        features = [pool(maps[photo], boxes) for maps in (found.deep, found.fine)]
        tokens = torch.cat([*features, found.scores[photo, kept], best[kept, None]], dim=1)
        names = yolo.class_names()
        return PhotoView(tokens, boxes=boxes, labels=tuple(names[number] for number in classes[kept].tolist()))


def suppress(boxes: Tensor, scores: Tensor, classes: Tensor) -> Tensor:
    """Indices of boxes above the threshold, greedily without same-class overlaps, the surest first."""
    order = scores.argsort(descending=True, stable=True)
    order = order[scores[order] >= MIN_SCORE][:500]
    if not len(order):
        return order
    overlap = _overlaps(boxes[order]) * (classes[order][:, None] == classes[order])
    alive = torch.ones(len(order), dtype=torch.bool)
    for row in range(len(order)):
        if alive[row]:
            alive[row + 1 :] &= overlap[row, row + 1 :] <= MAX_OVERLAP
    return order[alive][:MAX_BOXES]


def _overlaps(boxes: Tensor) -> Tensor:
    """(N, N) intersection over union"""
    low = torch.maximum(boxes[:, None, :2], boxes[:, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(dim=-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=-1)
    return shared / (area[:, None] + area - shared).clamp(min=1e-9)
