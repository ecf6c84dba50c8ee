"""The embedded extractors, on real weights and real photos; the laws of pooling and suppression."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.testing import assert_close

from haav.cli.main import main
from haav.errors import ConfigError, ViewError
from haav.photos.images import load_image
from haav.photos.sources import find_photos
from haav.store import Store
from haav.types import PhotoView, ViewSpec
from haav.views import Extractor, ExtractorOptions, PhotoBatch, base, build_extractor, extractors, view_names
from haav.views.embedded import efficientnet, folded_conv, yolo
from haav.views.embedded.grid import GridExtractor
from haav.views.embedded.objects import MAX_OVERLAP, MIN_SCORE, suppress
from haav.views.embedded.pooling import pool
from haav.views.embedded.regions import CROPS, crops
from haav.views.extract import extract
from haav.views.live import ViewExtractors

EMBEDDED = [
    name
    for name in extractors
    if extractors.get(name).__module__.startswith("haav.views.embedded.") and not extractors.get(name).needs
]


@pytest.fixture(scope="module")
def photos() -> dict[str, Image.Image]:
    """CC0 photos that scikit-image carries (the dev extra)."""
    data = pytest.importorskip("skimage.data")
    folder = Path(data.__file__).parent
    return {
        name: load_image(folder / name)
        for name in ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png")
    }


@pytest.fixture(scope="module")
def batch(photos: dict[str, Image.Image]) -> PhotoBatch:
    return PhotoBatch(tuple(photos), list(photos.values()))


@pytest.mark.parametrize("name", EMBEDDED)
def test_extractors_keep_their_word(name: str, batch: PhotoBatch, photos: dict[str, Image.Image]) -> None:
    extractor = build_extractor(name)
    views = extractor.extract(batch)
    assert extractor.name == name
    assert extractor.licence
    assert len(extractor.fingerprint) > 10
    assert len(views) == len(photos)
    for view in views:
        assert view.tokens.shape[1] == extractor.spec.dim
        assert 0 < len(view.tokens) <= extractor.spec.max_tokens
        assert view.tokens.isfinite().all()
        assert view.indices.keys() == extractor.spec.indices.keys()
        for index, size in extractor.spec.indices.items():
            assert 0 <= view.indices[index].min() <= view.indices[index].max() < size
        if extractor.spec.boxes:
            assert view.boxes is not None
            assert ((view.boxes >= 0) & (view.boxes <= 1)).all()
            assert (view.boxes[:, 2:] > view.boxes[:, :2]).all()
    alone = extractor.extract(PhotoBatch(["x"], [photos["coffee.png"]]))[0]
    assert_close(alone.tokens, views[2].tokens, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ["none", "relu6", "leaky"])
@pytest.mark.parametrize(
    ("kernel", "stride", "groups", "padding"), [(1, 1, 1, 0), (3, 2, 1, -1), (5, 1, 4, -1), (3, 2, 1, 1)]
)
def test_fused_and_plain_convolutions_agree(
    monkeypatch: pytest.MonkeyPatch, activation: str, kernel: int, stride: int, groups: int, padding: int
) -> None:
    weight = torch.randn(8, 4 // groups, kernel, kernel)
    conv = folded_conv.FoldedConv(weight, torch.randn(8), stride, groups, activation, padding)
    x = 3 * torch.randn(2, 4, 13, 13).contiguous(memory_format=torch.channels_last)
    found = conv(x)
    monkeypatch.setattr(folded_conv, "_FUSED", None)
    assert_close(found, conv(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [10, 13])
@pytest.mark.parametrize("kernel", [3, 5])
def test_uneven_padding_is_tensorflows(size: int, kernel: int) -> None:
    weight, bias, x = torch.randn(8, 4, kernel, kernel), torch.randn(8), torch.randn(2, 4, size, size)
    before = (kernel - 2) // 2 if size % 2 == 0 else kernel // 2
    padded = torch.nn.functional.pad(x, (before, kernel // 2) * 2)
    expected = torch.nn.functional.conv2d(padded, weight, bias, stride=2)
    assert_close(folded_conv.FoldedConv(weight, bias, 2, 1, "none", padding=-1)(x), expected, atol=1e-4, rtol=1e-4)


def test_efficientnet_is_the_published_network(photos: dict[str, Image.Image]) -> None:
    reference = pytest.importorskip("efficientnet_lite_pytorch", reason="needs the dev extra")
    network = reference.EfficientNet.from_name("efficientnet-lite2")
    network.load_state_dict(torch.load(efficientnet.weights_path(), weights_only=True))
    pixels = PhotoBatch(tuple(photos), list(photos.values())).pixels(efficientnet.SIZE)
    with torch.no_grad():
        expected = network.eval().extract_features((pixels.float() - 127) / 128)
        found = efficientnet.load_efficientnet()(pixels)
    assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_grid_tokens_are_cells_row_by_row(batch: PhotoBatch) -> None:
    view = build_extractor("grid").extract(batch)[0]
    features = batch.once("efficientnet_lite2", lambda: pytest.fail("computed twice"))[0]
    for token in (0, 10, 80):
        row, column = view.indices["row"][token], view.indices["column"][token]
        assert (row, column) == (token // 9, token % 9)
        assert torch.equal(view.tokens[token], features[:, row, column])


def test_cells_are_means_of_both_networks_maps(batch: PhotoBatch) -> None:
    view = build_extractor("cells").extract(batch)[0]
    assert view.tokens.shape == (25, 1280 + 512 + 256)
    assert view.indices["row"].tolist() == [row for row in range(5) for _ in range(5)]
    assert view.indices["column"].tolist() == list(range(5)) * 5
    grid = batch.once("efficientnet_lite2", lambda: pytest.fail("computed twice"))[0]
    # The second cell of the first row covers 1.8 cells of the 9 × 9 map each way: from 1.8 to 3.6 across.
    across, down = torch.tensor([0, 0.2, 1, 0.6, 0, 0, 0, 0, 0]), torch.tensor([1, 0.8, 0, 0, 0, 0, 0, 0, 0])
    expected = torch.einsum("dhw,h,w->d", grid, down, across) / 1.8**2
    assert_close(view.tokens[1, :1280], expected, rtol=1e-4, atol=1e-5)


def test_detector_is_opencvs(photos: dict[str, Image.Image]) -> None:
    cv2 = pytest.importorskip("cv2", reason="needs OpenCV 4")
    if not hasattr(cv2.dnn, "readNetFromDarknet"):
        pytest.skip("this OpenCV no longer reads darknet files")
    network = cv2.dnn.readNetFromDarknet(
        str(yolo.folder() / "yolov4-tiny.cfg"), str(yolo.folder() / "yolov4-tiny.weights")
    )
    pixels = PhotoBatch(tuple(photos), list(photos.values())).pixels(yolo.SIZE)
    with torch.no_grad():
        ours = yolo.load_yolo()(pixels)
    for index, picture in enumerate(pixels):
        image = np.ascontiguousarray(picture.permute(1, 2, 0).numpy())
        network.setInput(cv2.dnn.blobFromImage(image, 1 / 255, (yolo.SIZE, yolo.SIZE)))
        theirs = torch.from_numpy(np.concatenate(network.forward(network.getUnconnectedOutLayersNames())))
        scores, order = theirs[:, 5:].max(dim=1).values.sort(descending=True)
        mine, mine_order = ours.scores[index].max(dim=1).values.sort(descending=True)
        sure = int((scores > 0.25).sum())
        assert sure > 0
        assert_close(mine[:sure], scores[:sure], rtol=1e-3, atol=1e-3)
        centre, size = theirs[order[:sure], :2], theirs[order[:sure], 2:4]
        expected = torch.cat([centre - size / 2, centre + size / 2], dim=1)
        assert_close(ours.boxes[index, mine_order[:sure]], expected, rtol=1e-3, atol=1e-3)


def test_objects_are_what_one_sees(batch: PhotoBatch, photos: dict[str, Image.Image]) -> None:
    seen = dict(zip(photos, build_extractor("objects").extract(batch), strict=True))
    assert seen["astronaut.png"].labels[0] == "person"
    assert seen["chelsea.png"].labels[0] == "cat"
    assert "cup" in seen["coffee.png"].labels
    for view in seen.values():
        scores = view.tokens[:, -1]
        assert (scores.diff() <= 0).all()
        assert scores.min() >= MIN_SCORE


def test_a_photo_of_nothing_lacks_objects() -> None:
    plain = Image.new("RGB", (300, 200), "grey")
    view = build_extractor("objects").extract(PhotoBatch(["grey"], [plain]))[0]
    assert view.tokens.shape == (0, 849)
    assert view.boxes.shape == (0, 4)
    assert view.labels == ()


def test_darknet_files_that_do_not_fit_are_refused() -> None:
    sections = yolo.read_sections("[net]\nwidth=416\n[convolutional]\nfilters=2\nsize=1\nstride=1\nactivation=linear\n")
    with pytest.raises(ViewError, match="truncated"):
        yolo.YoloTiny(sections, np.zeros(3, np.float32))
    with pytest.raises(ViewError, match="hold 9 numbers, the config takes 8"):
        yolo.YoloTiny(sections, np.zeros(9, np.float32))


# Pooling


def slow_pool(features: torch.Tensor, box: list[float]) -> torch.Tensor:
    """Area-weighted mean, cell by cell."""
    _, height, width = features.shape
    total, area = torch.zeros(len(features)), 0.0
    for row in range(height):
        for column in range(width):
            across = max(0.0, min(box[2] * width, column + 1) - max(box[0] * width, column))
            down = max(0.0, min(box[3] * height, row + 1) - max(box[1] * height, row))
            total += features[:, row, column] * across * down
            area += across * down
    return total / area


@given(x=st.floats(0, 0.9), y=st.floats(0, 0.9), w=st.floats(0.05, 1), h=st.floats(0.05, 1), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_pooling_equals_the_slow_obvious_mean(x: float, y: float, w: float, h: float, seed: int) -> None:
    features = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    box = [x, y, min(1.0, x + w), min(1.0, y + h)]
    found = pool(features, torch.tensor([box]))[1]
    assert_close(found[0], slow_pool(features[1], box), rtol=1e-3, atol=1e-3)


def test_the_whole_photo_pools_to_the_mean_and_a_thin_box_stays_finite() -> None:
    features = torch.randn(1, 3, 9, 9)
    boxes = torch.tensor([[0.0, 0, 1, 1], [1, 1, 1, 1], [0.5, 0.2, 0.5, 0.9]])
    pooled = pool(features, boxes)[0]
    assert_close(pooled[0], features[0].mean(dim=(1, 2)))
    assert pooled.isfinite().all()


def test_crops_are_those_of_the_paper() -> None:
    boxes = crops()
    assert boxes.shape == (15, 4)
    sides = boxes[:, 2:] - boxes[:, :2]
    for name, side in (("whole", 1.0), ("five", 0.6), ("nine", 0.4)):
        assert_close(sides[CROPS[name]], torch.full_like(sides[CROPS[name]], side))
    assert boxes.min() == 0
    assert_close(boxes.max(), torch.tensor(1.0))
    assert_close(boxes[5], torch.tensor([0.2, 0.2, 0.8, 0.8]))


# Suppression


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 5, st.integers(0, 2)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_suppression_equals_the_slow_obvious_loop(items: list[tuple[float, ...]]) -> None:
    rows = torch.tensor(items).view(-1, 6)
    boxes = torch.cat([rows[:, :2].minimum(rows[:, 2:4]), rows[:, :2].maximum(rows[:, 2:4])], dim=1)
    scores, classes = rows[:, 4], rows[:, 5].long()

    def overlap(a: torch.Tensor, b: torch.Tensor) -> float:
        shared = (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0).prod()
        areas = (a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod()
        return float(shared / max(float(areas - shared), 1e-9))

    kept: list[int] = []
    for row in scores.argsort(descending=True, stable=True).tolist():
        rivals = (other for other in kept if classes[other] == classes[row])
        if scores[row] >= MIN_SCORE and all(overlap(boxes[other], boxes[row]) <= MAX_OVERLAP for other in rivals):
            kept.append(row)
    assert suppress(boxes, scores, classes).tolist() == kept


# A batch of photos, and plug-ins


def test_networks_run_once_a_batch(batch: PhotoBatch) -> None:
    calls = []
    assert batch.once("answer", lambda: calls.append(1) or 42) == 42
    assert batch.once("answer", lambda: calls.append(1) or 43) == 42
    assert len(calls) == 1


def test_unknown_views_are_suggested() -> None:
    with pytest.raises(ConfigError, match=r"unknown view 'gird'\. Did you mean 'grid'"):
        build_extractor("gird")
    with pytest.raises(ViewError, match="needs a bridge and a text database"):
        build_extractor("text_whole")


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
