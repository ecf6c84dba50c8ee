"""The losses as pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKED = -1e30
"""a score that can never win, yet keeps gradients finite where everything is blocked"""


def self_critical(logprobs: Tensor, rewards: Tensor, lengths: Tensor) -> Tensor:
    """-(reward - mean reward of the photo's other captions) × mean log-probability of a word (paper §3.5).

    logprobs (B, K) of whole captions, rewards and lengths (B, K): K captions of each photo judge each other.
    """
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return -((rewards - others) * logprobs / lengths.clamp(min=1)).mean()


def info_nce_terms(
    queries: Tensor,
    mask: Tensor,
    keys: Tensor,
    keys_mask: Tensor,
    first: int,
    queue: Tensor,
    temperature: float,
    positives: str = "others",
) -> tuple[Tensor, Tensor]:
    """Contrast each view of a photo with the photo's views and with other photos (MoCo-v2, paper §3.3).

    queries (B, V, D) and keys (B', V, D) normalised; mask (B, V) and keys_mask (B', V): the photo has the view;
    queue (K, D). The queries may be of a part of the photos only: those from number `first` on of the B' photos.
    Every (query view, positive key view) pair of a photo is an InfoNCE term of its own:
    log(e^pos + Σ e^neg) - pos, where the negatives are all views of the batch's other photos and
    the queue. `positives` "others" leaves a view's own key out (the paper), "all" counts it (the release).
    Returned are the sum of the terms and their number.

    One product per pair of operands: negatives are never copied per positive.
    """
    with torch.autocast(mask.device.type, enabled=False):  # small differences of large scores: float32 throughout
        queries, keys, queue = queries.float() / temperature, keys.float(), queue.float()
        batch, views = mask.shape
        positive = torch.einsum("bvd,bwd->bvw", queries, keys[first : first + batch])

        own = (first + torch.arange(batch, device=mask.device)).repeat_interleave(views)
        photo = torch.arange(len(keys), device=mask.device).repeat_interleave(views)
        negative = (own[:, None] != photo) & keys_mask.flatten()
        scores = (queries.flatten(0, 1) @ keys.flatten(0, 1).T).masked_fill(~negative, BLOCKED)
        rest = scores.logsumexp(dim=1)
        if len(queue):
            rest = torch.logaddexp(rest, (queries.flatten(0, 1) @ queue.T).logsumexp(dim=1))

        pairs = mask[:, :, None] & mask[:, None, :]
        if positives == "others":
            pairs = pairs & ~torch.eye(views, dtype=torch.bool, device=mask.device)
        terms = torch.logaddexp(positive, rest.view(batch, views, 1)) - positive
        return terms.masked_fill(~pairs, 0.0).sum(), pairs.sum()
