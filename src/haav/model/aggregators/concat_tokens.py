from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from haav.model.aggregators.base import Aggregator, aggregators, remember_together
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

    def remember(self, encoded: EncodedViews) -> Memory:
        return remember_together(self.attention, encoded)

    def forward(self, query: Tensor, memory: Memory) -> Aggregated:
        (source,) = memory.sources
        looked, _ = self.attention.look(
            self.attention.ask(query).unsqueeze(1), source.memory, source.mask[:, None, None, None]
        )
        per_layer = self.attention.finish(query.unsqueeze(1), looked)
        if not self.gates:
            return Aggregated(per_layer.squeeze(1), None)
        total = torch.zeros_like(query)
        for number, gate in enumerate(self.gates):
            found = per_layer[:, number]
            total = total + gate(torch.cat([query, found], dim=-1)).sigmoid() * found
        return Aggregated(total / len(self.gates) ** 0.5, None)
