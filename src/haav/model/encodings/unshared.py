from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from haav.model.encodings.base import Encoding, encodings
from haav.model.layers import Encoder
from haav.types import EmbeddedView


@encodings.register("unshared")
class UnsharedEncoding(Encoding):
    """An encoder for each view: cost and parameters linear in V."""

    keeps_views = True
    default_aggregator = "hierarchical"

    def build(self, new_encoder: Callable[[], Encoder]) -> None:
        self.encoders = nn.ModuleDict({name: new_encoder() for name in self.embed.names})

    def encode(self, views: tuple[EmbeddedView, ...], cls_only: bool) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.encoders.values(), views, strict=True)
        return [(encoder(view.tokens, view.mask, cls_only), view.mask) for encoder, view in pairs]
