from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from haav.model.aggregators.base import Aggregator, aggregators, build_joint_memory
from haav.model.aggregators.gate import new_gate
from haav.model.layers import Attention
from haav.types import Aggregated, EncodedViews, Memory


@aggregators.register("concat_tokens")
class ConcatTokensAggregator(Aggregator):
    """One cross-attention over the tokens of all encoded views, the ordinary decoder.

    Where the decoder sees several encoder layers, sigmoid gates add them up: M²'s meshed decoder.
    """

    needs_views = False
    exposes_weights = False

    def __init__(self, views: Sequence[str], layers: int, d_model: int, heads: int, dropout: float) -> None:
        super().__init__(views, layers, d_model, heads, dropout)
        self.attention = Attention(d_model, heads, dropout)
        self.gates = nn.ModuleList(new_gate(d_model) for _ in range(layers if layers > 1 else 0))

    def build_memory(self, encoded: EncodedViews) -> Memory:
        return build_joint_memory(self.attention, encoded)

    def forward(self, query: Tensor, memory: Memory, weighed: bool = True) -> Aggregated:
        (source,) = memory.sources
        looked, _ = self.attention.attend(
            self.attention.project_query(query), source.memory, source.bias, weighed=False
        )
        per_layer = self.attention.project_output(query.unsqueeze(2), looked.unflatten(-1, (-1, query.shape[-1])))
        if not self.gates:
            return Aggregated(per_layer.squeeze(2), None)
        total = torch.zeros_like(query)
        for layer, gate in enumerate(self.gates):
            context = per_layer[:, :, layer]
            total = total + gate(torch.cat([query, context], dim=-1)).sigmoid() * context
        return Aggregated(total / len(self.gates) ** 0.5, None)
