"""The graph of the extractors against the extractors themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import haav
from haav.inference.pack import pack
from haav.photos.images import load_image
from haav.types import PhotoView, ViewSpec
from haav.views import Extractor, PhotoBatch, extractors
from haav.views.embedded.objects import MAX_BOXES, MIN_SCORE, suppress
from haav.views.embedded.regions import RegionsExtractor
from helpers import SAMPLES, save_text_model

pytest.importorskip("onnxruntime", reason="needs the onnx extra")
pytest.importorskip("onnx", reason="needs the onnx extra")
import onnxruntime

from haav.export.extractors import export_extractors
from haav.export.graph import write_graph
from haav.export.onnx import export_onnx
from haav.export.portable import PortableCaptioner
from haav.export.portable.views import Arrays, PortableExtractors

EXPORTABLE = [name for name in extractors if extractors.get(name).exportable]
IMAGES = [*(load_image(SAMPLES / name) for name in ("cat.jpg", "motorcycles.jpg")), Image.new("RGB", (50, 70))]
"""with one object, with several, with none"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads every view that can be exported; sentences are found by CLIP's description of the photo"""
    folder = tmp_path_factory.mktemp("models")
    pack(save_text_model(folder, EXPORTABLE, "patch_regions"), folder / "packed", folder / "bridge", folder / "textdb")
    return folder / "packed"


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    export_onnx(model, out)
    return out


@pytest.fixture(scope="module")
def captioner(model: Path) -> haav.Captioner:
    return haav.load(model, precision="float32")


@pytest.fixture(scope="module")
def portable(exported: Path) -> PortableCaptioner:
    return PortableCaptioner(exported)


@pytest.fixture(scope="module")
def views(captioner: haav.Captioner) -> dict[str, list[PhotoView]]:
    return captioner.extract(IMAGES)


@pytest.fixture(scope="module")
def portable_views(portable: PortableCaptioner) -> dict[str, list[Arrays]]:
    return portable.extract(IMAGES)


def test_what_ships_next_can_be_exported() -> None:
    assert {"patches", "dino_patches", "text_whole"} <= set(EXPORTABLE)


@pytest.mark.parametrize("name", EXPORTABLE)
def test_views_of_the_graph_are_those_of_the_extractor(
    name: str, views: dict[str, list[PhotoView]], portable_views: dict[str, list[Arrays]]
) -> None:
    for ours, theirs in zip(views[name], portable_views[name], strict=True):
        tokens = torch.from_numpy(theirs["tokens"])
        assert tokens.shape == ours.tokens.shape
        # As a share of a token's length. float32 itself is 1.2e-4 off on some of CLIP's tokens (docs/how-to/views.md).
        errors = (tokens - ours.tokens).norm(dim=1) / ours.tokens.norm(dim=1)
        assert not len(errors) or (errors.max() < 5e-4 and errors.median() < 2e-5)
        assert theirs.keys() - {"tokens", "boxes", "sentences"} == ours.indices.keys()
        for index, values in ours.indices.items():
            np.testing.assert_array_equal(theirs[index], values.numpy())
        if ours.boxes is not None:
            np.testing.assert_allclose(theirs["boxes"], ours.boxes.numpy(), atol=1e-5)
        if "sentences" in extractors.get(name).gives:
            assert tuple(theirs["sentences"]) == ours.labels


def test_a_model_with_clip_and_texts_captions_as_it_does_with_torch(
    captioner: haav.Captioner,
    portable: PortableCaptioner,
    views: dict[str, list[PhotoView]],
    portable_views: dict[str, list[Arrays]],
) -> None:
    ours = captioner.caption_extracted(views, haav.CaptionOptions(n_best=2))
    for one, other in zip(ours, portable.caption_extracted(portable_views, n_best=2), strict=True):
        assert [other.text, other.n_best[0].text] == [one.text, one.n_best[0].text]
        assert other.logprob == pytest.approx(one.logprob, abs=1e-3)
        for word, other_word in zip(one.words, other.words, strict=True):
            assert other_word.views == pytest.approx(word.views, abs=1e-4)


def test_clip_is_exported_in_8_bits(exported: Path) -> None:
    """86 M weights of CLIP's layers; DINOv2, YOLO and EfficientNet, whose weights are float32, take 125 MB."""
    assert (exported / "extractors.onnx").stat().st_size < 230e6


class Colours(Extractor):
    """The example of docs/how-to/your-own-view.md"""

    name, licence, exportable = "colours", "none needed", True
    spec = ViewSpec(dim=3, max_tokens=9, indices={"tile": 9})
    fingerprint = "colours-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        tiles = torch.nn.functional.adaptive_avg_pool2d(photos.pixels(96).float() / 255, 3)
        return [PhotoView(tile.flatten(1).T, {"tile": torch.arange(9)}) for tile in tiles]


def test_a_view_of_ones_own_is_exported_by_saying_so(tmp_path: Path) -> None:
    about = export_extractors({"colours": Colours()}, tmp_path)
    assert about == {"inputs": {"pixels.96.bilinear": "BILINEAR"}, "sentences": {}}
    views = PortableExtractors(tmp_path, about, 1)(IMAGES)["colours"]
    for ours, theirs in zip(Colours().extract(PhotoBatch(["a", "b", "c"], IMAGES)), views, strict=True):
        np.testing.assert_allclose(theirs["tokens"], ours.tokens.numpy(), atol=1e-6)
        np.testing.assert_array_equal(theirs["tile"], ours.indices["tile"].numpy())


def test_a_view_is_not_exported_if_the_one_it_reads_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(
        save_text_model(tmp_path, ["cells", "text_whole"]),
        tmp_path / "packed",
        tmp_path / "bridge",
        tmp_path / "textdb",
    )
    monkeypatch.setattr(RegionsExtractor, "exportable", False)
    export_onnx(tmp_path / "packed", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "portable.json").read_text())["extractors"] is None


class Suppress(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return suppress(*tensors)


def crowd(seed: int, score: float) -> list[Tensor]:
    """Boxes of three classes, many of which overlap; a few scores are equal"""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(700, 2, generator=generator)
    boxes = torch.cat([corners, corners + 0.02 + 0.2 * torch.rand(700, 2, generator=generator)], dim=1)
    scores = (score * torch.rand(700, generator=generator) ** 3 * 1000).round() / 1000
    return [boxes, scores, torch.randint(0, 3, (700,), generator=generator)]


def test_boxes_are_suppressed_in_a_graph_as_in_torch(tmp_path: Path) -> None:
    example = crowd(0, 1.0)
    write_graph(Suppress(), tuple(example), ["boxes", "scores", "classes"], ["rows"], {}, tmp_path / "s.onnx")
    graph: Any = onnxruntime.InferenceSession(tmp_path / "s.onnx", providers=["CPUExecutionProvider"])
    kept = []
    for seed, score in ((0, 1.0), (1, 0.2), (2, 0.11), (3, 0.0)):
        boxes, scores, classes = crowd(seed, score)
        scores[5] = MIN_SCORE if score else 0.0  # exactly at the threshold, which is enough
        ours = suppress(boxes, scores, classes)
        feed = {"boxes": boxes.numpy(), "scores": scores.numpy(), "classes": classes.numpy()}
        np.testing.assert_array_equal(graph.run(None, feed)[0], ours.numpy())
        kept.append(len(ours))
    assert kept[0] == MAX_BOXES
    assert 1 < kept[1] < int((crowd(1, 0.2)[1] >= MIN_SCORE).sum())
    assert kept[3] == 0
