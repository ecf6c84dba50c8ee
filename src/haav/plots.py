"""Figures with matplotlib, which only the extras `plots` and `train` install."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from haav.errors import ConfigError


def check_installed(what: str) -> None:
    """Check before long work that its figure `what` can be drawn at the end."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f'drawing {what} needs matplotlib.\n  pip install "haav[plots]"')


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure, with its size in inches, that needs no display"""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
