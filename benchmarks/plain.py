"""Decoding the way the released code works, kept as the yardstick: slow on purpose, the same captions.

At every step it gathers the encoder's output for each beam and makes keys and values of it anew, sorts the whole
vocabulary times the beams, and goes on to the last step whether captions have ended or not. It also runs the
momentum encoder, which only training needs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from haav.model.haav import Haav
from haav.text import BOS, EOS, PAD
from haav.types import Cache, EncodedViews, Views


@torch.no_grad()
def plain_beam_search(model: Haav, momentum: Haav, views: Views, beam: int, max_words: int) -> Tensor:
    """(B, beam, max_words) words, the most probable caption first"""
    encoded = model.encode(views)
    momentum.encode(views)
    photos = len(encoded.present)
    totals = torch.zeros(photos, 1)
    tokens = torch.zeros(photos, 1, 0, dtype=torch.int64)
    last = torch.full((photos, 1), BOS)
    ended = torch.zeros(photos, 1, dtype=torch.bool)
    words: tuple = ()
    for step in range(max_words):
        beams = last.shape[1]
        cache = Cache(model.start(_per_beam(encoded, beams)).memory, words, step)
        decoded = model.decode(last.reshape(photos * beams, 1, 1), cache)
        logprobs = decoded.logprobs[:, 0, -1].view(photos, beams, -1)
        size = logprobs.shape[2]
        logprobs[ended] = -torch.inf
        logprobs[..., PAD][ended] = 0.0
        ranked = (totals[..., None] + logprobs).view(photos, -1).sort(dim=1, descending=True)
        totals, chosen = ranked.values[:, :beam], ranked.indices[:, :beam]
        parents, last = chosen // size, chosen % size
        tokens = torch.cat([tokens.gather(1, parents[..., None].expand(-1, -1, step)), last[..., None]], dim=2)
        ended = ended.gather(1, parents) | (last == EOS)
        rows = (parents + beams * torch.arange(photos)[:, None]).flatten()
        words = tuple(replace(past, keys=past.keys[rows], values=past.values[rows]) for past in decoded.cache.words)
    return tokens


def _per_beam(encoded: EncodedViews, beams: int) -> EncodedViews:
    """A copy of a photo's encoding for each of its beams"""
    return EncodedViews(
        encoded.names,
        tuple(tokens.repeat_interleave(beams, dim=0) for tokens in encoded.tokens),
        tuple(mask.repeat_interleave(beams, dim=0) for mask in encoded.masks),
        encoded.present.repeat_interleave(beams, dim=0),
    )
