"""Figures with matplotlib, which only the extras `plots` and `train` install."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any

from haav.errors import ConfigError
from haav.palette import LIGHT


def is_installed() -> bool:
    return find_spec("matplotlib") is not None


def check_installed(what: str) -> None:
    """Check before long work that its figure `what` can be drawn at the end."""
    if not is_installed():
        raise ConfigError(f'drawing {what} needs matplotlib.\n  pip install "haav[plots]"')


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure in the colours of the palette, with its size in inches. It needs no display."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    class PaletteFigure(Figure):
        def subplots(self, *args: Any, **kwargs: Any) -> Any:
            with rc_context({"axes.prop_cycle": cycler(color=LIGHT)}):
                return super().subplots(*args, **kwargs)

    figure = PaletteFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_lines(curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> Any:
    """A figure with one line per name through its (x, y) points, and a legend."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(fontsize=8, frameon=False)
    return figure


@dataclass(frozen=True)
class Interval:
    """A line of `draw_intervals`."""

    label: str
    kind: str
    """its colour, named in the legend"""
    value: float
    low: float
    high: float
    bound: float = 0.0
    """what the interval is compared with"""
    other: float | None = None
    """a figure to compare with, such as the paper's"""


def draw_intervals(intervals: Sequence[Interval], kinds: Sequence[str], x: str, bound: str, other: str) -> Any:
    """A figure with one interval per line, from top to bottom. `kinds` in the order of the colours; `bound`: what the
    ticks are, `other`: what the hollow diamonds are."""
    figure = new_figure(10, 1.2 + 0.3 * len(intervals))
    axes = figure.subplots()
    for place, interval in enumerate(intervals):
        colour = LIGHT[kinds.index(interval.kind)]
        axes.plot([interval.low, interval.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(interval.value, place, "o", color=colour)
        axes.plot([interval.bound, interval.bound], [place - 0.4, place + 0.4], color="black", linewidth=1)
        if interval.other is not None:
            axes.plot(interval.other, place, "D", color="black", markerfacecolor="none", markersize=5)
    for index, kind in enumerate(kinds):
        axes.plot([], [], "o-", color=LIGHT[index], label=kind)
    axes.plot([], [], "|", color="black", markersize=9, label=bound)
    axes.plot([], [], "D", color="black", markerfacecolor="none", markersize=5, label=other)
    axes.set(xlabel=x, ylim=(len(intervals) - 0.4, -0.6))
    axes.set_yticks(range(len(intervals)), [interval.label for interval in intervals], fontsize=8)
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside upper right", ncols=len(kinds) + 2, fontsize=8, frameon=False)
    return figure


def svg_file(figure: Any, transparent: bool = False) -> str:
    """The figure as an SVG document, the same for the same figure. Text stays text."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "haav"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=transparent, metadata=nothing)
    return buffer.getvalue()


def to_svg(figure: Any, label: str) -> str:
    """The figure as an SVG element of a page. Its colours are those of the page, light or dark (`palette.css`)."""
    svg = svg_file(figure, transparent=True)
    svg = svg[svg.index("<svg") :]
    for index, colour in enumerate(LIGHT):
        svg = svg.replace(colour, f"var(--v{index})")
    svg = svg.replace("#000000", "var(--ink)")
    prefix = hashlib.sha256(svg.encode()).hexdigest()[:8]  # ids are unique in a page with several figures
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>f{prefix}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
