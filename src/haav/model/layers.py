"""Attention, feed-forward, positions and the three dropouts that every variant is built from.

Attention is written out as matrix products where its weights are wanted, and on a CPU in bfloat16.
Elsewhere the fused kernel keeps less memory, and while decoding it is faster. A fully masked row
is merely finite, never NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from haav.model.dropout import Dropout
from haav.model.linear import Linear, linear
from haav.model.recompute import Recomputable
from haav.types import KeyValues


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis where masked entries get exactly 0; all 0 where nothing is left."""
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)


def hide(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: 0 where the mask is True, elsewhere the lowest number, which softmax makes exactly 0."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def sinusoids(length: int, dim: int) -> Tensor:
    """(length, dim): sine in even columns, cosine in odd ones, wavelengths 2π … 10000·2π."""
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = positions * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(..., N, D) → (..., H, N, D/H)"""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-2, -3)


class _Projections(nn.Module):
    """The parameters of one multi-head attention with its residual and LayerNorm (post-norm).

    Keys and values are one product: they are always made from the same tokens.
    """

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (d_model // heads) ** -0.5
        self.query = Linear(d_model, d_model)
        self.key_value = Linear(d_model, 2 * d_model)
        self.output = Linear(d_model, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)
        for weight in (self.query.weight, *self.key_value.weight.chunk(2), self.output.weight):
            nn.init.xavier_uniform_(weight)
        for part in (self.query, self.key_value, self.output):
            nn.init.zeros_(part.bias)

    def project_output(self, query: Tensor, mixed: Tensor) -> Tensor:
        normed: Tensor = self.norm(query + self.dropout(self.output(mixed)))
        return normed


class Attention(_Projections):
    """Every query attends to every token of one sequence.

    With `slots`, learned keys and values stand beside the tokens' own (the M² memory): they are
    never masked, so a token always has something to attend to.
    """

    def __init__(self, d_model: int, heads: int, dropout: float, slots: int = 0) -> None:
        super().__init__(d_model, heads, dropout)
        self.slots = slots
        if slots:
            self.slot_keys = nn.Parameter(torch.randn(slots, d_model) * heads / d_model)
            self.slot_values = nn.Parameter(torch.randn(slots, d_model) / slots)

    def keys_values(self, tokens: Tensor) -> KeyValues:
        """tokens (..., S, D) → keys and values (..., H, S [+ slots], D/H), laid out so that no product copies them"""
        keys, values = (split_heads(part, self.heads) for part in self.key_value(tokens).chunk(2, dim=-1))
        if self.slots:
            # The scales are M²'s: slots start as strong as projected tokens.
            slot_keys = split_heads(self.slot_keys / self.scale, self.heads).to(keys.dtype)
            slot_values = split_heads(self.slot_values * math.sqrt(self.slots), self.heads).to(values.dtype)
            keys = torch.cat([keys, slot_keys.expand(*keys.shape[:-3], -1, -1, -1)], dim=-2)
            values = torch.cat([values, slot_values.expand(*values.shape[:-3], -1, -1, -1)], dim=-2)
        return KeyValues(keys.contiguous(), values.contiguous())

    def split_known(self, known: Tensor) -> KeyValues:
        """(..., P, 2D) that `key_value` made → keys and values (..., H, P, D/H), without a copy"""
        width = known.shape[-1] // (2 * self.heads)
        keys, values = known.view(*known.shape[:-1], 2, self.heads, width).transpose(-2, -4).unbind(-3)
        return KeyValues(keys, values)

    def project_query(self, query: Tensor) -> Tensor:
        """query (..., N, D) → (..., H, N, D/H): made once when the same query attends to several sequences"""
        return split_heads(self.query(query), self.heads)

    def attend(
        self, query: Tensor, memory: KeyValues, bias: Tensor | None, weighed: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, H, N, D/H), memory (B, L·H, S, D/H): each head attends to L sequences; bias (see `hide`) broadcasts
        → context (B, N, L·D), weights (B, L·H, N, S), or None unless `weighed`"""
        sequences = memory.keys.shape[-3] // self.heads
        query = query if sequences == 1 else query.repeat(1, sequences, 1, 1)
        if weighed or _is_slow_fused(query):
            scores = (query * self.scale) @ memory.keys.transpose(-1, -2)
            weights = (scores if bias is None else scores.add_(bias)).softmax(dim=-1)
            mixed = weights @ memory.values
        else:
            weights = None
            mixed = nn.functional.scaled_dot_product_attention(query, memory.keys, memory.values, bias)
        return mixed.transpose(-2, -3).flatten(-2), weights

    def forward(self, query: Tensor, memory: KeyValues, mask: Tensor | None, weighed: bool = True) -> Tensor:
        """query (..., N, D), mask True where attending is allowed, broadcast to (..., H, N, S) → (..., N, D)"""
        bias = None if mask is None else hide(mask, memory.keys.dtype)
        if bias is not None and self.slots:
            bias = nn.functional.pad(bias, (0, self.slots))
        context, _ = self.attend(self.project_query(query), memory, bias, weighed)
        return self.project_output(query, context)


def _is_slow_fused(query: Tensor) -> bool:
    """In bfloat16 on a CPU, the fused kernel takes 4 to 10 × as long as the products."""
    return query.dtype is torch.bfloat16 and query.device.type == "cpu"


class SetAttention(_Projections):
    """Every query looks at a handful of items of its own, and the weights are part of the result.

    Used across views (Lv2) and across encoder layers. Items of one query serve no other, so it is cheaper to carry
    the query into their space than the items into the query's: q·(K x) = (Kᵀ q)·x, and Σ w (V x) = V (Σ w x). That
    is two products a query instead of two an item. The softmax is always computed in the open; the key's bias adds
    the same to all items, so it falls out.
    """

    def forward(self, query: Tensor, items: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """query (..., D), items (..., V, D), mask (..., V) → (..., D), weights (..., H, V)

        `query` may have 1 where `items` has more: then it looks at several sets.
        """
        mixed, weights = self.mix(query, items, mask)
        return self.project_output(query, mixed), weights

    def mix(self, query: Tensor, items: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weighted values, before output, residual and norm"""
        keys, values = (self._by_head(weight) for weight in self.key_value.weight.chunk(2))
        heads = split_heads((self.query(query) * self.scale).unsqueeze(-2), self.heads)
        looking = _each_head(heads.squeeze(-2), keys)
        scores = looking @ items.transpose(-1, -2)
        weights = scores.softmax(dim=-1) if mask is None else masked_softmax(scores, mask.unsqueeze(-2))
        mixed = _each_head(weights @ items, values.transpose(1, 2))
        bias = self.key_value.bias.chunk(2)[1].view(self.heads, -1)
        mixed = mixed + (bias if mask is None else bias * mask.any(dim=-1)[..., None, None])
        return mixed.flatten(-2), weights

    def _by_head(self, weight: Tensor) -> Tensor:
        """(D, D) → (H, D/H, D)"""
        return weight.view(self.heads, -1, weight.shape[1])


def _each_head(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., H, A), weight (H, A, B) → (..., H, B): a matrix for each head"""
    by_head = x.flatten(0, -3).transpose(0, 1).contiguous()  # else each product copies it, in bfloat16 slowly
    return (by_head @ weight).transpose(0, 1).view(*x.shape[:-1], weight.shape[2])


class FeedForward(nn.Module):
    """Two linear maps with their residual and LayerNorm (post-norm)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.inner = Linear(d_model, d_ff)
        self.outer = Linear(d_ff, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → (..., D)"""
        inner, scale = self.dropout.after_relu(self.inner(x))
        outer = self.outer(inner) if scale == 1 else linear(inner, self.outer.weight * scale, self.outer.bias)
        normed: Tensor = self.norm(x + self.dropout(outer))
        return normed


class EncoderLayer(Recomputable):
    def __init__(self, d_model: int, heads: int, d_ff: int, slots: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(d_model, heads, dropout, slots)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)

    def forward(self, x: Tensor, mask: Tensor | None, queries: int | None = None) -> Tensor:
        """x (B, S, D), mask (B, S) → (B, S, D), or of the first `queries` tokens only"""
        visible = None if mask is None else mask[:, None, None]
        # The fused kernel gains only backward.
        weighed = not torch.is_grad_enabled()
        attended = self.attention(x[:, :queries], self.attention.keys_values(x), visible, weighed)
        encoded: Tensor = self.feed_forward(attended)
        return encoded


class Encoder(nn.Module):
    """N layers over one token sequence. Without layers, tokens stay as they are."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_ff: int,
        layers: int,
        slots: int,
        dropout: float,
        keep_all: bool,
        layer: type[nn.Module] = EncoderLayer,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(d_model, heads, d_ff, slots, dropout) for _ in range(layers))
        self.keep_all = keep_all

    def forward(self, x: Tensor, mask: Tensor, cls_only: bool = False) -> Tensor:
        """x (B, S, D), mask (B, S) → (B, L, S, D), the last layer last; L is 1 unless all are kept

        With `cls_only`, the last layer computes only the [CLS] token, so S is 1.
        """
        # Without padding no mask is needed. On a GPU the question would wait for all that was queued before it.
        visible = None if mask.device.type == "cpu" and bool(mask.all()) else mask
        if not len(self.layers):
            return x[:, None, : 1 if cls_only else None]
        outputs = []
        for layer in self.layers[:-1]:
            x = layer(x, visible)
            outputs.append(x[:, :1] if cls_only else x)
        outputs.append(self.layers[-1](x, visible, queries=1 if cls_only else None))
        return torch.stack(outputs if self.keep_all else outputs[-1:], dim=1)


def keep_channels(batch: int, channels: int, p: float, like: Tensor) -> Tensor:
    """(B, 1, D) multiplier that zeroes a channel with probability p, scaled to keep the mean (paper: p_c)."""
    kept = torch.rand(batch, 1, channels, device=like.device) >= p
    return kept.to(like.dtype) / (1 - p)


def drop_tokens(mask: Tensor, p: float) -> Tensor:
    """Drop each True with probability p, but never a row's last one: the luckiest draw always stays."""
    draws = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, -1.0)
    luckiest = torch.zeros_like(mask).scatter(1, draws.argmax(dim=1, keepdim=True), True)
    return mask & ((draws >= p) | luckiest)


def drop_views(present: Tensor, p: float, draw: str) -> Tensor:
    """(B, V): the views the decoder still sees, of a photo's own at least one (paper: p_v)."""
    if draw == "photo":
        return drop_tokens(present, p)
    # One draw for the whole batch; a photo that would lose its last view keeps what it has.
    thinned = present & drop_tokens(present.any(dim=0, keepdim=True), p)
    return torch.where(thinned.any(dim=1, keepdim=True), thinned, present)
