from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from haav.model.aggregators.base import TwoTierAggregator, aggregators
from haav.model.layers import SetAttention
from haav.types import Aggregated


@aggregators.register("hierarchical")
class HierarchicalAggregator(TwoTierAggregator):
    """Attend within each view (Lv1), then across views (Lv2) (paper §3.4, Fig. 2 right).

    Lv1 serves every view, so parameters do not grow with V. Lv2 sees one token per view; its
    softmax says, word by word, which view is trusted. A view that a photo lacks gets exactly 0.
    """

    exposes_weights = True

    def __init__(self, views: Sequence[str], layers: int, d_model: int, heads: int, dropout: float) -> None:
        super().__init__(views, layers, d_model, heads, dropout)
        self.across_views = SetAttention(d_model, heads, dropout)

    def across(self, query: Tensor, contexts: Tensor, present: Tensor) -> Aggregated:
        context, weights = self.across_views(query, contexts, present)
        return Aggregated(context, weights)
