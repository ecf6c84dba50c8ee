"""Pictures that show nothing: plain colours, noise, gradients, stripes and squares. Confidence is fitted on them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 256

Pixels = NDArray[np.float64]


def blank_pictures(count: int, seed: int = 0) -> list[Image.Image]:
    """`count` pictures, of each kind in turn. The same seed gives the same pictures."""
    rng = np.random.default_rng(seed)
    makers = (_plain, _noise, _gradient, _squares)
    pixels = (makers[index % len(makers)](rng) for index in range(count))
    return [Image.fromarray((255 * picture.clip(0, 1)).round().astype(np.uint8)) for picture in pixels]


def _plain(rng: np.random.Generator) -> Pixels:
    # Black, white and grey are what cameras and files produce by mistake, so they are half of the plain pictures.
    colour = np.full(3, rng.choice([0.0, 0.5, 1.0])) if rng.random() < 0.5 else rng.random(3)
    return np.broadcast_to(colour, (SIDE, SIDE, 3))


def _noise(rng: np.random.Generator) -> Pixels:
    """Grey or coloured squares of 1 to 32 pixels"""
    size = int(rng.choice([1, 1, 4, 16, 32]))
    values = rng.random((SIDE // size, SIDE // size, int(rng.choice([1, 3]))))
    squares: Pixels = _repeat(values, size) * np.ones(3)
    return squares


def _gradient(rng: np.random.Generator) -> Pixels:
    angle = rng.random() * 2 * np.pi
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE - 0.5
    ramp = (np.cos(angle) * x + np.sin(angle) * y)[..., None] + 0.5
    start, end = rng.random(3), rng.random(3)
    gradient: Pixels = start + ramp * (end - start)
    return gradient


def _squares(rng: np.random.Generator) -> Pixels:
    """Stripes or a chessboard of two colours"""
    size = int(rng.choice([4, 8, 16, 32, 64]))
    rows, columns = np.mgrid[0 : SIDE // size, 0 : SIDE // size]
    pattern = (rows, columns, rows + columns)[rng.integers(3)]
    colours = rng.random((2, 3))
    return _repeat(colours[pattern % 2], size)


def _repeat(values: Pixels, size: int) -> Pixels:
    return values.repeat(size, axis=0).repeat(size, axis=1)
