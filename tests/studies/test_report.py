"""The page about grids, from results written by hand."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from haav.errors import DataError
from haav.studies.outcomes import CAPTIONS, GRID, RESULT, Outcome, run_folder
from haav.studies.report import render_report

pytest.importorskip("matplotlib", reason='a report needs matplotlib: pip install "haav[plots]"')

ROWS = {"haav": 0.9, "a < b & c": 0.7}


def make_grid(folder: Path, curve: list[tuple[int, float]]) -> Path:
    """Two rows and two seeds; the second seed of the second row is not done"""
    folder.mkdir()
    text = json.dumps({"title": "T & U", "recipe": "toy", "seeds": [0, 1], "rows": [{"name": name} for name in ROWS]})
    (folder / GRID).write_text(text)
    for row, cider in ROWS.items():
        for seed in (0, 1) if row == "haav" else (0,):
            place = run_folder(folder, row, seed)
            place.mkdir(parents=True)
            scores = {"CIDEr": cider + 0.02 * seed, "BLEU-4": 0.3, "ROUGE-L": 0.5}
            outcome = Outcome(row, seed, scores, "val", 2_000_000, 1.5, 10.0, 2.0, 3.0, curve)
            (place / RESULT).write_text(json.dumps(asdict(outcome)))
            (place / CAPTIONS).write_text(json.dumps({"p.jpg": f"<i>{row}</i>"}))
    return folder


class Tags(HTMLParser):
    """The elements that are open, and whether each was closed in turn"""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_report_shows_scores_costs_curves_and_captions(tmp_path: Path) -> None:
    page = render_report([make_grid(tmp_path / "g", [(1, 0.5), (2, 0.9)])])
    assert not Tags(page).open
    assert re.findall(r'<svg role="img" aria-label="([^"]+)"', page) == [
        "CIDEr of each row",
        "Cost against quality",
        "CIDEr on val by epoch",
    ]
    assert "1 of 4 runs are not done" in page
    assert "<h2>T &amp; U</h2>" in page
    assert ">91.0 ± 12.7<" in page, "mean of two seeds and its interval, beside the bar"
    assert ">70.0<" in page, "one seed has no interval"
    assert page.count("a &lt; b &amp; c") >= 5, "bar, point, curve, table, captions"
    assert "&lt;i&gt;haav&lt;/i&gt;" in page
    assert "<i>" not in page
    assert "https://" not in page


def test_a_single_evaluation_has_no_curve(tmp_path: Path) -> None:
    assert "by epoch" not in render_report([make_grid(tmp_path / "g", [(1, 0.5)])])


def test_folders_without_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no grid"):
        render_report([tmp_path])
