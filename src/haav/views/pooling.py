"""The mean of a feature map under any box, exact to fractions of a cell, at a cost that does not depend on its size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class RegionPool:
    """Integrates the map once (a summed-area table); a box is then four look-ups."""

    def __init__(self, features: Tensor) -> None:
        """features (B, D, H, W)"""
        sums = features.double().cumsum(dim=2).cumsum(dim=3)
        self.table = F.pad(sums, (1, 0, 1, 0))
        self.height, self.width = features.shape[2:]

    def __call__(self, photo: int, boxes: Tensor) -> Tensor:
        """boxes (N, 4) as fractions → (N, D): the area-weighted mean of the cells that each box covers"""
        if not len(boxes):
            return torch.zeros(0, self.table.shape[1])
        x1, y1, x2, y2 = boxes.double().unbind(dim=1)
        left, right = _span(x1, x2, self.width)
        top, bottom = _span(y1, y2, self.height)
        total = (
            self._integral(photo, bottom, right)
            - self._integral(photo, top, right)
            - self._integral(photo, bottom, left)
            + self._integral(photo, top, left)
        )
        area = (right - left) * (bottom - top)
        return (total / area[:, None]).float()

    def _integral(self, photo: int, y: Tensor, x: Tensor) -> Tensor:
        """Sum of the map from the corner to (y, x) in cells; bilinear between the table's points is exact."""
        row, column = y.floor().clamp(max=self.height - 1).long(), x.floor().clamp(max=self.width - 1).long()
        down, across = (y - row)[:, None], (x - column)[:, None]
        table = self.table[photo].permute(1, 2, 0)
        near = table[row, column] * (1 - across) + table[row, column + 1] * across
        far = table[row + 1, column] * (1 - across) + table[row + 1, column + 1] * across
        return near * (1 - down) + far * down


def _span(low: Tensor, high: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Fractions to cells, inside the map, at least a hundredth of a cell wide."""
    start = (low * cells).clamp(0, cells - 0.01)
    return start, torch.maximum((high * cells).clamp(0, cells), start + 0.01)
