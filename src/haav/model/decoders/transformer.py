"""Words in, next-word scores out: self-attention → aggregator → feed-forward, M times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from haav.model.aggregators import Aggregator
from haav.model.decoders.base import Decoder, DecoderSizes, decoders
from haav.model.layers import Attention, EncoderLayer, FeedForward, sinusoids
from haav.model.recompute import Recomputable
from haav.types import Aggregated, Cache, EncodedViews, Memory


class DecoderLayer(Recomputable):
    def __init__(self, aggregator: Aggregator, d_model: int, heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(d_model, heads, dropout)
        self.aggregator = aggregator
        self.feed_forward = FeedForward(d_model, d_ff, dropout)

    def forward(
        self, words: Tensor, past: Tensor | None, causal: Tensor | None, memory: Memory, weighed: bool
    ) -> tuple[Tensor, Aggregated, Tensor]:
        """words (B, C, T, D); keys and values (B·C, P, 2D) of the words before them
        → the words (B, C, T, D), and the keys and values with theirs (B·C, P + T, 2D)"""
        photos, captions, new, width = words.shape
        words = words.flatten(0, 1)
        known = self.attention.key_value(words)
        if past is not None:
            known = torch.cat([past, known], dim=1)
        attended = self.attention(words, self.attention.split_known(known), causal, weighed=False)
        # All captions of a photo ask its one memory: no copy per caption or beam.
        gathered: Aggregated = self.aggregator(attended.view(photos, captions * new, width), memory, weighed)
        return self.feed_forward(gathered.context).view(photos, captions, new, width), gathered, known


@decoders.register("transformer")
class TransformerDecoder(Decoder):
    uses_aggregator = True
    exportable = True
    encoder_layer = EncoderLayer

    @staticmethod
    def least_rows(encoder_layers: int, slots: int, sizes: DecoderSizes) -> int:
        layers = encoder_layers + sizes.layers
        return sizes.max_words + layers * (sizes.d_model + sizes.d_ff) + 2 * encoder_layers * slots

    def build(self, new_aggregator: Callable[[], Aggregator], sizes: DecoderSizes) -> None:
        def new_layer() -> DecoderLayer:
            return DecoderLayer(new_aggregator(), sizes.d_model, sizes.heads, sizes.d_ff, sizes.dropout)

        self.layers = nn.ModuleList(new_layer() for _ in range(sizes.layers))
        # Row 0 is unused: the release counts words from 1.
        self.register_buffer("positions", sinusoids(sizes.max_words + 1, sizes.d_model))

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One per layer"""
        return tuple(layer.aggregator for layer in self.layers if isinstance(layer, DecoderLayer))

    @property
    def exposes_weights(self) -> bool:
        return all(aggregator.exposes_weights for aggregator in self.aggregators)

    def init_cache(self, encoded: EncodedViews) -> Cache:
        """The cache before the first word: cross-attention keys and values, once per photo."""
        return Cache(tuple(aggregator.build_memory(encoded) for aggregator in self.aggregators), words=())

    def read(self, tokens: Tensor, cache: Cache, weighed: int | None = 0) -> tuple[Tensor, list[Aggregated], Cache]:
        new = tokens.shape[2]
        end = cache.length + new
        positions = self.get_buffer("positions")
        if end >= len(positions):
            raise ValueError(f"caption of {end} words: this model has positions for {len(positions) - 1}.")
        causal = None
        if new > 1:
            causal = torch.ones(new, end, dtype=torch.bool, device=tokens.device).tril(cache.length)
        x = self.words(tokens) + positions[cache.length + 1 : end + 1]
        gathered: list[Aggregated] = []
        words: list[Tensor] = []
        first = 0 if weighed is None else len(self.layers) - weighed
        for index, layer in enumerate(self.layers):
            past = cache.words[index] if cache.words else None
            x, aggregated, known = layer(x, past, causal, cache.memory[index], index >= first)
            gathered.append(aggregated)
            words.append(known)
        return x, gathered, Cache(cache.memory, tuple(words), end)
