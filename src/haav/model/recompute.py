"""Less memory for more time in training: parts that keep only their input and compute the rest again for the gradient.

Random states are restored for the second time, so the gradients are the same bits
(docs/experiments/2026-11-18-training-speed.md has memory and time).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputable(nn.Module):
    """A part whose inner results are large beside its input and output."""

    recompute = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)
        return super().__call__(*args, **kwargs)


def recompute(model: nn.Module) -> None:
    """Let all such parts of a model do so from now on."""
    for part in model.modules():
        if isinstance(part, Recomputable):
            part.recompute = True
