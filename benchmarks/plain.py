"""Decoding and training the way the released code works, kept as yardsticks: slow on purpose, the same numbers.

All views are padded to the longest. Decoding: at every step the encoder's output is gathered for each beam and made
into keys and values anew, for each encoder layer; so are the words said so far. The whole vocabulary times the beams
is sorted, and the search goes on to the last step whether captions have ended or not. The momentum encoder, which
only training needs, runs too. Training: one caption a photo, scores for padding too, negatives copied for every
positive, torch's own dropout. Self-critical training keeps the graph of every step of the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haav.model.contrast import MomentumContrast
from haav.model.dropout import Dropout
from haav.model.encodings import Encoding
from haav.model.haav import Haav
from haav.model.layers import Attention, FeedForward, SetAttention, split_heads
from haav.model.linear import Linear
from haav.text import BOS, EOS, PAD
from haav.types import View, Views


def by_torch(*models: nn.Module) -> None:
    """Give models torch's own dropout and linear maps"""
    ours: dict[type[nn.Module], type[nn.Module]] = {Dropout: nn.Dropout, Linear: nn.Linear}
    for part in chain.from_iterable(model.modules() for model in models):
        part.__class__ = ours.get(type(part), type(part))


@torch.no_grad()
def plain_beam_search(model: Haav, momentum: Encoding, views: Views, beam: int, max_words: int) -> Tensor:
    """(B, beam, max_words) words, the most probable caption first; `model` with all encoder layers, hierarchical"""
    views = _one_length(views)
    _encode(momentum, views)
    tokens, _ = _search(model, *_encode(model.encoding, views), beam, max_words)
    return tokens


def plain_self_critical_loss(
    model: Haav,
    contrast: MomentumContrast,
    views: Views,
    beam: int,
    max_words: int,
    weight: float,
    reward: Callable[[Tensor], Tensor],
) -> Tensor:
    """Beams whose every step keeps its graph, rewarded against their mean; to be differentiated"""
    views = _one_length(views)
    memory, mask = _encode(model.encoding, views)
    tokens, logprobs = _search(model, memory, mask, beam, max_words)
    rewards = reward(tokens)
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (beam - 1)
    lengths = (tokens != PAD).sum(dim=2).clamp(min=1)
    words = -((rewards - others) * logprobs.sum(dim=2) / lengths).mean()
    return words + weight * _contrast(contrast, views, memory, mask)


def _search(model: Haav, memory: Tensor, mask: Tensor, beam: int, max_words: int) -> tuple[Tensor, Tensor]:
    """memory (B, V, L, S, D), mask (B, V, S) → words (B, beam, max_words) and their log-probabilities"""
    photos = len(memory)
    totals, ended = torch.zeros(photos, 1), torch.zeros(photos, 1, dtype=torch.bool)
    tokens, said = torch.full((photos, 1, 1), BOS), torch.zeros(photos, 1, 0)
    past: list[Tensor] = []
    for _ in range(max_words):
        beams = tokens.shape[1]
        own_memory, own_mask = (part.repeat_interleave(beams, dim=0) for part in (memory, mask))
        logits, past = _step(model, tokens.flatten(0, 1), past, own_memory, own_mask)
        logprobs = logits.log_softmax(dim=-1).view(photos, beams, -1)
        size = logprobs.shape[2]
        free = torch.zeros(size, dtype=torch.bool).index_fill(0, torch.tensor([PAD]), True)
        logprobs = torch.where(ended[..., None], torch.where(free, 0.0, -torch.inf), logprobs)
        ranked = (totals[..., None] + logprobs).view(photos, -1).sort(dim=1, descending=True)
        totals, chosen = ranked.values[:, :beam].detach(), ranked.indices[:, :beam]
        parents, last = chosen // size, chosen % size
        rows = (parents + beams * torch.arange(photos)[:, None]).flatten()
        now = logprobs.view(photos, -1).gather(1, chosen)
        said = torch.cat([said.flatten(0, 1)[rows].view(photos, beam, -1), now[..., None]], dim=2)
        tokens = torch.cat([tokens.flatten(0, 1)[rows].view(photos, beam, -1), last[..., None]], dim=2)
        ended = ended.gather(1, parents) | (last == EOS)
        past = [words[rows] for words in past]
    return tokens[:, :, 1:], said


def _step(model: Haav, tokens: Tensor, past: list[Tensor], memory: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """tokens (N, T) so far, memory (N, V, L, S, D) → scores of the next word (N, words), inputs of each layer so far"""
    decoder = model.decoder
    x = decoder.words(tokens[:, -1:]) + decoder.positions[tokens.shape[1]]
    known: list[Tensor] = []
    captions, views, layers = memory.shape[:3]
    for index, layer in enumerate(decoder.layers):
        known.append(torch.cat([past[index], x], dim=1) if past else x)
        word = _attend(layer.attention, x, known[-1], None)
        asking = word.repeat_interleave(views, dim=0)
        seen = mask.flatten(0, 1)[:, None]
        found = [
            _attend(layer.aggregator.within, asking, memory[:, :, level].flatten(0, 1), seen) for level in range(layers)
        ]
        chosen = _attend(layer.aggregator.across_layers, asking, torch.cat(found, dim=1), None)
        x = _attend(layer.aggregator.across_views, word, chosen.view(captions, views, -1), None)
        x = _feed_forward(layer.feed_forward, x)
    return decoder.output(x)[:, 0], known


def plain_training_loss(
    model: Haav, contrast: MomentumContrast, views: Views, captions: Tensor, weight: float
) -> Tensor:
    """captions (B, T), one a photo → cross-entropy + weight · contrastive loss, to be differentiated"""
    views = _one_length(views)
    memory, mask = _encode(model.encoding, views)
    logits = _recite(model, captions[:, :-1], memory, mask)
    words = F.cross_entropy(logits.flatten(0, 1), captions[:, 1:].flatten(), ignore_index=PAD)
    return words + weight * _contrast(contrast, views, memory, mask)


def _contrast(contrast: MomentumContrast, views: Views, memory: Tensor, mask: Tensor) -> Tensor:
    queries = contrast.projector(memory[:, :, :, 0], mask[:, :, 0])
    with torch.no_grad():
        momentum, _ = _encode(contrast.momentum_encoding, views)
        keys = contrast.momentum_projector(momentum[:, :, :, 0], mask[:, :, 0])
    return _info_nce(queries, keys, contrast.queue, contrast.temperature)


def _encode(encoding: Encoding, views: Views) -> tuple[Tensor, Tensor]:
    """Views of one length → (B, V, L, S, D), (B, V, S)"""
    encoded, masks = [], []
    for view in encoding.embed(views):
        x, layers = view.tokens, []
        for layer in encoding.encoder.layers:
            x = _feed_forward(layer.feed_forward, _attend(layer.attention, x, x, view.mask[:, None]))
            layers.append(x)
        encoded.append(torch.stack(layers, dim=1))
        masks.append(view.mask)
    return torch.stack(encoded, dim=1), torch.stack(masks, dim=1)


def _feed_forward(part: FeedForward, x: Tensor) -> Tensor:
    return part.norm(x + part.dropout(part.outer(part.dropout(F.relu(part.inner(x))))))


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
        x = _feed_forward(layer.feed_forward, x.view_as(word))
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
    slots = getattr(part, "slots", 0)
    if slots:
        own_keys = split_heads(part.slot_keys / part.scale, part.heads).expand(len(keys), -1, -1, -1)
        own_values = split_heads(part.slot_values * slots**0.5, part.heads).expand(len(keys), -1, -1, -1)
        keys, values = torch.cat([keys, own_keys], dim=2), torch.cat([values, own_values], dim=2)
    scores = split_heads(part.query(query) * part.scale, part.heads) @ keys.transpose(-1, -2)
    if mask is not None:
        mask = F.pad(mask, (0, slots), value=True)
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
    return part.project_output(query, (scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2))


def _one_length(views: Views) -> Views:
    longest = max(view.tokens.shape[1] for view in views.values())
    return {name: _pad(view, longest) for name, view in views.items()}


def _pad(view: View, longest: int) -> View:
    more = longest - view.tokens.shape[1]
    return replace(
        view,
        tokens=F.pad(view.tokens, (0, 0, 0, more)),
        mask=F.pad(view.mask, (0, more)),
        indices={name: F.pad(index, (0, more)) for name, index in view.indices.items()},
        boxes=None if view.boxes is None else F.pad(view.boxes, (0, 0, 0, more)),
    )
