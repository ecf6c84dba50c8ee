"""A linear map whose weights are laid out for the processor once instead of at every product.

A decoder multiplies a handful of rows by all of its weights at every word. Then it is the way of the weights through
memory that takes time, and large ones are read faster in oneDNN's own layout (docs/experiments/2026-11-18-decoding.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from haav.tracing import is_exporting

# The operators that torch's compiler calls. Without them, `forward` is that of nn.Linear.
_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ROWS = 16
"""a number of rows for which the layout suits all numbers of rows but 1"""
# Beside the modules, so that copying, pickling and saving them know nothing of it.
_packed: Any = WeakIdKeyDictionary()


class Linear(nn.Linear):
    """nn.Linear, faster where the weights are frozen (`requires_grad_(False)`) and no gradients are kept."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        # Weights in training change all the time, and fused optimizers do not say when.
        if self.training or weight.requires_grad or torch.is_grad_enabled() or not _can_pack(x, weight):
            return super().forward(x)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, _pack(weight), self.bias, "none", [], "")
        return product


def _can_pack(x: Tensor, weight: Tensor) -> bool:
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
