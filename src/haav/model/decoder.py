"""Words in, next-word scores out: self-attention → aggregator → feed-forward, M times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from haav.model.aggregators import Aggregator
from haav.model.layers import Attention, FeedForward, sinusoids
from haav.types import Aggregated, Cache, Decoded, EncodedViews, KeyValues, Memory


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


class Decoder(nn.Module):
    def __init__(
        self, new_layer: Callable[[], DecoderLayer], layers: int, d_model: int, vocabulary_size: int, max_words: int
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, d_model)
        self.layers = nn.ModuleList(new_layer() for _ in range(layers))
        self.output = nn.Linear(d_model, vocabulary_size, bias=False)
        # Row 0 is unused: the release counts words from 1.
        self.register_buffer("positions", sinusoids(max_words + 1, d_model))

    def add_words(self, shares: Tensor) -> None:
        """Add a word per row of `shares` (new words, words). It starts as that mixture of the words before it."""
        for layer in (self.words, self.output):
            layer.weight = nn.Parameter(torch.cat([layer.weight, shares @ layer.weight]).detach())
        self.words.num_embeddings = self.output.out_features = len(self.words.weight)

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One per layer"""
        return tuple(layer.aggregator for layer in self.layers if isinstance(layer, DecoderLayer))

    def init_cache(self, encoded: EncodedViews) -> Cache:
        """The cache before the first word: cross-attention keys and values, once per photo."""
        return Cache(tuple(aggregator.build_memory(encoded) for aggregator in self.aggregators), words=())

    def forward(self, tokens: Tensor, cache: Cache) -> Decoded:
        """tokens (B, C, T) int64, the next T words of C captions of each photo"""
        states, gathered, cache = self.read(tokens, cache)
        given = [layer.weights for layer in gathered if layer.weights is not None]
        weights = [part.view(*tokens.shape, *part.shape[2:]) for part in given]
        looks = tuple(layer.looks for layer in gathered)
        return Decoded(self.output(states), torch.stack(weights, dim=3) if weights else None, cache, looks)

    def read(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, list[Aggregated], Cache]:
        """The same without the scores: (B, C, T, D) states that `output` turns into scores, what each layer gathered"""
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
