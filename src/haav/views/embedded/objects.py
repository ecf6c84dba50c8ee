from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from haav.tracing import is_exporting
from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded import yolo
from haav.views.embedded.pooling import pool

MIN_SCORE = 0.1
MAX_OVERLAP = 0.45
MAX_BOXES = 50
MAX_CANDIDATES = 500
"""boxes with the highest scores, which suppression chooses from"""
CLASSES = 80


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
    title = "objects found"
    licence = yolo.LICENCE
    weights = (yolo.WEIGHTS,)
    gives = ("boxes",)
    spec = ViewSpec(yolo.DEEP[0] + yolo.FINE[0] + CLASSES + 1, MAX_BOXES, boxes=True)
    exportable = True

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
    if is_exporting():
        return _SuppressInGraph.apply(boxes, scores, classes)  # type: ignore[no-untyped-call, no-any-return]
    order = scores.argsort(descending=True, stable=True)
    order = order[scores[order] >= MIN_SCORE][:MAX_CANDIDATES]
    if not len(order):
        return order
    overlap = _overlaps(boxes[order]) * (classes[order][:, None] == classes[order])
    alive = torch.ones(len(order), dtype=torch.bool)
    for row in range(len(order)):
        if alive[row]:
            alive[row + 1 :] &= overlap[row, row + 1 :] <= MAX_OVERLAP
    return order[alive][:MAX_BOXES]


class _SuppressInGraph(torch.autograd.Function):
    """`suppress` as a node of an ONNX graph, which has no Python loops."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor, classes: Tensor) -> Tensor:
        """While a graph is traced, only the type of the result matters."""
        return scores.new_zeros(1, dtype=torch.int64)

    @staticmethod
    def symbolic(g: Any, boxes: Any, scores: Any, classes: Any) -> Any:
        def constant(value: object) -> Any:
            return g.op("Constant", value_t=torch.tensor(value))

        first = constant([0])
        scores, order = g.op("TopK", scores, constant([MAX_CANDIDATES]), outputs=2)  # the highest first
        boxes, classes = (g.op("Gather", part, order, axis_i=0) for part in (boxes, classes))
        # The node takes one row of scores per class. A box has a score in the row of its class only.
        own = g.op("Equal", classes, constant([[index] for index in range(CLASSES)]))
        scores = g.op("Where", own, scores, constant(0.0))
        boxes, scores = (g.op("Unsqueeze", part, first) for part in (boxes, scores))
        below = float(np.nextafter(np.float32(MIN_SCORE), np.float32(0)))  # the node takes scores above a threshold
        limits = constant([MAX_CANDIDATES]), constant([MAX_OVERLAP]), constant([below])
        chosen = g.op("NonMaxSuppression", boxes, scores, *limits)  # (N, 3): photo, class, box
        rows = g.op("Gather", chosen, constant(2), axis_i=1)
        rows, _ = g.op("TopK", rows, g.op("Shape", rows), largest_i=0, outputs=2)  # by score again, not by class
        return g.op("Gather", order, g.op("Slice", rows, first, constant([MAX_BOXES]), first), axis_i=0)


def _overlaps(boxes: Tensor) -> Tensor:
    """(N, N) intersection over union"""
    low = torch.maximum(boxes[:, None, :2], boxes[:, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(dim=-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=-1)
    return shared / (area[:, None] + area - shared).clamp(min=1e-9)
