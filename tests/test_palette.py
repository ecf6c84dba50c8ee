"""Colours of views: distinct with every kind of colour vision, and legible."""

from __future__ import annotations

import re

import numpy as np
import pytest

from haav import palette
from haav.studies.html import part

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
DISTINCT = 24
"""smallest distance of two colours in CIELAB; about 2.3 is just noticeable"""


def linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    low, high = sorted((TO_XYZ[1] @ linear(colour)).item() for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["LIGHT", "DARK"])
@pytest.mark.parametrize("vision", VISION)
def test_views_are_told_apart_with_every_kind_of_colour_vision(scheme: str, vision: str) -> None:
    places = [lab(np.array(VISION[vision]) @ linear(colour)) for colour in getattr(palette, scheme)]
    pairs = [(one, other) for index, one in enumerate(places) for other in places[:index]]
    assert min(np.linalg.norm(one - other) for one, other in pairs) > DISTINCT


def test_colours_are_legible_on_the_pages() -> None:
    """At least 4.5 to 1, as WCAG asks of text"""
    paper, card = (re.findall(rf"--{name}: (#\w+)", part("style.css")) for name in ("paper", "card"))
    assert len(paper) == len(card) == 2
    for scheme, *backgrounds in zip((palette.LIGHT, palette.DARK), paper, card, strict=True):
        assert all(contrast(colour, background) >= 4.5 for colour in scheme for background in backgrounds)


def test_every_surface_has_as_many_colours() -> None:
    assert len(palette.LIGHT) == len(palette.DARK) == len(palette.TERMINAL) == 6
    assert list(palette.colours_of("abcdefg").values()) == [*palette.LIGHT, palette.LIGHT[0]]
    assert all(f"--v5: {scheme[5]};" in palette.css() for scheme in (palette.LIGHT, palette.DARK))
