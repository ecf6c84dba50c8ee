"""Words in, next-word scores out: self-attention → aggregator → feed-forward, M times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from haav.model.aggregators import Aggregator
from haav.model.decoders.base import Decoder, DecoderSizes, decoders
from haav.model.layers import Attention, EncoderLayer, FeedForward, sinusoids
from haav.types import Aggregated, Cache, EncodedViews, KeyValues, Memory


class DecoderLayer(nn.Module):
    def __init__(self, aggregator: Aggregator, d_model: int, heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(d_model, heads, dropout)
        self.aggregator = aggregator
        self.feed_forward = FeedForward(d_model, d_ff, dropout)

    def forward(
        self, words: Tensor, past: KeyValues | None, causal: Tensor | None, memory: Memory
    ) -> tuple[Tensor, Aggregated, KeyValues]:
        """words (B, C, T, D), of which the past P are in `past` → the same, and the past with them in it"""
        known = self.attention.keys_values(words)
        if past is not None:
            known = KeyValues(torch.cat([past.keys, known.keys], -2), torch.cat([past.values, known.values], -2))
        attended = self.attention(words, known, causal)
        # All captions of a photo ask its one memory: no copy per caption or beam.
        gathered: Aggregated = self.aggregator(attended.flatten(1, 2), memory)
        return self.feed_forward(gathered.context).view_as(words), gathered, known


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

    def read(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, list[Aggregated], Cache]:
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
        words: list[KeyValues] = []
        for index, layer in enumerate(self.layers):
            past = cache.words[index] if cache.words else None
            x, aggregated, new_past = layer(x, past, causal, cache.memory[index])
            gathered.append(aggregated)
            words.append(new_past)
        return x, gathered, Cache(cache.memory, tuple(words), end)
