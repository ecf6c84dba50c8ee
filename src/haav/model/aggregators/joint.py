from __future__ import annotations

from torch import Tensor

from haav.model.aggregators.base import ViewAggregator, aggregators, build_joint_memory
from haav.types import Aggregated, EncodedViews, Memory


@aggregators.register("joint")
class JointAggregator(ViewAggregator):
    """One attention over the tokens of all views: the share of it that a view draws is how much it is trusted. Ours.

    It computes what `concat_tokens` does, so a word picks its tokens wherever they are, and says of each word what
    `hierarchical` does: a softmax over all tokens is one across views times one within each.
    """

    exposes_weights = True

    def build_memory(self, encoded: EncodedViews) -> Memory:
        return build_joint_memory(self.within, encoded)

    def forward(self, query: Tensor, memory: Memory, weighed: bool = True) -> Aggregated:
        (source,) = memory.sources
        mixed, weights = self.within.attend(self.within.project_query(query), source.memory, source.bias, weighed)
        per_layer = self.within.project_output(query.unsqueeze(2), mixed.unflatten(-1, (-1, query.shape[-1])))
        context = self.pick_layers(query, per_layer)
        if not weighed:
            return Aggregated(context, None)
        assert memory.owners is not None
        assert weights is not None
        shares = self.by_layer(weights)
        drawn = shares @ memory.owners[:, None, None]  # (B, L, H, N, V)
        return Aggregated(context, drawn.mean(dim=1).transpose(1, 2), (shares,))
