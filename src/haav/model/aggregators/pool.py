from __future__ import annotations

import torch
from torch import Tensor

from haav.model.aggregators.base import TwoTierAggregator, aggregators
from haav.types import Aggregated


@aggregators.register("mean")
class MeanAggregator(TwoTierAggregator):
    """Attend within each view, then take the mean over the views a photo has."""

    exposes_weights = False

    def across(self, query: Tensor, contexts: Tensor, present: Tensor) -> Aggregated:
        kept = present[..., None]
        total = contexts.masked_fill(~kept, 0.0).sum(dim=2)
        return Aggregated(total / kept.sum(dim=2).clamp(min=1), None)


@aggregators.register("max")
class MaxAggregator(TwoTierAggregator):
    """Attend within each view, then take each channel's largest value over the views a photo has."""

    exposes_weights = False

    def across(self, query: Tensor, contexts: Tensor, present: Tensor) -> Aggregated:
        kept = present[..., None]
        largest = contexts.masked_fill(~kept, torch.finfo(contexts.dtype).min).amax(dim=2)
        return Aggregated(largest.masked_fill(~kept.any(dim=2), 0.0), None)
