"""DINOv2 ViT-S/14 (Meta), read from an ONNX file on the package index."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from haav import weights as frozen
from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded.onnx_weights import OnnxWeights
from haav.views.embedded.pooling import squares
from haav.views.embedded.vit import VisionTransformer, VitConfig, resolve_precision
from haav.weights.load_once import load_once

WEIGHTS = "dinov2-vit-s14"
LICENCE = "Apache-2.0"
SIDE, GRID, POOLED = 224, 16, 8
CONFIG = VitConfig(
    width=384,
    heads=6,
    layers=12,
    patch=14,
    eps=1e-6,
    quick_gelu=False,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)


class Dinov2Tower:
    def __init__(self, precision: str, device: str) -> None:
        state = read_onnx(frozen.locate(WEIGHTS) / frozen.find(WEIGHTS).members[0].name)
        self.vit = VisionTransformer(CONFIG, state, precision).to(device)
        self.norm = state["norm.weight"].to(device), state["norm.bias"].to(device)
        self.device = device

    def hidden(self, photos: PhotoBatch) -> Tensor:
        """(B, 257, 384), normed: the class token, then 16 × 16 patches row by row; computed once per batch"""

        def compute() -> Tensor:
            states = self.vit(photos.pixels(SIDE, Image.Resampling.BICUBIC).to(self.device))
            return F.layer_norm(states, (CONFIG.width,), *self.norm, CONFIG.eps).cpu()

        return photos.once(WEIGHTS, compute)


@load_once
def load_dinov2(precision: str = "auto", device: str = "cpu") -> Dinov2Tower:
    return Dinov2Tower(precision, device)


def read_onnx(path: Path) -> dict[str, Tensor]:
    """The weights under the names of vit.py, and norm"""
    file = OnnxWeights(path)

    def vector(name: str) -> Tensor:
        return torch.from_numpy(file[f"model.{name}"].copy())

    def matrix(node: str) -> Tensor:
        return torch.from_numpy(file.linear(f"/{node}/MatMul"))

    # The graph interpolates the positions of 37 × 37 patches to 16 × 16. The input size is fixed, so it is done here.
    cells = torch.from_numpy(file[file.inputs["/Reshape_1"][0]].copy()).view(1, 37, 37, CONFIG.width)
    positions = F.interpolate(cells.permute(0, 3, 1, 2), scale_factor=(GRID + 0.1) / 37, mode="bilinear")
    cls = vector("cls_token").flatten()
    state = {
        "patch.weight": vector("patch_embed.proj.weight"),
        "patch.bias": vector("patch_embed.proj.bias"),
        "cls": cls,
        # In this file, the position of the class token is the class token itself.
        "positions": torch.cat([cls[None], positions[0].flatten(1).T]),
        "norm.weight": vector("norm.weight"),
        "norm.bias": vector("norm.bias"),
    }
    for layer in range(CONFIG.layers):
        ours, theirs = f"layers.{layer}", f"blocks.{layer}"
        for name in ("norm1", "norm2"):
            state |= {f"{ours}.{name}.{part}": vector(f"{theirs}.{name}.{part}") for part in ("weight", "bias")}
        for name, path_in, scale in (
            ("qkv", "attn/qkv", None),
            ("out", "attn/proj", "ls1"),
            ("fc1", "mlp/fc1", None),
            ("fc2", "mlp/fc2", "ls2"),
        ):
            weight, bias = matrix(f"{theirs}/{path_in}"), vector(f"{theirs}.{path_in.replace('/', '.')}.bias")
            if scale is not None:  # LayerScale: a factor per output channel
                gamma = vector(f"{theirs}.{scale}.gamma")
                weight, bias = weight * gamma[:, None], bias * gamma
            state[f"{ours}.{name}.weight"], state[f"{ours}.{name}.bias"] = weight, bias
    return state


@extractors.register("dino_patches")
class DinoPatchesExtractor(Extractor):
    """DINOv2's class token, whose box is the whole photo, then 8 × 8 cells: means of 2 × 2 patch tokens, row by row."""

    name = "dino_patches"
    title = "what the image encoder saw"
    licence = LICENCE
    weights = (WEIGHTS,)
    spec = ViewSpec(CONFIG.width, 1 + POOLED**2, boxes=True)
    exportable = True

    def __init__(self, precision: str = "auto", device: str = "cpu") -> None:
        super().__init__(device)
        self.precision = resolve_precision(precision)

    @cached_property
    def tower(self) -> Dinov2Tower:
        return load_dinov2(self.precision, self.device)

    @property
    def fingerprint(self) -> str:
        return f"dino-patches-{WEIGHTS}-{frozen.find(WEIGHTS).fingerprint}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        hidden = self.tower.hidden(photos)
        maps = hidden[:, 1:].transpose(1, 2).unflatten(2, (GRID, GRID))
        cells = F.avg_pool2d(maps, 2).flatten(2).transpose(1, 2)
        boxes = torch.cat([torch.tensor([[0.0, 0.0, 1.0, 1.0]]), squares(POOLED)])
        return [PhotoView(tokens, boxes=boxes) for tokens in torch.cat([hidden[:, :1], cells], dim=1)]
