"""The embedded extractors, on real weights and real photos; the laws of pooling and suppression."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.testing import assert_close

from haav.errors import ConfigError, ViewError
from haav.photos.images import load_image
from haav.views import PhotoBatch, build_extractor, extractors
from haav.views.embedded import efficientnet, folded_conv, yolo
from haav.views.embedded.objects import MAX_OVERLAP, MIN_SCORE, suppress
from haav.views.embedded.pooling import pool
from haav.views.embedded.regions import CROPS, crops

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


# A batch of photos


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
