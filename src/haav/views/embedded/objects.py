from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded import yolo
from haav.views.embedded.pooling import pool

MIN_SCORE = 0.1
MAX_OVERLAP = 0.45
MAX_BOXES = 50


def detections(photos: PhotoBatch, device: str = "cpu") -> yolo.Detections:
    """The detector's raw output, computed once per batch"""

    def compute() -> yolo.Detections:
        with torch.no_grad():
            raw: yolo.Detections = yolo.load_yolo(device)(photos.pixels(yolo.SIZE).to(device))
            return raw.cpu()

    return photos.once("yolov4_tiny", compute)


@extractors.register("objects")
class ObjectsExtractor(Extractor):
    """YOLOv4-tiny's boxes, the highest score first: features pooled under each box, class probabilities, score.

    Labels are class names. A photo without detections lacks the view.
    """

    name = "objects"
    licence = yolo.LICENCE
    weights = (yolo.WEIGHTS,)
    gives = ("boxes",)
    spec = ViewSpec(yolo.DEEP[0] + yolo.FINE[0] + 80 + 1, MAX_BOXES, boxes=True)

    @property
    def fingerprint(self) -> str:
        return f"yolov4-tiny-{yolo.fingerprint()}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        return self.describe(detections(photos, self.device))

    def describe(self, raw: yolo.Detections) -> list[PhotoView]:
        views = []
        for deep, fine, objects in zip(raw.deep, raw.fine, keep_boxes(raw), strict=True):
            features = [pool(maps, objects.boxes) for maps in (deep, fine)]
            tokens = torch.cat([*features, objects.scores], dim=1)
            views.append(PhotoView(tokens, boxes=objects.boxes, labels=objects.labels))
        return views


@dataclass(frozen=True)
class Objects:
    """The boxes of one photo that are kept, the highest score first."""

    boxes: Tensor
    """(N, 4), clipped to the photo"""
    scores: Tensor
    """(N, 81): the score of each class, then the highest of them"""
    labels: tuple[str, ...]


def keep_boxes(raw: yolo.Detections) -> list[Objects]:
    names, kept = yolo.class_names(), []
    for boxes, scores in zip(raw.boxes, raw.scores, strict=True):
        best, classes = scores.max(dim=1)
        rows = suppress(boxes, best, classes)
        labels = tuple(names[index] for index in classes[rows].tolist())
        kept.append(Objects(boxes[rows].clamp(0, 1), torch.cat([scores[rows], best[rows, None]], dim=1), labels))
    return kept


def suppress(boxes: Tensor, scores: Tensor, classes: Tensor) -> Tensor:
    """Greedy non-maximum suppression per class. Returns indices of boxes, the highest score first."""
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
