"""Decoding the way the released code works, kept as the yardstick: slow on purpose, the same captions.

All views are padded to the longest. At every step the encoder's output is gathered for each beam and made into
keys and values anew, for each encoder layer; so are the words said so far. The whole vocabulary times the beams is
sorted, and the search goes on to the last step whether captions have ended or not. The momentum encoder, which only
training needs, runs too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from haav.model.haav import Haav
from haav.model.layers import Attention, SetAttention, split_heads
from haav.text import BOS, EOS, PAD
from haav.types import View, Views


@torch.no_grad()
def plain_beam_search(model: Haav, momentum: Haav, views: Views, beam: int, max_words: int) -> Tensor:
    """(B, beam, max_words) words, the most probable caption first; `model` with all encoder layers, hierarchical"""
    longest = max(view.tokens.shape[1] for view in views.values())
    views = {name: _pad(view, longest) for name, view in views.items()}
    encoded = model.encode(views)
    momentum.encode(views)
    memory, mask = torch.stack(encoded.tokens, dim=1), torch.stack(encoded.masks, dim=1)  # (B, V, L, S, D), (B, V, S)
    photos = len(memory)
    totals, ended = torch.zeros(photos, 1), torch.zeros(photos, 1, dtype=torch.bool)
    tokens = torch.full((photos, 1, 1), BOS)
    past: list[Tensor] = []
    for _ in range(max_words):
        beams = tokens.shape[1]
        own_memory, own_mask = (part.repeat_interleave(beams, dim=0) for part in (memory, mask))
        logits, past = _step(model, tokens.flatten(0, 1), past, own_memory, own_mask)
        logprobs = logits.log_softmax(dim=-1).view(photos, beams, -1)
        size = logprobs.shape[2]
        logprobs[ended] = -torch.inf
        logprobs[..., PAD][ended] = 0.0
        ranked = (totals[..., None] + logprobs).view(photos, -1).sort(dim=1, descending=True)
        totals, chosen = ranked.values[:, :beam], ranked.indices[:, :beam]
        parents, last = chosen // size, chosen % size
        rows = (parents + beams * torch.arange(photos)[:, None]).flatten()
        tokens = torch.cat([tokens.flatten(0, 1)[rows].view(photos, beam, -1), last[..., None]], dim=2)
        ended = ended.gather(1, parents) | (last == EOS)
        past = [words[rows] for words in past]
    return tokens[:, :, 1:]


def _step(model: Haav, tokens: Tensor, past: list[Tensor], memory: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """tokens (N, T) so far, memory (N, V, L, S, D) → scores of the next word (N, words), inputs of each layer so far"""
    decoder = model.decoder
    x = decoder.words(tokens[:, -1:]) + decoder.positions[tokens.shape[1]]
    known: list[Tensor] = []
    captions, views, layers = memory.shape[:3]
    for number, layer in enumerate(decoder.layers):
        known.append(torch.cat([past[number], x], dim=1) if past else x)
        word = _attend(layer.attention, x, known[-1], None)
        asking = word.repeat_interleave(views, dim=0)
        seen = mask.flatten(0, 1)
        found = [
            _attend(layer.aggregator.within, asking, memory[:, :, level].flatten(0, 1), seen) for level in range(layers)
        ]
        chosen = _attend(layer.aggregator.across_layers, asking, torch.cat(found, dim=1), None)
        x = _attend(layer.aggregator.across_views, word, chosen.view(captions, views, -1), None)
        x = layer.feed_forward(x)
    return decoder.output(x)[:, 0], known


def _attend(part: Attention | SetAttention, query: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """query (N, 1, D) over tokens (N, S, D)"""
    weights, biases = part.key_value.weight.chunk(2), part.key_value.bias.chunk(2)
    keys, values = (
        split_heads(F.linear(tokens, weight, bias), part.heads) for weight, bias in zip(weights, biases, strict=True)
    )
    scores = split_heads(part.query(query) * part.scale, part.heads) @ keys.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
    return part.finish(query, (scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2))


def _pad(view: View, longest: int) -> View:
    more = longest - view.tokens.shape[1]
    return replace(
        view,
        tokens=F.pad(view.tokens, (0, 0, 0, more)),
        mask=F.pad(view.mask, (0, more)),
        indices={name: F.pad(index, (0, more)) for name, index in view.indices.items()},
        boxes=None if view.boxes is None else F.pad(view.boxes, (0, 0, 0, more)),
    )
