"""AoANet: Huang et al., "Attention on attention for image captioning", ICCV 2019.

Attention on attention asks whether what was attended to fits the question: an information vector times a gate, both
made from the query and the result of attention. It is in each layer of the encoder, which refines the tokens and has no
feed-forward block, and in the decoder behind an LSTM. All widths are `d_model`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from haav.model.aggregators import Aggregator
from haav.model.decoders.base import DecoderSizes, RecurrentDecoder, decoders, lstm, visible_tokens
from haav.model.dropout import Dropout
from haav.model.layers import hide, split_heads
from haav.model.recompute import Recomputable
from haav.types import Cache, EncodedViews, KeyValues, Memory, Source


class AttentionOnAttention(nn.Module):
    """Multi-head attention, then (W [query, attended] + b) · sigmoid(W' [query, attended] + b')  (eq. 2 to 5)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key_value = nn.Linear(d_model, 2 * d_model, bias=False)
        self.information = nn.Linear(2 * d_model, d_model)
        self.gate = nn.Linear(2 * d_model, d_model)

    def keys_values(self, tokens: Tensor) -> KeyValues:
        """tokens (B, S, D) → (B, H, S, D/H)"""
        keys, values = (split_heads(part, self.heads) for part in self.key_value(tokens).chunk(2, dim=-1))
        return KeyValues(keys, values)

    def forward(self, x: Tensor, memory: KeyValues, bias: Tensor | None) -> Tensor:
        """x (B, N, D); bias (B, 1, 1, S), added to scores → (B, N, D)"""
        query = self.query(x)
        heads = split_heads(query, self.heads)
        scores = heads @ memory.keys.transpose(-1, -2) * heads.shape[-1] ** -0.5
        weights = (scores if bias is None else scores + bias).softmax(dim=-1)
        attended = (weights @ memory.values).transpose(1, 2).flatten(2)
        both = torch.cat([query, attended], dim=-1)
        answer: Tensor = self.information(both) * self.gate(both).sigmoid()
        return answer


class RefiningLayer(Recomputable):
    """norm(x + attention on attention of x)  (eq. 6): without memory slots and feed-forward block"""

    def __init__(self, d_model: int, heads: int, d_ff: int, slots: int, dropout: float) -> None:
        super().__init__()
        self.refine = AttentionOnAttention(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, queries: int | None = None) -> Tensor:
        asking = x[:, :queries]
        bias = None if mask is None else hide(mask[:, None, None], x.dtype)
        refined: Tensor = self.norm(asking + self.dropout(self.refine(asking, self.refine.keys_values(x), bias)))
        return refined


@decoders.register("aoa")
class AoaDecoder(RecurrentDecoder):
    encoder_layer = RefiningLayer
    state_size = 3  # hidden and memory of the LSTM, and the last context

    @staticmethod
    def least_rows(encoder_layers: int, slots: int, sizes: DecoderSizes) -> int:
        return (19 + 7 * encoder_layers) * sizes.d_model

    def build(self, new_aggregator: Callable[[], Aggregator], sizes: DecoderSizes) -> None:
        self.lstm = nn.LSTMCell(2 * sizes.d_model, sizes.d_model)
        self.attention = AttentionOnAttention(sizes.d_model, sizes.heads)

    def init_cache(self, encoded: EncodedViews) -> Cache:
        tokens, mask, mean = visible_tokens(encoded)
        source = Source(self.attention.keys_values(tokens), hide(mask[:, None, None], tokens.dtype))
        return Cache((Memory((source,), encoded.present, summary=mean),), words=())

    def step(self, words: Tensor, state: tuple[Tensor, ...], memory: Memory) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, cell, context = state
        assert memory.summary is not None
        x = torch.cat([words, memory.summary[:, None] + context], dim=-1)
        hidden, cell = lstm(self.lstm, x, hidden, cell)
        (source,) = memory.sources
        context = self.attention(hidden, source.memory, source.bias)
        return context, (hidden, cell, context)
