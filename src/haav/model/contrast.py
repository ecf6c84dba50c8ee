"""The contrastive part (MoCo-v2): momentum copy, projection head, queue of past keys.

All of it is training state. A saved model never holds it and inference never runs it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haav import distributed
from haav.model.encodings import Encoding
from haav.model.layers import SetAttention
from haav.model.linear import Linear
from haav.model.losses import info_nce_terms
from haav.types import EncodedViews, Views


class Projector(nn.Module):
    """[CLS] of each view → a unit vector: three-layer MLP with BatchNorm, then pooling over encoder layers.

    Views that a photo lacks take no part in the batch statistics; their vectors are zero.
    """

    def __init__(self, d_model: int, hidden: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            Linear(d_model, hidden, bias=False),
            distributed.BatchNorm(hidden),
            nn.ReLU(),
            Linear(hidden, hidden, bias=False),
            distributed.BatchNorm(hidden),
            nn.ReLU(),
            Linear(hidden, d_model, bias=False),
            distributed.BatchNorm(d_model, affine=False),
        )
        self.pool = SetAttention(d_model, heads, dropout) if layers > 1 else None

    def forward(self, cls: Tensor, mask: Tensor) -> Tensor:
        """cls (B, V, L, D), mask (B, V) → (B, V, D)"""
        rows = cls[mask].to(next(self.mlp.parameters()).dtype)
        if self.training and rows.shape[0] * rows.shape[1] < 2:
            return cls.sum(dim=2) * 0.0  # batch statistics need two rows; a lone one has nothing to compare with
        projected = self.mlp(rows.flatten(0, 1)).view_as(rows)
        if self.pool is None:
            pooled = projected.squeeze(1)
        else:
            pooled, _ = self.pool(projected.mean(dim=1), projected)
        unit = F.normalize(pooled.float(), dim=-1)
        return unit.new_zeros(*mask.shape, unit.shape[-1]).masked_scatter(mask[..., None], unit)


@dataclass(frozen=True)
class Contrast:
    """One comparison of a batch's views; `keys` go into the queue once the step is taken."""

    loss: Tensor
    queries: Tensor
    """(B, V, D) by the model that is trained"""
    keys: Tensor
    """(B, V, D) by its momentum copy"""
    mask: Tensor
    """(B, V)"""


class MomentumContrast(nn.Module):
    """Each step: `contrast = self(views, encoded)`, backward, optimizer; then `enqueue` its keys and `follow`."""

    queue: Tensor
    """(K, D) keys of past photos, the oldest overwritten first"""
    position: Tensor
    """where the next key goes"""
    filled: Tensor
    """how many rows of the queue hold a key; the rest are no negatives yet"""

    def __init__(
        self,
        encoding: Encoding,
        projector: Projector,
        d_model: int,
        *,
        queue_size: int,
        temperature: float,
        momentum: float,
        positives: str,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.momentum = momentum
        self.positives = positives
        self.projector = projector
        self.momentum_encoding = copy.deepcopy(encoding).float().requires_grad_(False)
        self.momentum_projector = copy.deepcopy(projector).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(queue_size, d_model))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def forward(self, views: Views, encoded: EncodedViews) -> Contrast:
        """`encoded`: what the model that is trained made of `views`. No caption is needed."""
        mask = encoded.cls_mask
        queries = self.projector(encoded.cls, mask)
        with torch.no_grad():
            keys = self.momentum_projector(self.momentum_encoding(views, cls_only=True).cls, mask)
        negatives = self.queue[: int(self.filled)]
        # Negatives are the views of all photos of the step, whichever process has them.
        all_keys, all_masks = distributed.gather(keys), distributed.gather(mask.to(torch.uint8)).bool()
        before = int(distributed.gather(torch.tensor([len(mask)], device=mask.device))[: distributed.rank()].sum())
        terms, pairs = info_nce_terms(
            queries, mask, all_keys, all_masks, before, negatives, self.temperature, self.positives
        )
        return Contrast(distributed.mean(terms, pairs), queries, keys, mask)

    @torch.no_grad()
    def follow(self, encoding: Encoding) -> None:
        pairs = [(self.momentum_encoding, encoding), (self.momentum_projector, self.projector)]
        for slow, fast in pairs:
            news = [new.to(old.dtype) for old, new in zip(slow.parameters(), fast.parameters(), strict=True)]
            torch._foreach_lerp_(list(slow.parameters()), news, 1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """keys (N, D), any N: the queue wraps where it must, and keeps the newest when N exceeds it."""
        size = len(self.queue)
        if not size or not len(keys):
            return
        keys = keys[-size:]
        rows = (self.position + torch.arange(len(keys), device=keys.device)) % size
        self.queue[rows] = keys.to(self.queue.dtype)
        self.position.copy_((self.position + len(keys)) % size)
        self.filled.copy_((self.filled + len(keys)).clamp(max=size))
