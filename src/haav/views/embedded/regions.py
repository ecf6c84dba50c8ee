from __future__ import annotations

import torch
from torch import Tensor

from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded import efficientnet, yolo
from haav.views.embedded.grid import grid_map
from haav.views.embedded.objects import detections
from haav.views.embedded.pooling import pool

FIVE, NINE = 0.6, 0.4
"""sides of the crops, as in the paper's base model: four corners and the centre at 0.6, three by three at 0.4"""


def crops() -> Tensor:
    """(15, 4): the whole photo, then five crops, then nine"""
    whole = [(0.0, 0.0, 1.0, 1.0)]
    ends, middle = (0.0, 1 - FIVE), (1 - FIVE) / 2
    five = [(x, y) for y in ends for x in ends] + [(middle, middle)]
    nine = [(x * (1 - NINE) / 2, y * (1 - NINE) / 2) for y in range(3) for x in range(3)]
    return torch.tensor(
        whole + [(x, y, x + FIVE, y + FIVE) for x, y in five] + [(x, y, x + NINE, y + NINE) for x, y in nine]
    )


CROPS = {"whole": slice(0, 1), "five": slice(1, 6), "nine": slice(6, 15)}


WIDTH = efficientnet.WIDTH + yolo.DEEP[0] + yolo.FINE[0]
LICENCE = f"{efficientnet.LICENCE}, {yolo.LICENCE}"
WEIGHTS = (efficientnet.WEIGHTS, yolo.WEIGHTS)


def fingerprint() -> str:
    """The fingerprint of both networks."""
    return f"efficientnet-lite2-{efficientnet.fingerprint()}-yolov4-tiny-{yolo.fingerprint()}-1"


def describe_regions(photos: PhotoBatch, boxes: Tensor, device: str = "cpu") -> list[Tensor]:
    """boxes (N, 4) as fractions → per photo (N, 2048): the maps of both networks, pooled under each box"""
    raw = detections(photos, device)
    parts = [pool(features, boxes) for features in (grid_map(photos, device), raw.deep, raw.fine)]
    return list(torch.cat(parts, dim=2))


@extractors.register("regions")
class RegionsExtractor(Extractor):
    """The photo and its crops, each described by both networks. Retrieval searches with these tokens.

    Crops are pooled from the maps of the whole photo, so they need no further pass through the networks.
    """

    name = "regions"
    title = "parts of the photo"
    licence = LICENCE
    weights = WEIGHTS
    spec = ViewSpec(WIDTH, 15, boxes=True)
    exportable = True

    @property
    def fingerprint(self) -> str:
        return fingerprint()

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        boxes = crops()
        return [PhotoView(tokens, boxes=boxes) for tokens in describe_regions(photos, boxes, self.device)]
