"""From a view as its extractor made it to tokens of the model's width, [CLS] in front."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from haav.model.dropout import Dropout
from haav.model.layers import drop_tokens, keep_channels, sinusoids
from haav.model.linear import Linear
from haav.model.recompute import Recomputable
from haav.types import EmbeddedView, View, Views, ViewSpec

GEOMETRY = 6
"""numbers drawn from a box: its four sides, width and height"""


class ViewEmbedding(Recomputable):
    """LayerNorm → Linear → channel dropout → positions → [CLS] → token dropout, for one view.

    Integer positions (crop, rank, row …) are frozen sinusoids; boxes pass through a learned map.
    """

    def __init__(
        self, spec: ViewSpec, d_model: int, learned_cls: bool, token_dropout: float, dropped_is_padding: bool
    ) -> None:
        super().__init__()
        self.spec = spec
        self.token_dropout = token_dropout
        self.dropped_is_padding = dropped_is_padding
        self.norm = nn.LayerNorm(spec.dim)
        self.project = Linear(spec.dim, d_model)
        self.geometry = nn.Linear(GEOMETRY, d_model, bias=False) if spec.boxes else None
        self.cls = nn.Parameter(torch.randn(d_model) * d_model**-0.5) if learned_cls else None
        for name, size in spec.indices.items():
            self.register_buffer(f"{name}_positions", sinusoids(size, d_model))

    def forward(self, view: View, drop_channels: nn.Module | Tensor) -> EmbeddedView:
        """`drop_channels`: element dropout, or the (B, 1, D) multiplier that all views share"""
        hidden = ~view.mask[..., None]  # whatever lies in padding, NaN too, must not reach a gradient
        tokens = self.project(self.norm(view.tokens.to(self.norm.weight.dtype).masked_fill(hidden, 0.0)))
        tokens = tokens * drop_channels if isinstance(drop_channels, Tensor) else drop_channels(tokens)
        for name in self.spec.indices:
            tokens = tokens + self.get_buffer(f"{name}_positions")[view.indices[name].masked_fill(~view.mask, 0)]
        if self.geometry is not None:
            assert view.boxes is not None
            sides = view.boxes.to(self.geometry.weight.dtype).masked_fill(hidden, 0.0)
            tokens = tokens + self.geometry(torch.cat([sides, sides[..., 2:] - sides[..., :2]], dim=-1))
        tokens = tokens.masked_fill(hidden, 0.0)

        cls = self._cls(tokens, view.mask)
        kept = view.mask
        if self.training and self.token_dropout and kept.shape[1]:
            kept = drop_tokens(kept, self.token_dropout)
            tokens = tokens.masked_fill(~kept[..., None], 0.0)
        mask = kept if self.dropped_is_padding else view.mask
        has_view = view.mask.any(dim=1, keepdim=True)
        return EmbeddedView(torch.cat([cls, tokens], dim=1), torch.cat([has_view, mask], dim=1))

    def _cls(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, 1, D)"""
        if self.cls is not None:
            return self.cls.to(tokens.dtype).expand(tokens.shape[0], 1, -1)
        real = mask.sum(dim=1, keepdim=True).clamp(min=1)[..., None]
        return tokens.sum(dim=1, keepdim=True) / real


class ViewEmbeddings(nn.Module):
    """Every view by name, in the model's own order whatever order they come in."""

    def __init__(
        self,
        specs: Mapping[str, ViewSpec],
        d_model: int,
        learned_cls: bool,
        channel_dropout: float,
        whole_channels: bool,
        token_dropout: float,
        dropped_is_padding: bool,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.whole_channels = whole_channels
        self.channel_dropout = Dropout(channel_dropout)
        self.by_name = nn.ModuleDict(
            {
                name: ViewEmbedding(spec, d_model, learned_cls, token_dropout, dropped_is_padding)
                for name, spec in specs.items()
            }
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    def spec(self, name: str) -> ViewSpec:
        embedding = self.by_name[name]
        assert isinstance(embedding, ViewEmbedding)
        return embedding.spec

    def forward(self, views: Views) -> tuple[EmbeddedView, ...]:
        """`views` as `check_views` accepts them; one that is left out is absent for every photo"""
        first = next(iter(views.values())).tokens
        drop: nn.Module | Tensor = self.channel_dropout
        if self.whole_channels and self.training and self.channel_dropout.p:
            weight = next(self.parameters())
            drop = keep_channels(len(first), self.d_model, self.channel_dropout.p, weight)
        complete = (
            views[name] if name in views else absent(self.spec(name), len(first), first.device) for name in self.names
        )
        return tuple(embed(view, drop) for embed, view in zip(self.by_name.values(), complete, strict=True))


def absent(spec: ViewSpec, batch: int, device: torch.device | str) -> View:
    """The view that no photo of the batch has: no tokens at all."""
    return View(
        torch.zeros(batch, 0, spec.dim, device=device),
        torch.zeros(batch, 0, dtype=torch.bool, device=device),
        {name: torch.zeros(batch, 0, dtype=torch.int64, device=device) for name in spec.indices},
        torch.zeros(batch, 0, 4, device=device) if spec.boxes else None,
    )
