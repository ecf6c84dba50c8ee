"""Colours of views, in the order of a model. The terminal, notebooks, pages and figures all use these.

The six colours of a scheme are told apart with normal vision and with each form of colour blindness, and are legible as
text on their background (tests/test_palette.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

LIGHT = ("#153cc4", "#c2410c", "#157f64", "#a347a9", "#12112c", "#680502")
"""on white: blue, orange, green, purple, ink, dark red"""
DARK = ("#5b8ff9", "#f0982b", "#aafbd7", "#d094d6", "#fcfe96", "#f4425a")
"""on black: blue, orange, green, purple, light yellow, red"""
TERMINAL = ("bright_blue", "yellow", "green", "magenta", "cyan", "red")
"""the same hues by name, since only the user's theme knows the background"""


def colours_of(views: Iterable[str], colours: tuple[str, ...] = LIGHT) -> dict[str, str]:
    """View → its colour. After six views the colours repeat."""
    return dict(zip(views, cycle(colours), strict=False))


def css() -> str:
    """The colours as custom properties `--v0` to `--v5`, for light and dark pages."""
    light, dark = (" ".join(f"--v{index}: {colour};" for index, colour in enumerate(each)) for each in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
