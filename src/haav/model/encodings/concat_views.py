from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from haav.model.encodings.base import Encoding, encodings
from haav.model.layers import Encoder
from haav.types import EmbeddedView


@encodings.register("concat_views")
class ConcatViewsEncoding(Encoding):
    """All views as one long sequence (paper §3.2): attention quadratic in V, parameters constant."""

    keeps_views = False
    default_aggregator = "concat_tokens"

    @property
    def names(self) -> tuple[str, ...]:
        return ("all",)

    def build(self, new_encoder: Callable[[], Encoder]) -> None:
        self.encoder = new_encoder()

    def encode(self, views: tuple[EmbeddedView, ...], cls_only: bool) -> list[tuple[Tensor, Tensor]]:
        tokens = torch.cat([view.tokens for view in views], dim=1)
        mask = torch.cat([view.mask for view in views], dim=1)
        return [(self.encoder(tokens, mask, cls_only), mask)]
