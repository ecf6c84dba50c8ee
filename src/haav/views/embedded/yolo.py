"""YOLOv4-tiny (COCO, 80 classes) read from its darknet files into plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haav import weights as frozen
from haav.errors import ViewError
from haav.views.embedded.folded_conv import FoldedConv, fold
from haav.weights.load_once import load_once

SIZE = 416
LICENCE = "MIT"
WEIGHTS = "yolov4-tiny"
EPS = 1e-5  # darknet adds 1e-6 outside the root; at these variances the difference is below 1e-6
DEEP, FINE = (512, 13), (256, 26)
"""(channels, side) of the two maps that the detection heads read"""


@dataclass(frozen=True)
class Detections:
    """Raw output of the network for a batch, before thresholds and suppression."""

    boxes: Tensor
    """(B, N, 4): x1, y1, x2, y2 as fractions of the picture, not clipped"""
    scores: Tensor
    """(B, N, 80): objectness × class probability"""
    deep: Tensor
    """(B, 512, 13, 13)"""
    fine: Tensor
    """(B, 256, 26, 26)"""

    def cpu(self) -> Detections:
        return Detections(self.boxes.cpu(), self.scores.cpu(), self.deep.cpu(), self.fine.cpu())


class YoloTiny(nn.Module):
    """Runs the layers of a darknet config one by one, keeping the outputs that later layers route to."""

    def __init__(self, sections: list[dict[str, str]], weights: np.ndarray) -> None:
        super().__init__()
        self.sections = sections
        self.convs = nn.ModuleDict()
        offset, channels = 0, 3
        depths: list[int] = []
        for layer, section in enumerate(sections):
            layer_type = section["type"]
            if layer_type == "convolutional":
                conv, used = _read_conv(section, channels, weights[offset:])
                offset += used
                self.convs[str(layer)] = conv
                channels = int(section["filters"])
            elif layer_type == "route":
                parts = [depths[index] for index in _routes(section, layer)]
                channels = sum(parts) // int(section.get("groups", 1))
            depths.append(channels)
        if offset != len(weights):
            raise ViewError(f"darknet weights hold {len(weights)} numbers, the config takes {offset}.")
        self.needed = {index for layer, section in enumerate(sections) for index in _routes(section, layer)}

    def forward(self, pixels: Tensor) -> Detections:
        """pixels (B, 3, 416, 416) uint8 RGB"""
        x = pixels.float().div_(255).contiguous(memory_format=torch.channels_last)
        outputs: dict[int, Tensor] = {}
        heads: list[tuple[Tensor, Tensor]] = []
        maps: dict[int, Tensor] = {}
        for layer, section in enumerate(self.sections):
            layer_type = section["type"]
            if layer_type == "convolutional":
                if section["activation"] == "linear":
                    maps[int(x.shape[-1])] = x  # the input of a head
                x = self.convs[str(layer)](x)
            elif layer_type == "maxpool":
                x = F.max_pool2d(x, int(section["size"]), int(section["stride"]))
            elif layer_type == "upsample":
                x = F.interpolate(x, scale_factor=int(section["stride"]), mode="nearest")
            elif layer_type == "route":
                x = torch.cat([outputs[index] for index in _routes(section, layer)], dim=1)
                if "groups" in section:
                    x = x.chunk(int(section["groups"]), dim=1)[int(section["group_id"])]
            elif layer_type == "yolo":
                heads.append(_decode(x, section))
            if layer in self.needed:
                outputs[layer] = x
        boxes, scores = (torch.cat(parts, dim=1) for parts in zip(*heads, strict=True))
        return Detections(boxes, scores, deep=maps[DEEP[1]], fine=maps[FINE[1]])


def _decode(x: Tensor, section: dict[str, str]) -> tuple[Tensor, Tensor]:
    """A head's map (B, 3·85, H, W) → boxes (B, 3HW, 4) and scores (B, 3HW, 80)."""
    chosen = [int(index) for index in section["mask"].split(",")]
    sides = torch.tensor([float(side) for side in section["anchors"].split(",")]).view(-1, 2)
    anchors = sides[chosen].to(x.device) / SIZE
    stretch = float(section["scale_x_y"])
    batch, _, height, width = x.shape
    cells = x.view(batch, len(chosen), 85, height, width).permute(0, 1, 3, 4, 2)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    offsets = torch.stack([columns, rows], dim=-1).to(x)
    centres = (cells[..., :2].sigmoid() * stretch - (stretch - 1) / 2 + offsets) / torch.tensor([width, height]).to(x)
    sizes = cells[..., 2:4].exp() * anchors[:, None, None]
    boxes = torch.cat([centres - sizes / 2, centres + sizes / 2], dim=-1)
    scores = cells[..., 4:5].sigmoid() * cells[..., 5:].sigmoid()
    return boxes.flatten(1, 3), scores.flatten(1, 3)


def _routes(section: dict[str, str], layer: int) -> list[int]:
    """Absolute indices of the layers that a route joins."""
    if section["type"] != "route":
        return []
    indices = [int(index) for index in section["layers"].split(",")]
    return [index if index >= 0 else layer + index for index in indices]


def _read_conv(section: dict[str, str], channels: int, weights: np.ndarray) -> tuple[FoldedConv, int]:
    filters, size = int(section["filters"]), int(section["size"])
    normed = section.get("batch_normalize") == "1"
    vectors = 4 if normed else 1
    count = filters * (vectors + channels * size * size)
    if count > len(weights):
        raise ViewError("the darknet weights file ends too early: it is truncated.")
    values = torch.from_numpy(weights[:count].copy())
    parts = values[: vectors * filters].view(vectors, filters)
    kernel = values[vectors * filters :].view(filters, channels, size, size)
    weight, bias = kernel, parts[0]
    if normed:
        beta, gamma, mean, variance = parts
        weight, bias = fold(kernel, gamma, beta, mean, variance, EPS)
    activation = "leaky" if section["activation"] == "leaky" else "none"
    return FoldedConv(weight, bias, int(section["stride"]), 1, activation, padding=size // 2), count


def read_sections(text: str) -> list[dict[str, str]]:
    """Darknet's config: `[type]` and `key = value` lines. The first section, which describes the input, is
    left out."""
    sections: list[dict[str, str]] = []
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("["):
            sections.append({"type": line.strip("[]")})
        elif line:
            key, _, value = line.partition("=")
            sections[-1][key.strip()] = value.strip()
    return sections[1:]


def folder() -> Path:
    return frozen.locate(WEIGHTS)


def fingerprint() -> str:
    return frozen.find(WEIGHTS).fingerprint


@cache
def class_names() -> tuple[str, ...]:
    return tuple((folder() / "coco.names").read_text().split("\n")[:80])


@load_once
def load_yolo(device: str = "cpu") -> YoloTiny:
    sections = read_sections((folder() / "yolov4-tiny.cfg").read_text())
    with open(folder() / "yolov4-tiny.weights", "rb") as file:
        version = np.fromfile(file, dtype=np.int32, count=3)
        file.seek(20 if version[0] * 10 + version[1] >= 2 else 16)
        weights = np.fromfile(file, dtype=np.float32)
    return YoloTiny(sections, weights).eval().to(device)
