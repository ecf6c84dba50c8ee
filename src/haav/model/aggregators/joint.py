from __future__ import annotations

import torch
from torch import Tensor

from haav.model.aggregators.base import ViewAggregator, aggregators
from haav.model.layers import masked_softmax
from haav.types import Aggregated, Memory


@aggregators.register("joint")
class JointAggregator(ViewAggregator):
    """One attention over the tokens of all views: the share of it that a view draws is how much it is trusted. Ours.

    It computes what `concat_tokens` does, so a word picks its tokens wherever they are, and says of each word what
    `hierarchical` does: a softmax over all tokens is one across views times one within each.
    """

    exposes_weights = True

    def forward(self, query: Tensor, memory: Memory) -> Aggregated:
        asked = self.within.ask(query).unsqueeze(1)
        masks = [view.mask & memory.present[:, [number]] for number, view in enumerate(memory.sources)]
        scores = torch.cat([asked @ view.memory.keys.transpose(-1, -2) for view in memory.sources], dim=-1)
        shares = masked_softmax(scores, torch.cat(masks, dim=1)[:, None, None, None])  # (B, L, H, N, tokens)
        parts = torch.split(shares, [mask.shape[1] for mask in masks], dim=-1)
        mixed = [part @ view.memory.values for part, view in zip(parts, memory.sources, strict=True)]
        found = torch.stack(mixed).sum(dim=0).transpose(2, 3).flatten(-2)  # (B, L, N, D)
        context = self.pick_layers(query, self.within.finish(query[:, :, None], found.transpose(1, 2)))
        drawn = torch.stack([part.sum(dim=-1) for part in parts], dim=-1)  # (B, L, H, N, V)
        looks = tuple(part / part.sum(dim=-1, keepdim=True).clamp(min=1e-9) for part in parts)
        return Aggregated(context, drawn.mean(dim=1).transpose(1, 2), looks)
