"""Dropout that does not slow training down.

On a CPU, torch draws a number for each element one by one, makes it a mask, makes the mask a float, and multiplies: a
quarter of a training step went into that. Here random bits are taken as floats as they are, and one vectorised
kernel compares and keeps: the same distribution, in one pass. Elsewhere torch's own kernels are used.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor, nn

_keep_above = torch.ops.aten.threshold_backward.grad_input
"""`_keep_above(x, draws, t, grad_input=out)`: x where draws are above t or no number, else 0"""

_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80}
"""the bits of +∞; as many patterns, and one, are negative numbers, -0 and -∞ among them"""


def threshold(p: float, dtype: torch.dtype) -> float:
    """The number that a share p of all patterns of so many bits, read as floats, does not exceed."""
    bits, negative = 8 * dtype.itemsize, _INFINITY[dtype] + 1
    count = round(p * 2**bits)
    sign, magnitude = (1 << (bits - 1), negative - count) if count <= negative else (0, count - negative - 1)
    pattern = (sign | magnitude) << (32 - bits)  # bfloat16 is the upper half of float32
    return struct.unpack("<f", struct.pack("<I", pattern))[0]  # type: ignore[no-any-return]


def draw_like(x: Tensor) -> Tensor:
    """Any number of the tensor's type with equal chance, one for each element"""
    per_draw = 8 // x.element_size()
    bits = torch.empty(-(-x.numel() // per_draw), dtype=torch.int64).random_(-(2**63), None)
    return bits.view(x.dtype)[: x.numel()].view(x.shape)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        draws = draw_like(x)
        ctx.save_for_backward(draws)
        ctx.p = p
        return _dropped(x, draws, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (draws,) = ctx.saved_tensors
        return _dropped(grads[0], draws, ctx.p), None


def _dropped(x: Tensor, draws: Tensor, p: float) -> Tensor:
    out = torch.empty_like(draws)
    return _keep_above(x, draws, threshold(p, draws.dtype), grad_input=out).mul_(1 / (1 - p))  # type: ignore[no-any-return]


class _ReluDrop(torch.autograd.Function):
    """ReLU and dropout in place, not yet rescaled. What is left positive is all that the gradient needs to know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.mark_dirty(x)
        _keep_above(x.relu_(), draw_like(x), threshold(p, x.dtype), grad_input=x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grads[0], kept, 0), None


class Dropout(nn.Dropout):
    """Ordinary dropout."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if not self.is_fast(x):
            return super().forward(x)
        dropped: Tensor = _Drop.apply(x, self.p)  # type: ignore[no-untyped-call]
        return dropped

    def after_relu(self, x: Tensor) -> tuple[Tensor, float]:
        """dropout(relu(x)), over `x`, but for a factor that is left to a later, smaller product"""
        if not self.is_fast(x):
            return self(x.relu()), 1.0
        kept: Tensor = _ReluDrop.apply(x, self.p)  # type: ignore[no-untyped-call]
        return kept, 1 / (1 - self.p)

    def is_fast(self, x: Tensor) -> bool:
        return self.training and 0 < self.p < 0.99 and x.device.type == "cpu" and x.dtype in _INFINITY
