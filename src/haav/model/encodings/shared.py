from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from haav.model.encodings.base import Encoding, encodings
from haav.model.layers import Encoder
from haav.types import EmbeddedView


@encodings.register("shared")
class SharedEncoding(Encoding):
    """One encoder reads each view on its own (paper §3.3): cost linear in V, parameters constant."""

    keeps_views = True
    default_aggregator = "hierarchical"

    def build(self, new_encoder: Callable[[], Encoder]) -> None:
        self.encoder = new_encoder()

    def encode(self, views: tuple[EmbeddedView, ...], cls_only: bool) -> list[tuple[Tensor, Tensor]]:
        return [(self.encoder(view.tokens, view.mask, cls_only), view.mask) for view in views]
