"""Draw an explanation as a figure for a paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from haav.palette import LIGHT
from haav.plots import new_figure
from haav.studies.explain import ExplainedView, ExplainedWord, Explanation, Look

HEAT_MAPS = 6
"""words of a figure whose heat maps are drawn"""


def draw(file: Path, image: Image.Image, explanation: Explanation) -> None:
    """Draw a figure for a paper: the photo, the view weights of each word, and what content words looked at."""
    said = [word for word in explanation.words if word.content] or list(explanation.words)
    disputed = sorted(said, key=lambda word: word.disagreement, reverse=True)[:HEAT_MAPS]
    mapped = [word for word in said if word in disputed] if _has_places(explanation) else []
    figure = new_figure(9.5, 3.3 + (1.9 if mapped else 0))
    top, *bottom = figure.subfigures(
        2 if mapped else 1, 1, height_ratios=(3.3, 1.9) if mapped else None, squeeze=False
    )[:, 0]
    figure.suptitle(explanation.caption.text, fontsize=13, fontweight="bold")
    left, right = top.subplots(1, 2, width_ratios=(2, 3))
    left.imshow(image)
    left.axis("off")
    _draw_weights(right, explanation)
    if bottom:
        axes = bottom[0].subplots(1, max(4, len(mapped)))
        for panel in axes:
            panel.axis("off")
        for panel, word in zip(axes, mapped, strict=False):
            _draw_places(panel, image, word, explanation.views)
    figure.savefig(file, format="png", dpi=150)


def _has_places(explanation: Explanation) -> bool:
    return any(view.shows != "sentences" and view.places for view in explanation.views.values())


def _draw_weights(axes: Any, explanation: Explanation) -> None:
    """A stacked bar for each word"""
    heights = [0.0] * len(explanation.words)
    for name, view in explanation.views.items():
        weights = [word.looks[name].weight for word in explanation.words]
        axes.bar(
            range(len(weights)), weights, bottom=heights, color=LIGHT[view.position % len(LIGHT)], label=view.title
        )
        heights = [height + weight for height, weight in zip(heights, weights, strict=True)]
    axes.set_xticks(range(len(heights)), [word.word for word in explanation.words], rotation=45, ha="right")
    axes.set(ylim=(0, 1), ylabel="weight of each view")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False, fontsize=9)


def _draw_places(axes: Any, image: Image.Image, word: ExplainedWord, views: Mapping[str, ExplainedView]) -> None:
    """The photo, darker where the word did not look, with the objects that it looked at"""
    width, height = image.size
    axes.imshow(image)
    axes.set_title(word.word, fontsize=11)
    for name, view in views.items():
        look = word.looks[name]
        if view.shows == "heat":
            heat = heat_map(view, look)
            if heat is not None:
                veil = np.zeros((*heat.shape, 4))
                veil[..., 3] = (0.3 + 0.35 * look.weight) * (1 - heat**0.7)
                axes.imshow(veil, extent=(0, width, height, 0), interpolation="bilinear")
        elif view.shows == "boxes":
            colour = LIGHT[view.position % len(LIGHT)]
            for token, _ in look.places[:2]:
                place = view.places[token]
                if place.box is not None:
                    x1, y1, x2, y2 = place.box
                    corners = ((x1, y1), (x2, y1), (x2, y2), (x1, y2), (x1, y1))
                    axes.plot([x * width for x, _ in corners], [y * height for _, y in corners], color=colour)
                    axes.text(x1 * width, y1 * height, place.label, color="white", backgroundcolor=colour, fontsize=6)
    axes.set(xlim=(0, width), ylim=(height, 0))


def heat_map(view: ExplainedView, look: Look, side: int = 64) -> np.ndarray | None:
    """(side, side) from 0 to 1: the attention of a word to the cells of a view, smoothed as explain.js does it."""
    cells = [(view.places[token].box, share) for token, share in look.places]
    parts = [(box, share) for box, share in cells if box is not None and (box[2] - box[0]) * (box[3] - box[1]) < 0.9]
    if not parts:
        return None
    x1, y1, x2, y2 = np.array([box for box, _ in parts]).T
    centres = (np.arange(side) + 0.5) / side
    across = (centres[:, None] - (x1 + x2) / 2) / (x2 - x1)  # (side, cells)
    down = (centres[:, None] - (y1 + y2) / 2) / (y2 - y1)
    near = np.exp(-2 * (across[None, :] ** 2 + down[:, None] ** 2))  # (rows, columns, cells)
    values = near @ np.array([share for _, share in parts]) / (near.sum(axis=-1) + 1e-9)
    least, most = values.min(), values.max()
    heat: np.ndarray = (values - least) / (most - least + 1e-9)
    return heat
