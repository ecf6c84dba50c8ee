"""EfficientNet-Lite2 (ImageNet-1k)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from haav import weights
from haav.views.embedded.folded_conv import FoldedConv, fold
from haav.weights.load_once import load_once

SIZE = 260
WIDTH = 1280
GRID = 9
LICENCE = "Apache-2.0"
WEIGHTS = "efficientnet-lite2"

# (blocks, kernel, stride of the first): EfficientNet-B's stages at depth 1.2, the first and last unscaled
STAGES = ((1, 3, 1), (3, 3, 2), (3, 5, 2), (4, 3, 2), (4, 5, 1), (5, 5, 2), (1, 3, 1))
EPS = 1e-3


class InvertedResidual(nn.Module):
    def __init__(self, state: Mapping[str, Tensor], prefix: str, stride: int) -> None:
        super().__init__()
        self.expand = None
        if f"{prefix}_expand_conv.weight" in state:
            self.expand = _conv(state, f"{prefix}_expand_conv", f"{prefix}_bn0", 1, "relu6")
        self.depthwise = _conv(state, f"{prefix}_depthwise_conv", f"{prefix}_bn1", stride, "relu6")
        self.project = _conv(state, f"{prefix}_project_conv", f"{prefix}_bn2", 1, "none")
        inputs = (self.expand or self.depthwise).weight.shape[1 if self.expand else 0]
        self.residual = stride == 1 and inputs == self.project.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        inner = x if self.expand is None else self.expand(x)
        out: Tensor = self.project(self.depthwise(inner))
        return out.add_(x) if self.residual else out


class EfficientNetLite2(nn.Module):
    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        strides = [stride if block == 0 else 1 for blocks, _, stride in STAGES for block in range(blocks)]
        self.stem = _conv(state, "_conv_stem", "_bn0", 2, "relu6")
        self.blocks = nn.Sequential(
            *(InvertedResidual(state, f"_blocks.{block}.", stride) for block, stride in enumerate(strides))
        )
        self.head = _conv(state, "_conv_head", "_bn1", 1, "relu6")

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (B, 3, 260, 260) uint8 RGB → (B, 1280, 9, 9), values in 0..6"""
        x = pixels.float().sub_(127).div_(128).contiguous(memory_format=torch.channels_last)
        features: Tensor = self.head(self.blocks(self.stem(x)))
        return features


def _conv(state: Mapping[str, Tensor], conv: str, norm: str, stride: int, activation: str) -> FoldedConv:
    weight = state[f"{conv}.weight"]
    gamma, beta, mean, variance = (
        state[f"{norm}.{name}"] for name in ("weight", "bias", "running_mean", "running_var")
    )
    groups = len(weight) if weight.shape[1] == 1 and "depthwise" in conv else 1
    folded, shift = fold(weight, gamma, beta, mean, variance, EPS)
    return FoldedConv(folded, shift, stride, groups, activation, padding=-1)


def weights_path() -> Path:
    return weights.locate(WEIGHTS) / "efficientnet-lite2-9656183e.pth"


def fingerprint() -> str:
    return weights.find(WEIGHTS).fingerprint


@load_once
def load_efficientnet(device: str = "cpu") -> EfficientNetLite2:
    state = torch.load(weights_path(), map_location="cpu", weights_only=True)
    return EfficientNetLite2(state).eval().to(device)
