"""Colours of views, in the order of a model. The terminal, notebooks, pages and figures all use these.

The six colours of a scheme are told apart with normal vision and with each form of colour blindness, and are legible as
text on their background (tests/test_palette.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

LIGHT = ("#1742cf", "#502c12", "#2a7e54", "#a54095", "#163940", "#e00606")
"""on white: blue, brown, green, purple, teal, red"""
DARK = ("#6d90c1", "#b58831", "#abe78c", "#dd3dfc", "#11eeee", "#e05d72")
"""on black: the same hues"""
TERMINAL = ("bright_blue", "yellow", "green", "magenta", "cyan", "red")
"""the same hues by name, since only the user's theme knows the background"""


def colours_of(views: Iterable[str], colours: tuple[str, ...] = LIGHT) -> dict[str, str]:
    """View → its colour. After six views the colours repeat."""
    return dict(zip(views, cycle(colours), strict=False))


def css() -> str:
    """The colours as custom properties `--v0` to `--v5`, for light and dark pages."""
    light, dark = (" ".join(f"--v{index}: {colour};" for index, colour in enumerate(each)) for each in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
