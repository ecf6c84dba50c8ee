"""HAAV (CVPR 2023) in one page: read this file first.

A photo arrives as *views*: token sequences that frozen networks made of it (objects, grid, text).

1. `encode`: one shared transformer encoder reads each view on its own, as if the views were
   augmentations of the photo. Cost grows linearly with the views, parameters not at all.
   The encoded [CLS] of each view also feeds the contrastive loss (contrast.py).
2. `decode`: each decoder layer attends first within each view, then across views
   (aggregators/hierarchical.py), so every word weighs the views anew. Those weights are
   part of the result.

Encoding, decoder and aggregator are parts that can be exchanged; this class only joins them.
"""

from __future__ import annotations

from torch import Tensor, nn

from haav.model.decoders import Decoder
from haav.model.encodings import Encoding
from haav.types import Cache, Decoded, EncodedViews, Views


class Haav(nn.Module):
    def __init__(self, encoding: Encoding, decoder: Decoder) -> None:
        super().__init__()
        self.encoding = encoding
        self.decoder = decoder

    @property
    def members(self) -> tuple[Haav, ...]:
        """The models that are trained each for itself; see `Ensemble`."""
        return (self,)

    def encode(self, views: Views) -> EncodedViews:
        encoded: EncodedViews = self.encoding(views)
        return encoded

    def init_cache(self, encoded: EncodedViews) -> Cache:
        """The cache before the first word. Its keys and values serve every caption of a photo."""
        return self.decoder.init_cache(encoded)

    def decode(self, tokens: Tensor, cache: Cache, weighed: int | None = None) -> Decoded:
        """The next words of C captions a photo: tokens (B, C, T) → scores, view weights, new cache.

        With a fresh cache and whole captions this is teacher forcing; with one word it is a step. The
        last `weighed` layers give their view weights; None: all of them.
        """
        decoded: Decoded = self.decoder(tokens, cache, weighed)
        return decoded

    def teacher_force(self, tokens: Tensor, targets: Tensor, encoded: EncodedViews) -> Tensor:
        """For losses: whole captions (B, C, T) → logits (N, words) of what follows each of the N tokens that have a
        target, (B, C, T) bool. The output layer, the largest product of all, skips padding."""
        logits: Tensor = self.decoder.output(self.decoder.read_whole(tokens, targets, self.init_cache(encoded)))
        return logits

    def forward(self, views: Views, tokens: Tensor) -> Decoded:
        return self.decode(tokens, self.init_cache(self.encode(views)))
