from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

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


@aggregators.register("hierarchical_from_mean")
class HierarchicalFromMeanAggregator(HierarchicalAggregator):
    """The same two tiers with the same parameters, which begin as the mean over views and learn to differ. Ours.

    The results of Lv1 contain the word's own state already. Lv2 of the paper adds it once more and passes the results
    through two random maps, so at first little of the photo reaches the words. Here Lv2 adds nothing, its norm is that
    of the query, all views start with the same weight, and the maps of the values start as the identity.
    """

    def __init__(self, views: Sequence[str], layers: int, d_model: int, heads: int, dropout: float) -> None:
        super().__init__(views, layers, d_model, heads, dropout)
        _, values = self.across_views.key_value.weight.chunk(2)
        nn.init.zeros_(self.across_views.query.weight)
        nn.init.eye_(values)
        nn.init.eye_(self.across_views.output.weight)

    def across(self, query: Tensor, contexts: Tensor, present: Tensor) -> Aggregated:
        mixed, weights = self.across_views.mix(self.across_views.norm(query), contexts, present)
        return Aggregated(self.across_views.output(mixed), weights)
