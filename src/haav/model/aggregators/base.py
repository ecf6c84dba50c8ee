"""The seam inside a decoder layer: `aggregator(query, memory) -> Aggregated(context, weights)`.

An aggregator owns both tiers, within a view and across views, so that "concatenate" is one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from haav.model.layers import Attention, SetAttention, hide
from haav.registry import Registry
from haav.types import Aggregated, EncodedViews, KeyValues, Memory, Source


class Aggregator(nn.Module, ABC):
    needs_views: ClassVar[bool]
    """whether it weighs views against each other and so needs an encoding that keeps them"""
    exposes_weights: ClassVar[bool]
    """whether it says how much each view counted"""

    def __init__(self, views: Sequence[str], layers: int, d_model: int, heads: int, dropout: float) -> None:
        """`views`: names of the encoded views; `layers`: encoder layers that the decoder sees"""
        super().__init__()

    @abstractmethod
    def build_memory(self, encoded: EncodedViews) -> Memory:
        """Keys and values of the encoded tokens; made once a photo."""

    @abstractmethod
    def forward(self, query: Tensor, memory: Memory, weighed: bool = True) -> Aggregated:
        """query (B, N, D), the self-attended words of all captions of a photo → context (B, N, D)

        `weighed`: whether view weights and looks are wanted too
        """


class ViewAggregator(Aggregator):
    """Looks at each view by one cross-attention that all views share.

    Where the decoder sees several encoder layers, each is attended to and an attention over the
    results picks among them (the release does so, the paper has one layer).
    """

    needs_views = True

    def __init__(self, views: Sequence[str], layers: int, d_model: int, heads: int, dropout: float) -> None:
        super().__init__(views, layers, d_model, heads, dropout)
        self.within = Attention(d_model, heads, dropout)
        self.across_layers = SetAttention(d_model, heads, dropout) if layers > 1 else None

    def build_memory(self, encoded: EncodedViews) -> Memory:
        sources = (
            new_source(self.within.keys_values(tokens), mask)
            for tokens, mask in zip(encoded.tokens, encoded.masks, strict=True)
        )
        return Memory(tuple(sources), encoded.present)

    def pick_layers(self, query: Tensor, per_layer: Tensor) -> Tensor:
        """query (..., 1 or V, D), per_layer (..., V, L, D) → (..., V, D)"""
        if self.across_layers is None:
            return per_layer.squeeze(-2)
        chosen, _ = self.across_layers(query, per_layer)
        return chosen  # type: ignore[no-any-return]

    def by_layer(self, weights: Tensor) -> Tensor:
        """(B, L·H, N, S) → (B, L, H, N, S)"""
        split: Tensor = weights.unflatten(1, (-1, self.within.heads))
        return split


def new_source(memory: KeyValues, mask: Tensor) -> Source:
    """memory (B, L, H, S, D/H), mask (B, S)"""
    bias = hide(mask[:, None, None], memory.keys.dtype)
    return Source(KeyValues(memory.keys.flatten(1, 2), memory.values.flatten(1, 2)), bias)


def build_joint_memory(attention: Attention, encoded: EncodedViews) -> Memory:
    """The tokens of all views as one sequence, in which views that are not there are hidden"""
    visible = [mask & encoded.present[:, [index]] for index, mask in enumerate(encoded.masks)]
    mask, memory = torch.cat(visible, dim=1), attention.keys_values(torch.cat(encoded.tokens, dim=2))
    # Who sees nothing finds nothing, instead of the mean of padding.
    values = memory.values.masked_fill(~mask[:, None, None, :, None], 0.0)
    columns = torch.eye(len(visible), dtype=values.dtype, device=mask.device)
    owners = torch.cat([part[..., None] * column for part, column in zip(visible, columns, strict=True)], dim=1)
    return Memory((new_source(KeyValues(memory.keys, values), mask),), encoded.present, owners)


class TwoTierAggregator(ViewAggregator):
    """Attend within each view; a subclass goes across."""

    def forward(self, query: Tensor, memory: Memory, weighed: bool = True) -> Aggregated:
        heads = self.within.project_query(query)
        # Each view is attended to at its own length; the results go on as one tensor (B, N, V, L, D).
        attended = [self.within.attend(heads, view.memory, view.bias, weighed) for view in memory.sources]
        mixed = torch.stack([context for context, _ in attended], dim=2).unflatten(-1, (-1, query.shape[-1]))
        per_layer = self.within.project_output(query[:, :, None, None], mixed)
        contexts = self.pick_layers(query[:, :, None], per_layer)
        looks = tuple(self.by_layer(weights) for _, weights in attended if weights is not None)
        return replace(self.across(query, contexts, memory.present[:, None]), looks=looks)

    @abstractmethod
    def across(self, query: Tensor, contexts: Tensor, present: Tensor) -> Aggregated:
        """query (B, N, D), contexts (B, N, V, D) one per view, present (B, 1, V)"""


aggregators: Registry[Aggregator] = Registry("aggregator")
