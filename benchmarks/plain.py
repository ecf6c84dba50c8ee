"""Decoding and training the way the released code works, kept as yardsticks: slow on purpose, the same numbers.

All views are padded to the longest. Decoding: at every step the encoder's output is gathered for each beam and made
into keys and values anew, for each encoder layer; so are the words said so far. The whole vocabulary times the beams
is sorted, and the search goes on to the last step whether captions have ended or not. The momentum encoder, which
only training needs, runs too. Training: one caption a photo, scores for padding too, negatives copied for every
positive, torch's own dropout.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from haav.model.haav import Haav
from haav.model.layers import Attention, SetAttention, split_heads
from haav.text import BOS, EOS, PAD
from haav.train.momentum import MomentumContrast
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
        seen = mask.flatten(0, 1)[:, None]
        found = [
            _attend(layer.aggregator.within, asking, memory[:, :, level].flatten(0, 1), seen) for level in range(layers)
        ]
        chosen = _attend(layer.aggregator.across_layers, asking, torch.cat(found, dim=1), None)
        x = _attend(layer.aggregator.across_views, word, chosen.view(captions, views, -1), None)
        x = layer.feed_forward(x)
    return decoder.output(x)[:, 0], known


def plain_training_loss(
    model: Haav, contrast: MomentumContrast, views: Views, captions: Tensor, weight: float
) -> Tensor:
    """captions (B, T), one a photo → cross-entropy + weight · contrastive loss, to be differentiated"""
    longest = max(view.tokens.shape[1] for view in views.values())
    views = {name: _pad(view, longest) for name, view in views.items()}
    encoded = model.encode(views)
    logits = _recite(model, captions[:, :-1], torch.stack(encoded.tokens, dim=1), torch.stack(encoded.masks, dim=1))
    words = F.cross_entropy(logits.flatten(0, 1), captions[:, 1:].flatten(), ignore_index=PAD)
    queries = contrast.projector(encoded.cls, encoded.cls_mask)
    with torch.no_grad():
        keys = contrast.momentum_projector(contrast.momentum_encoding(views).cls, encoded.cls_mask)
    return words + weight * _info_nce(queries, keys, contrast.queue, contrast.temperature)


def _recite(model: Haav, tokens: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
    """tokens (B, T) → scores (B, T, words)"""
    decoder = model.decoder
    photos, length = tokens.shape
    views, layers = memory.shape[1:3]
    x = decoder.words(tokens) + decoder.positions[1 : length + 1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(photos, -1, -1)
    seen = mask.flatten(0, 1)[:, None]
    for layer in decoder.layers:
        word = _attend(layer.attention, x, x, causal)
        asking = word.repeat_interleave(views, dim=0)
        found = [
            _attend(layer.aggregator.within, asking, memory[:, :, level].flatten(0, 1), seen) for level in range(layers)
        ]
        items = torch.stack(found, dim=2).flatten(0, 1)
        chosen = _attend(layer.aggregator.across_layers, asking.reshape(-1, 1, asking.shape[2]), items, None)
        items = chosen.view(photos, views, length, -1).transpose(1, 2).flatten(0, 1)
        x = _attend(layer.aggregator.across_views, word.reshape(-1, 1, word.shape[2]), items, None)
        x = layer.feed_forward(x.view_as(word))
    return decoder.output(x)


def _info_nce(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """All of a photo's keys are positives; for each, the negatives stand beside it once more."""
    photos, views = queries.shape[:2]
    other = ~torch.eye(photos, dtype=torch.bool)
    terms = []
    for view in range(views):
        logits = []
        for positive in range(views):
            near = (queries[:, view] * keys[:, positive]).sum(dim=-1, keepdim=True)
            batch = (queries[:, view] @ keys.flatten(0, 1).T).view(photos, photos, views)[other].view(photos, -1)
            logits.append(torch.cat([near, batch, queries[:, view] @ queue.T], dim=1))
        scores = torch.cat(logits) / temperature
        terms.append(F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64)))
    return torch.stack(terms).mean()


def _attend(part: Attention | SetAttention, query: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """query (N, T, D) over tokens (N, S, D); mask (N, 1 or T, S)"""
    weights, biases = part.key_value.weight.chunk(2), part.key_value.bias.chunk(2)
    keys, values = (
        split_heads(F.linear(tokens, weight, bias), part.heads) for weight, bias in zip(weights, biases, strict=True)
    )
    scores = split_heads(part.query(query) * part.scale, part.heads) @ keys.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
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
