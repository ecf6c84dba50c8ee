"""What README, Get started, how-to and other pages show, run as a reader would."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pages
from haav.model.aggregators.base import TwoTierAggregator, aggregators
from haav.types import Aggregated
from haav.views import base, extractors
from helpers import ROOT, random_captions, random_views, tiny_model
from pages import PAGES, Block, Reader, Server, blocks

pytest.importorskip("lightning_fabric", reason="needs the train extra")
pytest.importorskip("fastapi", reason="needs the web extra")
RUN = [page for page in PAGES if any(block.language in {"console", "bash", "python"} for block in blocks(page))]
LONG = [page for page in RUN if any(block.mark == "slow" for block in blocks(page))]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[tuple[str, ...], Server]]:
    running: dict[tuple[str, ...], Server] = {}
    yield running
    for server in running.values():
        server.close()


@pytest.fixture
def reader(
    tmp_path: Path, shared: Path, servers: dict[tuple[str, ...], Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    folder = tmp_path / "reader"
    folder.mkdir()
    pages.clone(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HAAV_CACHE", str(pages.own_cache(tmp_path / "cache")))
    monkeypatch.setenv("PATH", f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(extractors, "_entries", dict(extractors._entries))  # plug-ins of a page
    base.broken_plugins.cache_clear()
    yield Reader(folder, shared, servers)
    base.broken_plugins.cache_clear()


FIRST = ("README.md", "docs/index.md")
"""pages that a newcomer meets first; the others run with the slow tests"""


@pytest.mark.parametrize(
    "page", [page if page in FIRST else pytest.param(page, marks=pytest.mark.slow) for page in RUN]
)
def test_blocks_of_a_page_run_in_order(page: str, reader: Reader) -> None:
    for block in blocks(page):
        if not block.mark:
            reader.run(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG)
def test_long_blocks_of_a_page_run_too(page: str, reader: Reader) -> None:
    for block in blocks(page):
        if block.mark != "not run":
            reader.run(block)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_name_flags_settings_and_recipes_that_exist(page: str) -> None:
    for block in blocks(page):
        assert block.language in pages.LANGUAGES, block.place
        assert block.mark in {"", "slow", "not run"}, block.place
        for command in block.commands:
            pages.check(command)
        if block.language == "python":
            pages.check_python(block.code)
    for command in pages.inline_commands(page):
        pages.check_inline(command)


@pytest.mark.parametrize(
    "command",
    [
        "haav caption photo.jpg --bea 3",
        "haav captoin photo.jpg",
        "haav caption photo.jpg --decode.bean 3",
        "haav train coco-xe3 --out runs/one",
        "haav train coco-xe --train.epoch 3 --out runs/one",
        "haav reproduce encoding --plan",
        "haav reproduce encodings --train.epoch 3",
        "torchrun --nproc_per_node 2 -m haav train coco-xe --ouut runs/one",
        "cat photo.jpg | haav caption - --jsn",
        "make captions",
        "python -m haav.export.portabel portable photo.jpg",
        "pip install 'haav[wep]'",
        "wget photo.jpg",
    ],
)
def test_a_command_that_is_wrong_is_found(command: str) -> None:
    with pytest.raises(BaseException, match=r".*") as wrong:
        pages.check(command)
    assert not isinstance(wrong.value, KeyboardInterrupt)


@pytest.mark.parametrize("code", ["haav.laod()", "haav.CaptionOptions(bean=3)", "haav.load(modle='best')"])
def test_python_that_names_what_haav_has_not_is_found(code: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        pages.check_python(f"import haav\n{code}\n")


def test_marks_are_read_and_others_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "<!-- not run: needs a hub -->\n```console\n$ haav views\nout\n```\n\n```console\n$ haav \\\n  views\n```\n"
    )
    first, second = blocks("page.md")
    assert (first.mark, first.reason, first.commands) == ("not run", "needs a hub", ["haav views"])
    assert (second.mark, [command.split() for command in second.commands]) == ("", [["haav", "views"]])
    assert first == Block("page.md", 3, "console", "$ haav views\nout\n", "not run", "needs a hub")


def test_a_block_that_fails_is_named(reader: Reader) -> None:
    with pytest.raises(AssertionError, match=r"page.md:7: haav caption nowhere.xyz"):
        reader.run(Block("page.md", 7, "console", "$ haav caption nowhere.xyz\n", "", ""))


def test_the_aggregator_of_contributing_keeps_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block.code for block in blocks("CONTRIBUTING.md") if block.language == "python"]
    monkeypatch.setattr(aggregators, "_entries", dict(aggregators._entries))
    names = {"torch": torch, "Tensor": torch.Tensor, "Aggregated": Aggregated, "__name__": "contributing"}
    exec(code, {**names, "TwoTierAggregator": TwoTierAggregator, "aggregators": aggregators})
    model, views, captions = tiny_model(aggregator="median"), random_views(), random_captions()
    without = {name: view for name, view in views.items() if name != "grid"}
    logits = model(without, captions).logits
    assert logits.isfinite().all()
    assert not torch.allclose(logits, model(views, captions).logits)


MAIN_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
"""`make docs` checks the links of the pages in docs/"""


@pytest.mark.parametrize("page", MAIN_PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert ((ROOT / page).parent / target).exists(), target
