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
        self, words: Tensor, past: Tensor | None, visible: Tensor | None, memory: Memory, weighed: bool
    ) -> tuple[Tensor, Aggregated, Tensor]:
        """words (B, C, T, D); keys and values (B·C, P, 2D) of the words before them; the words that each of them
        attends to, True in (T, P + T), or in (B·C, 1, T, P + T) where captions differ
        → the words (B, C, T, D), and the keys and values with theirs (B·C, P + T, 2D)"""
        photos, captions, new, width = words.shape
        words = words.flatten(0, 1)
        known = self.attention.key_value(words)
        if past is not None:
            known = torch.cat([past, known], dim=1)
        attended = self.attention(words, self.attention.split_known(known), visible, weighed=False)
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
        positions = self._positions(end)
        causal = None
        if new > 1:
            causal = torch.ones(new, end, dtype=torch.bool, device=tokens.device).tril(cache.length)
        x = self.words(tokens) + positions[cache.length + 1 : end + 1]
        return self._through_layers(x, causal, cache, weighed)

    def read_whole(self, tokens: Tensor, targets: Tensor, cache: Cache) -> Tensor:
        """The captions of a photo are read as one row of their words, padded to the photo with the most words instead
        of each caption to the longest. A word attends to itself and to the words before it in its own caption."""
        length = tokens.shape[2]
        positions = self._positions(length)
        needed = targets.flip(2).cumsum(dim=2).flip(2).flatten(1) > 0  # what follows the last target is not read
        count = int(needed.sum(dim=1).max())
        order = needed.sort(dim=1, descending=True, stable=True).indices[:, :count]
        caption, place = order // length, order % length
        own_past = (caption[:, :, None] == caption[:, None]) & (place[:, :, None] >= place[:, None])
        x = self.words(tokens.flatten(1).gather(1, order)) + positions[place + 1]
        states, _, _ = self._through_layers(x[:, None], own_past[:, None], cache, weighed=0)
        return states.squeeze(1)[targets.flatten(1).gather(1, order)]

    def _positions(self, words: int) -> Tensor:
        positions = self.get_buffer("positions")
        if words >= len(positions):
            raise ValueError(f"caption of {words} words: this model has positions for {len(positions) - 1}.")
        return positions

    def _through_layers(
        self, x: Tensor, visible: Tensor | None, cache: Cache, weighed: int | None
    ) -> tuple[Tensor, list[Aggregated], Cache]:
        """embedded words (B, C, T, D), the words that each attends to → as `read` gives them"""
        end = cache.length + x.shape[2]
        gathered: list[Aggregated] = []
        words: list[Tensor] = []
        first = 0 if weighed is None else len(self.layers) - weighed
        for index, layer in enumerate(self.layers):
            past = cache.words[index] if cache.words else None
            x, aggregated, known = layer(x, past, visible, cache.memory[index], index >= first)
            gathered.append(aggregated)
            words.append(known)
        return x, gathered, Cache(cache.memory, tuple(words), end)
