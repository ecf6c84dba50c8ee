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

    def forward(self, query: Tensor, memory: Memory) -> Aggregated:
        (source,) = memory.sources
        heads = self.within.project_query(query).unsqueeze(1)
        mixed, shares = self.within.attend(heads, source.memory, source.mask[:, None, None, None])
        context = self.pick_layers(query, self.within.project_output(query.unsqueeze(1), mixed).transpose(1, 2))
        assert memory.owners is not None
        drawn = shares @ memory.owners[:, None, None]  # (B, L, H, N, V)
        return Aggregated(context, drawn.mean(dim=1).transpose(1, 2), (shares,))
