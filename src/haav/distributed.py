"""The other processes of a run, where there are any: torchrun starts them, torch.distributed connects them.

Every function is right for one process too, and costs nothing then. A step's batch is cut into consecutive parts, one
a process; sums over the parts make losses, statistics and queue the same as one process has them.
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
    """This process's part: consecutive, so that the parts in order of rank are the whole in order"""
    cuts = [len(rows) * number // count() for number in range(count() + 1)]
    return rows[cuts[rank()] : cuts[rank() + 1]]


def total(value: Tensor) -> Tensor:
    """Sum over the processes, without a gradient"""
    if count() == 1:
        return value.detach()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def mean(summed: Tensor, number: Tensor) -> Tensor:
    """A sum over this part, as its share in the mean over the whole: processes' gradients are averaged afterwards."""
    return summed * count() / total(number).clamp(min=1)


def gather(rows: Tensor) -> Tensor:
    """(N, …) of each process, N may differ → all of them in order of rank, without a gradient"""
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
    """The entries of all processes; they travel as JSON."""
    if count() == 1:
        return dict(texts)
    own = torch.frombuffer(bytearray((json.dumps(texts) + "\n").encode()), dtype=torch.uint8).to(device)
    lines = bytes(gather(own).cpu().numpy()).decode().splitlines()
    return {name: text for line in lines for name, text in json.loads(line).items()}


class _Sum(torch.autograd.Function):
    """Sum over the processes, with a gradient: what one contributes, the losses of all depend on."""

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
    """Batch statistics over all processes; torch's own does that on GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C)"""
        if not self.training or count() == 1:
            return super().forward(x)
        number = total(torch.tensor(float(len(x)), device=x.device))
        wide = x.float()  # as torch's own: statistics of bfloat16 are kept in float32
        average = _sum(wide.sum(dim=0)) / number
        variance = _sum(((wide - average) ** 2).sum(dim=0)) / number
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            assert self.momentum is not None
            self.num_batches_tracked += 1
            self.running_mean.lerp_(average, self.momentum)
            self.running_var.lerp_(variance * number / (number - 1), self.momentum)
        normed = (wide - average) * (variance + self.eps).rsqrt()
        if self.affine:
            normed = normed * self.weight + self.bias
        return normed.to(x.dtype)
