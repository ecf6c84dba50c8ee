"""Linear maps by oneDNN: in float32 on processors where MKL is slower, and with frozen weights that are laid out once.

MKL, which torch multiplies by, uses AVX-512 on Intel's processors only. On others oneDNN has more than twice its rate
(docs/experiments/2026-11-18-training-speed.md).

A decoder multiplies a handful of rows by all of its weights at every word. Then it is the way of the weights through
memory that takes time, and large ones are read faster in oneDNN's own layout (docs/experiments/2026-11-18-decoding.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from haav.cpu import mkl_is_slow
from haav.tracing import is_exporting

# The operators that torch's compiler calls. Without them, `forward` is that of nn.Linear.
_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ROWS = 16
"""a number of rows for which the layout suits all numbers of rows but 1"""
# Beside the modules, so that copying, pickling and saving them know nothing of it.
_packed: Any = WeakIdKeyDictionary()


class Linear(nn.Linear):
    """nn.Linear, faster"""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        # Weights in training change all the time, and fused optimizers do not say when.
        if self.training or weight.requires_grad or torch.is_grad_enabled() or not _is_plain(x, weight):
            return linear(x, weight, self.bias)
        return _product(x, _pack(weight), self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch.nn.functional.linear, by oneDNN where that is faster"""
    if not (_is_plain(x, weight) and x.numel() and mkl_is_slow()):
        return nn.functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    rows: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    # Not a view: what is computed over it in place would be copied for its gradient.
    product: Tensor = torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], len(weight)])
    return product


class _Linear(torch.autograd.Function):
    """x (N, A), weight (B, A), bias (B,) → (N, B)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t(), None) if of_x else None,
            _transposed_product(grad, x) if of_weight else None,
            grad.sum(dim=0) if of_bias else None,
        )


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b. oneDNN wants its first operand row by row, so the smaller one is copied."""
    if a.shape[1] <= b.shape[1]:
        return _product(a.t().contiguous(), b.t(), None)
    return _product(b.t().contiguous(), a.t(), None).t()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return (
        _AVAILABLE
        and x.dtype is weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not is_exporting()
    )


def _pack(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout. It is laid out anew when it has been changed, as that of a moving average is."""
    state = (weight._version, weight.data_ptr())
    packed: tuple[tuple[int, int], Tensor] | None = _packed.get(weight)
    if packed is None or packed[0] != state:
        packed = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        _packed[weight] = packed
    return packed[1]
