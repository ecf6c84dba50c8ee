"""Means of a feature map under boxes, exact to fractions of a cell. One matrix product serves all boxes."""

from __future__ import annotations

import torch
from torch import Tensor


def squares(side: int) -> Tensor:
    """(side², 4): the photo cut into side × side cells, row by row"""
    cells = torch.arange(side**2)
    corner = torch.stack([cells % side, cells // side], dim=1) / side
    return torch.cat([corner, corner + 1 / side], dim=1)


def pool(features: Tensor, boxes: Tensor) -> Tensor:
    """features (..., D, H, W), boxes (N, 4) as fractions → (..., N, D): the area-weighted mean under each box"""
    return coverage(boxes, *features.shape[-2:]) @ features.flatten(-2).transpose(-1, -2)


def coverage(boxes: Tensor, height: int, width: int) -> Tensor:
    """(N, H × W): the share of each box that lies in each cell of a map, row by row"""
    x1, y1, x2, y2 = boxes.double().unbind(dim=1)
    down, across = _cover(y1, y2, height), _cover(x1, x2, width)
    return (down[:, :, None] * across[:, None]).flatten(1).float()


def _cover(low: Tensor, high: Tensor, cells: int) -> Tensor:
    """(N, cells): the share of each span that lies in each cell.

    Spans are clipped to the map and are at least a hundredth of a cell wide.
    """
    start = (low * cells).clamp(0, cells - 0.01)[:, None]
    stop = torch.maximum((high * cells).clamp(0, cells)[:, None], start + 0.01)
    edges = torch.arange(cells)
    inside = torch.minimum(stop, edges + 1) - torch.maximum(start, edges)
    return inside.clamp(min=0) / (stop - start)
