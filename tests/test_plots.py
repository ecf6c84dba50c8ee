"""Figures of pages and papers"""

from __future__ import annotations

import re

import pytest

from haav.palette import LIGHT

pytest.importorskip("matplotlib", reason='figures need matplotlib: pip install "haav[plots]"')
from haav.plots import Interval, draw_intervals, draw_lines, svg_file, to_svg

CURVES = {f"row {index}": [(1.0, index), (2.0, index + 1.0)] for index in range(3)}


def test_lines_have_the_colours_of_the_palette() -> None:
    (axes,) = draw_lines(CURVES, "epoch", "CIDEr").axes
    assert [line.get_color() for line in axes.lines] == list(LIGHT[:3])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(CURVES)


def test_a_figure_in_a_page_takes_its_colours_and_shares_no_id() -> None:
    pages = [to_svg(draw_lines(CURVES, "epoch", y), f'{y} of "rows" <b>') for y in ("CIDEr", "BLEU-4")]
    for svg in pages:
        assert svg.startswith('<svg role="img" aria-label="')
        assert "of &quot;rows&quot; &lt;b&gt;" in svg
        assert all(f"var(--v{index})" in svg for index in range(3))
        assert "var(--ink)" in svg
        grid = "#b0b0b0"  # legible on light and dark pages
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {grid}
        assert "https://" not in svg
        assert ">row 2<" in svg, "text stays text"
        targets = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
        assert targets <= set(re.findall(r' id="([^"]+)"', svg))
    first, second = (set(re.findall(r' id="([^"]+)"', svg)) for svg in pages)
    assert first
    assert not first & second


def test_the_same_figure_gives_the_same_text() -> None:
    assert to_svg(draw_lines(CURVES, "x", "y"), "it") == to_svg(draw_lines(CURVES, "x", "y"), "it")


def test_intervals_are_drawn_from_top_to_bottom_in_the_colour_of_their_kind() -> None:
    rows = [Interval("first", "yes", 2.0, 1.0, 4.0, bound=0.5), Interval("second", "no", -3.0, -5.0, 2.0, other=7.0)]
    figure = draw_intervals(rows, ("no", "yes"), "points", "bound", "theirs")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    low, high = axes.get_ylim()
    assert low > high, "the first is at the top"
    drawn = [(line.get_xdata().tolist(), set(line.get_ydata()), line.get_color()) for line in axes.lines[:7]]
    assert drawn[0] == ([1.0, 4.0], {0}, LIGHT[1])
    assert drawn[1][0] == [2.0]
    assert drawn[2][0] == [0.5, 0.5]
    assert drawn[3] == ([-5.0, 2.0], {1}, LIGHT[0])
    assert drawn[6][0] == [7.0], "the figure to compare with; the first has none"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["no", "yes", "bound", "theirs"]
    again = draw_intervals(rows, ("no", "yes"), "points", "bound", "theirs")
    assert svg_file(figure) == svg_file(again), "the same bytes each time"
    assert ">second<" in svg_file(figure)
