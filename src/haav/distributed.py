"""Communication between the processes of a run. torchrun starts them, and torch.distributed connects them.

Every function also works for a single process, at no cost. The batch of a step is split into consecutive parts, one per
process. Sums over the parts make losses, statistics and queue equal to those of a single process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if count() > 1 else 0


def wait() -> None:
    if count() > 1:
        dist.barrier()


def share(rows: Sequence[Any]) -> Sequence[Any]:
    """The rows of this process. Parts are consecutive, so concatenating them by rank restores the order."""
    cuts = [len(rows) * process // count() for process in range(count() + 1)]
    return rows[cuts[rank()] : cuts[rank() + 1]]


def total(value: Tensor) -> Tensor:
    """Sum over processes, without a gradient"""
    if count() == 1:
        return value.detach()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def mean(summed: Tensor, items: Tensor) -> Tensor:
    """The share of this process in the global mean, scaled up because gradients are averaged over processes."""
    return summed * count() / total(items).clamp(min=1e-6)


def gather(rows: Tensor) -> Tensor:
    """Concatenate rows (N, …) of all processes in order of rank, without a gradient. N may differ."""
    if count() == 1:
        return rows.detach()
    sizes = [torch.zeros((), dtype=torch.int64, device=rows.device) for _ in range(count())]
    dist.all_gather(sizes, torch.tensor(len(rows), device=rows.device))
    padded = rows.new_zeros(int(max(sizes)), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in range(count())]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def gather_texts(texts: Mapping[str, str], device: torch.device | str = "cpu") -> dict[str, str]:
    """The entries of all processes, sent as JSON."""
    if count() == 1:
        return dict(texts)
    encoded = torch.frombuffer(bytearray((json.dumps(texts) + "\n").encode()), dtype=torch.uint8).to(device)
    lines = bytes(gather(encoded).cpu().numpy()).decode().splitlines()
    return {name: text for line in lines for name, text in json.loads(line).items()}


class _Sum(torch.autograd.Function):
    """Sum over processes, with a gradient. The losses of all processes depend on each contribution."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return total(value)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return total(gradient[0])


def _sum(value: Tensor) -> Tensor:
    summed: Tensor = _Sum.apply(value)  # type: ignore[no-untyped-call]
    return summed


class BatchNorm(nn.BatchNorm1d):
    """Batch norm with statistics over all processes. torch's SyncBatchNorm supports GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C)"""
        if not self.training or count() == 1:
            return super().forward(x)
        rows = total(torch.tensor(float(len(x)), device=x.device))
        wide = x.float()  # as in torch, statistics of bfloat16 are computed in float32
        average = _sum(wide.sum(dim=0)) / rows
        variance = _sum(((wide - average) ** 2).sum(dim=0)) / rows
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            assert self.momentum is not None
            self.num_batches_tracked += 1
            self.running_mean.lerp_(average, self.momentum)
            self.running_var.lerp_(variance * rows / (rows - 1), self.momentum)
        normed = (wide - average) * (variance + self.eps).rsqrt()
        if self.affine:
            normed = normed * self.weight + self.bias
        return normed.to(x.dtype)
