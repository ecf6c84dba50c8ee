"""Collates photos into a batch. All padding is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from haav.text import PAD
from haav.types import Batch, PhotoView, View, ViewSpec


def collate(
    ids: Sequence[str],
    views: Mapping[str, Sequence[PhotoView]],
    captions: Sequence[Sequence[Sequence[int]]] | None = None,
    device: torch.device | str = "cpu",
    weights: Sequence[Sequence[float]] | None = None,
) -> Batch:
    """`views`: name → one view per photo; `captions`: the captions of each photo as word ids; `weights`: of each"""
    stacked = {name: stack(per_photo).to(device) for name, per_photo in views.items()}
    return Batch(
        tuple(ids),
        stacked,
        None if captions is None else pad_captions(captions),
        None if weights is None else _pad([torch.tensor(row) for row in weights], max(map(len, weights), default=0)),
    )


def stack(photos: Sequence[PhotoView]) -> View:
    """One view of several photos, padded to the longest of them, not to `max_tokens`."""
    lengths = torch.tensor([len(photo.tokens) for photo in photos])
    longest = int(lengths.max()) if len(photos) else 0
    first = photos[0]
    return View(
        tokens=_pad([photo.tokens for photo in photos], longest),
        mask=torch.arange(longest) < lengths[:, None],
        indices={name: _pad([photo.indices[name] for photo in photos], longest) for name in first.indices},
        boxes=None if first.boxes is None else _pad([_boxes(photo) for photo in photos], longest),
        labels=tuple(photo.labels or () for photo in photos) if any(photo.labels for photo in photos) else None,
    )


def pad_captions(captions: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """(B, C, T): C is the largest number of captions per photo, T the length of the longest caption."""
    most = max((len(photo) for photo in captions), default=0)
    longest = max((len(words) for photo in captions for words in photo), default=0)
    padded = torch.full((len(captions), most, longest), PAD, dtype=torch.int64)
    for b, photo in enumerate(captions):
        for c, words in enumerate(photo):
            padded[b, c, : len(words)] = torch.tensor(words, dtype=torch.int64)
    return padded


def _pad(rows: Sequence[Tensor], longest: int) -> Tensor:
    padded = rows[0].new_zeros(len(rows), longest, *rows[0].shape[1:])
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _boxes(photo: PhotoView) -> Tensor:
    assert photo.boxes is not None, "a view has boxes for all photos or for none"
    return photo.boxes


def blank_view(spec: ViewSpec) -> View:
    """A view of one photo with `max_tokens` tokens, all zero, on the current default device."""
    tokens = spec.max_tokens
    return View(
        torch.zeros(1, tokens, spec.dim),
        torch.ones(1, tokens, dtype=torch.bool),
        {name: torch.zeros(1, tokens, dtype=torch.int64) for name in spec.indices},
        torch.zeros(1, tokens, 4) if spec.boxes else None,
    )
