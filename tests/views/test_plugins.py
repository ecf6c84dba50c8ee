"""Views of other packages, and the options of extractors."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from haav.cli.main import main
from haav.errors import ConfigError, ViewError
from haav.photos.sources import find_photos
from haav.store import Store
from haav.types import PhotoView, ViewSpec
from haav.views import Extractor, ExtractorOptions, PhotoBatch, base, build_extractor, extractors, view_names
from haav.views.embedded.grid import GridExtractor
from haav.views.extract import extract
from haav.views.live import ViewExtractors

PLUGIN = '''
import torch
from haav.types import PhotoView, ViewSpec
from haav.views import Extractor

class ColourExtractor(Extractor):
    """The mean colour of the photo."""
    name, licence, fingerprint = "colours", "CC0", "colours-1"
    spec = ViewSpec(dim=3, max_tokens=1)

    def extract(self, photos):
        return [PhotoView(picture.float().mean(dim=(1, 2))[None] / 255) for picture in photos.pixels(8)]

class Halves(ColourExtractor):
    name = "halves"

    def extract(self, photos):
        if any(image.width < 20 for image in photos.images):
            raise ZeroDivisionError("too narrow")
        return super().extract(photos)

class Tinted(ColourExtractor):
    name = "tinted"

    def __init__(self, tint=1.0, device="cpu"):
        super().__init__(device)
        self.tint = tint

    def extract(self, photos):
        return [PhotoView(self.tint * view.tokens) for view in super().extract(photos)]

class Fragile(ColourExtractor):
    name = "fragile"

    def __init__(self, hue=None):
        raise KeyError("no weights")

class Grid(ColourExtractor):
    name = "grid"

class Lazy(Extractor):
    name = "lazy"

number = 7
'''


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Plug-ins as pip would lay them out: modules and their entry points, good and bad"""
    (tmp_path / "toy_colours.py").write_text(PLUGIN)
    (tmp_path / "toy_broken.py").write_text("import a_package_that_is_not_there\n")
    info = tmp_path / "toy_colours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-colours\nVersion: 1.0\n")
    points = {
        "colours": "ColourExtractor",
        "halves": "Halves",
        "tinted": "Tinted",
        "fragile": "Fragile",
        "grid": "Grid",
        "lazy": "Lazy",
        "seven": "number",
        "misnamed": "ColourExtractor",
    }
    lines = [f"{name} = toy_colours:{value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[haav.views]", *lines, "gone = toy_broken:Gone", ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(base.extractors, "_entries", dict(base.extractors._entries))
    base.broken_plugins.cache_clear()
    yield tmp_path
    base.broken_plugins.cache_clear()


@pytest.mark.usefixtures("plugins")
def test_a_package_adds_a_view_with_an_entry_point() -> None:
    extractor = build_extractor("colours")
    assert isinstance(extractor, Extractor)
    view: PhotoView = extractor.extract(PhotoBatch(["r"], [Image.new("RGB", (9, 9), "red")]))[0]
    assert_close(view.tokens, torch.tensor([[1.0, 0.0, 0.0]]))
    assert extractor.spec == ViewSpec(3, 1)


@pytest.mark.usefixtures("plugins")
def test_a_broken_plug_in_costs_that_plug_in_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"colours", "cells"} <= set(view_names())
    assert isinstance(build_extractor("grid"), GridExtractor)
    reasons = {
        "gone": "ModuleNotFoundError: No module named 'a_package_that_is_not_there'",
        "seven": "toy_colours:number is not a subclass of haav.views.Extractor",
        "lazy": "toy_colours:Lazy lacks extract, fingerprint",
        "misnamed": "has the name 'colours', its entry point 'misnamed'",
        "fragile": "KeyError: 'no weights'",
    }
    for name, reason in reasons.items():
        with pytest.raises(ViewError, match=re.escape(reason)) as found:
            build_extractor(name)
        assert "the plug-in toy-colours 1.0 (toy_" in str(found.value)
    assert main(["views"]) == 0
    out, err = capsys.readouterr()
    assert "colours  [CC0]" in out
    assert "text_whole  [of the captions in the text database]  needs --bridge, --textdb" in out
    assert "the name is taken by a view of haav" in err
    assert "a_package_that_is_not_there" in err
    with pytest.raises(ConfigError, match=r"Did you mean 'colours'(?s:.*)Broken: view 'gone'"):
        build_extractor("colour")


def test_a_plug_in_that_fails_on_a_photo_leaves_the_other_views_their_photo(plugins: Path) -> None:
    (plugins / "photos").mkdir()
    for name, width in (("wide.png", 30), ("narrow.png", 10)):
        Image.new("RGB", (width, 30), "red").save(plugins / "photos" / name)
    summary = extract(find_photos([plugins / "photos"]), plugins / "s", ["colours", "halves"], workers=1)
    assert [(failure.image, failure.views) for failure in summary.failures] == [("narrow.png", ("halves",))]
    assert "ZeroDivisionError: too narrow" in summary.failures[0].error
    with Store(plugins / "s") as store:
        assert store.ids("colours") == ["narrow.png", "wide.png"]
        assert store.ids("halves") == ["wide.png"]


def test_options_that_no_view_takes_are_suggested() -> None:
    """Also where another extractor takes options, and where `__init__` has a local variable of that name"""
    with pytest.raises(ConfigError, match=r"unknown option of views 'clip_modle'\. Did you mean 'clip_model'"):
        build_extractor("grid", ExtractorOptions(plugin={"clip_modle": "x"}))
    for local in ("config", "self", "args"):
        with pytest.raises(ConfigError, match="unknown option of views"):
            build_extractor("grid", ExtractorOptions(plugin={local: "x"}))
    assert build_extractor("grid", ExtractorOptions(clip_model="x", bridge=None, textdb="y")).name == "grid"
    with pytest.raises(ConfigError, match="Did you mean 'textdb'"):
        ViewExtractors({}, options=ExtractorOptions(plugin={"text_db": "x"}))


@pytest.mark.usefixtures("plugins")
def test_a_plug_in_takes_options_of_its_own() -> None:
    options = ExtractorOptions(precision="float32", plugin={"tint": 0.5})
    batch = PhotoBatch(["r"], [Image.new("RGB", (9, 9), "red")])
    assert_close(build_extractor("tinted", options).extract(batch)[0].tokens, torch.tensor([[0.5, 0.0, 0.0]]))
    assert build_extractor("colours", options).name == "colours", "the option of another plug-in is ignored"


def test_every_option_is_taken_by_an_extractor() -> None:
    taken = {parameter for name in extractors for parameter in inspect.signature(extractors.get(name)).parameters}
    assert {field.name for field in dataclasses.fields(ExtractorOptions)} - {"plugin"} == taken


def test_every_extractor_declares_what_it_needs_and_gives() -> None:
    for name in extractors:
        extractor_class = extractors.get(name)
        assert set(extractor_class.needs) <= {"bridge", "textdb"}
        assert set(extractor_class.needs) <= inspect.signature(extractor_class).parameters.keys()
        assert set(extractor_class.gives) <= {"sentences", "boxes"}
        assert ("sentences" in extractor_class.gives) == ("textdb" in extractor_class.needs)
