from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from haav.model.aggregators.base import TwoTierAggregator, aggregators
from haav.types import Aggregated


def new_gate(d_model: int) -> nn.Linear:
    """How much of a context to let through, channel by channel, from (query, context)."""
    gate = nn.Linear(2 * d_model, d_model)
    nn.init.xavier_uniform_(gate.weight)
    nn.init.zeros_(gate.bias)
    return gate


class GateAggregator(TwoTierAggregator):
    """Attend within each view, then add the views up through a gate for each.

    M² gates encoder layers in this way; the paper's ablation gates views.
    """

    exposes_weights = False
    squash: Callable[[Tensor], Tensor]

    def __init__(self, views: Sequence[str], layers: int, d_model: int, heads: int, dropout: float) -> None:
        super().__init__(views, layers, d_model, heads, dropout)
        self.gates = nn.ModuleDict({view: new_gate(d_model) for view in views})

    def across(self, query: Tensor, contexts: Tensor, present: Tensor) -> Aggregated:
        kept = present[..., None].to(contexts.dtype)
        total = torch.zeros_like(query)
        for index, gate in enumerate(self.gates.values()):
            context = contexts[:, :, index]
            total = total + self.squash(gate(torch.cat([query, context], dim=-1))) * context * kept[:, :, index]
        return Aggregated(total * kept.sum(dim=2).clamp(min=1).rsqrt(), None)


@aggregators.register("sigmoid")
class SigmoidAggregator(GateAggregator):
    squash = staticmethod(torch.sigmoid)


@aggregators.register("tanh")
class TanhAggregator(GateAggregator):
    squash = staticmethod(torch.tanh)
