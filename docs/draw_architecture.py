"""Draws docs/architecture.svg: the way of the data, and the layers of docs/layers.yaml.

python docs/draw_architecture.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

DOCS = Path(__file__).parent
COLUMNS, WIDTH, HEIGHT, GAP, TOP = 5, 164, 88, 25, 400

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" font-family="system-ui, sans-serif" font-size="14">
<style>
 .box{{fill:#fff;stroke:#444;stroke-width:1.2}} .soft{{fill:#f4f4f6;stroke:#bbb}}
 .a{{fill:#d9e8fb;stroke:#3a6ea5}} .b{{fill:#dcf2df;stroke:#3c8a4a}} .c{{fill:#fde7cf;stroke:#b8741a}}
 .t{{text-anchor:middle;fill:#222}} .s{{text-anchor:middle;fill:#555;font-size:12px}} .h{{fill:#222;font-weight:600}}
 .l{{stroke:#444;stroke-width:1.4;fill:none;marker-end:url(#m)}}
 .d{{stroke:#888;stroke-width:1.2;fill:none;stroke-dasharray:4 3;marker-end:url(#m)}}
</style>
<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="#444"/></marker></defs>
<rect width="960" height="{height}" fill="#fff"/>"""


def box(x: int, y: int, width: int, height: int, *lines: str, kind: str = "box", title: bool = True) -> str:
    """A box with text; its first line is large where it is a title"""
    middle, first = x + width / 2, y + height / 2 - 8 * (len(lines) - 1) + 5
    texts = []
    for number, text in enumerate(lines):
        size = "t" if title and not number else "s"
        texts.append(f'<text x="{middle:g}" y="{first + 16 * number:g}" class="{size}">{escape(text)}</text>')
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>' + "".join(texts)


def note(x: int, y: int, text: str, kind: str = "s") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def line(path: str, kind: str = "l") -> str:
    return f'<path class="{kind}" d="{path}"/>'


def way_of_the_data() -> list[str]:
    return [
        note(20, 28, "The way of the data", "h"),
        box(20, 110, 90, 60, "photo", "any picture"),
        *(line(path) for path in ("M110 132 L158 76", "M110 140 L158 140", "M110 148 L158 204")),
        box(160, 50, 110, 44, "objects", "boxes", kind="a"),
        box(160, 118, 110, 44, "grid", "cells", kind="b"),
        box(160, 186, 110, 44, "text", "sentences", kind="c"),
        note(215, 252, "Views (B, S, D_view) + mask"),
        *(line(f"M270 {y} H318") for y in (72, 140, 208)),
        box(320, 50, 130, 180, kind="soft"),
        note(385, 75, "Encoding", "t"),
        box(335, 90, 100, 34, "embed + [CLS]", title=False),
        line("M385 124 V148"),
        box(335, 150, 100, 50, "one encoder", "for every view", title=False),
        note(385, 252, "EncodedViews"),
        note(480, 150, "once per"),
        note(480, 174, "photo"),
        box(510, 50, 200, 180, kind="soft"),
        note(610, 75, "Decoder layer × M", "t"),
        line("M450 158 H523"),
        box(525, 88, 170, 28, "self-attention over words", title=False),
        line("M610 116 V130"),
        box(525, 132, 170, 52, "within each view (Lv1),", "then across views (Lv2)", title=False),
        line("M610 184 V196"),
        box(525, 198, 170, 24, "feed-forward", title=False),
        line("M710 105 H768"),
        line("M710 158 H768"),
        box(770, 80, 170, 50, "next word", "(B, C, T, words)"),
        box(770, 150, 170, 50, "view weights", "(B, C, T, M, H, V)"),
        line("M855 200 V262 H610 V232", "d"),
        note(735, 256, "generate: beams, explicit cache"),
        box(
            320,
            290,
            390,
            44,
            "Contrast: projector, momentum copy, queue",
            "training only; needs no captions",
            kind="soft",
        ),
        line("M385 256 V288", "d"),
    ]


def layers(found: list[dict[str, Any]]) -> list[str]:
    parts = [note(20, TOP - 20, "Who may import whom: each part only what stands before it", "h")]
    for number, layer in enumerate(found):
        row, column = divmod(number, COLUMNS)
        x, y = 20 + column * (WIDTH + GAP), TOP + row * (HEIGHT + GAP)
        names = textwrap.wrap(" ".join(layer["parts"]), 24)
        parts.append(box(x, y, WIDTH, HEIGHT, layer["name"], *names))
        if column:
            parts.append(line(f"M{x} {y + HEIGHT // 2} H{x - GAP + 2}"))
        elif row:
            end = 20 + (COLUMNS - 1) * (WIDTH + GAP) + WIDTH // 2
            above = y - GAP
            parts.append(line(f"M{x + WIDTH // 2} {y} V{y - GAP // 2} H{end} V{above + 2}"))
    return parts


def draw() -> str:
    found = yaml.safe_load((DOCS / "layers.yaml").read_text(encoding="utf-8"))
    rows = -(-len(found) // COLUMNS)
    height = TOP + rows * (HEIGHT + GAP)
    return "\n".join([HEAD.format(height=height), *way_of_the_data(), *layers(found), "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "architecture.svg").write_text(draw(), encoding="utf-8")
