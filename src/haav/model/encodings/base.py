"""The seam between views and decoder: `encoding(Views) -> EncodedViews`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import nn

from haav.model.embed import ViewEmbeddings
from haav.model.layers import Encoder, drop_views
from haav.registry import Registry
from haav.types import EmbeddedView, EncodedViews, Views


class Encoding(nn.Module, ABC):
    """Embeds the views, then encodes them in the way that a subclass says."""

    keeps_views: ClassVar[bool]
    """whether the result has one entry a view, so that views can be weighed and contrasted"""
    default_aggregator: ClassVar[str]

    def __init__(
        self, embed: ViewEmbeddings, new_encoder: Callable[[], Encoder], view_dropout: float, view_dropout_draw: str
    ) -> None:
        super().__init__()
        self.embed = embed
        self.view_dropout = view_dropout
        self.view_dropout_draw = view_dropout_draw
        self.build(new_encoder)

    @staticmethod
    def split(views: Sequence[str]) -> list[tuple[str, ...]]:
        """The views of each whole model that the strategy needs; more than one makes an ensemble."""
        return [tuple(views)]

    @property
    def names(self) -> tuple[str, ...]:
        """What the entries of the result are called."""
        return self.embed.names

    @abstractmethod
    def build(self, new_encoder: Callable[[], Encoder]) -> None:
        """Make the encoders that the strategy needs."""

    @abstractmethod
    def encode(self, views: tuple[EmbeddedView, ...], cls_only: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Embedded views → (tokens (B, L, S, D), mask (B, S)) for each entry of the result."""

    def forward(self, views: Views, cls_only: bool = False) -> EncodedViews:
        """`cls_only`: nobody will look at tokens other than [CLS], so there need be no others"""
        tokens, masks = zip(*self.encode(self.embed(views), cls_only), strict=True)
        present = torch.stack([mask.any(dim=1) for mask in masks], dim=1)
        if self.training and self.view_dropout:
            present = drop_views(present, self.view_dropout, self.view_dropout_draw)
        return EncodedViews(self.names, tokens, masks, present)


encodings: Registry[Encoding] = Registry("encoding")
