from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from haav.model.aggregators.base import TwoTierAggregator, aggregators
from haav.model.layers import masked_softmax
from haav.types import Aggregated


@aggregators.register("weighted_mean")
class WeightedMeanAggregator(TwoTierAggregator):
    """Attend within each view, then take the mean over views, weighed anew for each word and head. Ours.

    What was found goes to the words as it is. The paper's Lv2 sends it through a second attention with a residual of
    its own, which leaves less of the photo in it until much is learnt: `python -m benchmarks signal`, docs/results.md.
    """

    exposes_weights = True

    def __init__(self, views: Sequence[str], layers: int, d_model: int, heads: int, dropout: float) -> None:
        super().__init__(views, layers, d_model, heads, dropout)
        self.heads, self.scale = heads, (d_model // heads) ** -0.5
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model, bias=False)  # a bias would add the same to all views
        for linear in (self.query, self.key):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(self.query.bias)

    def across(self, query: Tensor, found: Tensor, present: Tensor) -> Aggregated:
        asked = self.query(query).unflatten(-1, (self.heads, 1, -1)) * self.scale
        keys, parts = (x.unflatten(-1, (self.heads, -1)).transpose(2, 3) for x in (self.key(found), found))
        scores = (asked @ keys.transpose(-1, -2)).squeeze(-2)
        weights = masked_softmax(scores, present.unsqueeze(-2))
        return Aggregated((weights.unsqueeze(-2) @ parts).flatten(2), weights)
