"""The control studies: their statistics by hand, and that they spoil what they say they spoil."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import haav
from haav.cli.main import main
from haav.config import override
from haav.data.collate import collate
from haav.errors import ConfigError, DataError
from haav.inference.captioner import Captioner
from haav.photos.images import load_image
from haav.studies.control import _covered, _object, _zeroed, change, mask_photo, mask_study, trust, watch
from haav.types import Caption, PhotoView, View, Word
from helpers import SAMPLES, save_model


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    return haav.load(save_model(tmp_path_factory.mktemp("models") / "model"))


def test_changes_by_hand() -> None:
    found = change([[0.5, 0.3], [0.4], [0.2]], [[0.3, 0.3], [0.1], [0.3]])
    assert found.photos == 3
    assert found.clean == pytest.approx((0.4 + 0.4 + 0.2) / 3)
    assert found.mean == pytest.approx((-0.1 - 0.3 + 0.1) / 3)
    assert found.photos_that_drop == pytest.approx(2 / 3)
    assert found.steps_that_drop == pytest.approx(2 / 4)
    assert found.effect == pytest.approx(-0.1 / 0.2)
    assert found.low <= found.mean <= found.high
    with pytest.raises(DataError, match="no photo is left"):
        change([], [])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_share_of_the_real_tokens_is_zeroed(share: float) -> None:
    mask = torch.arange(12) < torch.tensor([[10], [4], [12]])
    view = View(torch.randn(3, 12, 5), mask)
    zeroed = (_zeroed(view, share, torch.Generator()).tokens == 0).all(dim=2) & mask
    assert zeroed.sum(dim=1).tolist() == [round(share * count) for count in (10, 4, 12)]


def test_covering_changes_the_box_and_nothing_else() -> None:
    image = load_image(SAMPLES / "cat.jpg")
    for cover in ("grey", "blur"):
        covered = _covered(image, (0.25, 0.25, 0.75, 0.5), cover)
        assert covered.size == image.size
        outside = image.crop((0, 0, image.width // 4 - 1, image.height))
        assert covered.crop((0, 0, image.width // 4 - 1, image.height)).tobytes() == outside.tobytes()
        middle = (image.width // 2 - 20, int(image.height * 0.3), image.width // 2 + 20, int(image.height * 0.45))
        assert covered.crop(middle).tobytes() != image.crop(middle).tobytes()


def test_the_mask_study_covers_for_one_view_at_a_time(captioner: Captioner) -> None:
    image = load_image(SAMPLES / "cat.jpg")
    assert mask_photo(captioner, image) is None, "a model of chance names no object"
    seen, covered = captioner.extract([image]), captioner.extract([_covered(image, (0, 0, 1, 1), "grey")])
    (caption,) = captioner.caption_extracted(seen, haav.CaptionOptions(min_words=3))
    case = watch(captioner, captioner.model, seen, {**covered, "objects": seen["objects"]}, caption, step=1)
    found = mask_study([case, case])
    tokens = torch.tensor([[[2, *(captioner.vocabulary.ids[word.text] for word in caption.words[:-1])]]])
    spoilt = collate([""], {"cells": covered["cells"], "objects": seen["objects"]}).views
    expected = trust(captioner.model, spoilt, tokens)[0, :, 0]
    assert found["cells"]["at the word"]["disturbed"] == pytest.approx(expected[1].item(), abs=1e-6)
    others = (expected[0] + expected[2:].sum()) / (len(expected) - 1)
    assert found["cells"]["at other words"]["disturbed"] == pytest.approx(others.item(), abs=1e-6)
    assert found["objects"]["at the word"]["mean"] == 0, "its own view is as it was"
    assert len(found["cells"]["heads"]) == captioner.config.model.heads
    with pytest.raises(ConfigError, match="unknown cover 'black'"):
        mask_photo(captioner, Image.new("RGB", (9, 9)), cover="black")


def test_the_object_to_cover_is_the_largest_that_the_caption_names() -> None:
    boxes = torch.tensor([[0, 0, 0.2, 0.2], [0, 0, 0.5, 0.5], [0, 0, 1, 1]])
    objects = PhotoView(torch.zeros(3, 1), boxes=boxes, labels=("motorbike", "motorbike", "sofa"))
    words = tuple(Word(text, 0, -1.0, 0.5, None) for text in ("two", "motorcycles", "parked"))
    assert _object(objects, Caption("two motorcycles parked", words, -1.0, 0.5)) == (1, (0.0, 0.0, 0.5, 0.5))
    assert _object(objects, Caption("two", words[:1], -1.0, 0.5)) is None


def test_one_bad_photo_ends_no_study_and_nothing_to_measure_is_said(
    tmp_path: Path, captioner: Captioner, capsys: pytest.CaptureFixture[str]
) -> None:
    captioner.save_pretrained(tmp_path / "model")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no")
    (tmp_path / "photos" / "cat.jpg").write_bytes((SAMPLES / "cat.jpg").read_bytes())
    words = ["--images", str(tmp_path / "photos"), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert main(["control", "mask", *words]) == 1
    shown = capsys.readouterr().err
    assert "broken.jpg" in shown
    assert "no photo can be measured" in shown
    (tmp_path / "some.jsonl").write_text('{"image": "cat.jpg", "caption": "x", "split": "val"}')
    assert main(["control", "mask", *words, "--dataset", str(tmp_path / "some.jsonl")]) == 1
    assert "broken.jpg" not in capsys.readouterr().err, "it is not of the data set"


def test_the_noise_study_is_a_command(tmp_path: Path, captioner: Captioner, capsys: pytest.CaptureFixture[str]) -> None:
    slow = captioner.with_config(override(captioner.config, "decode", {"min_words": 4}))
    slow.save_pretrained(tmp_path / "model")
    rows = [{"image": f"{name}.jpg", "caption": "x", "split": "val"} for name in ("cat", "coffee")]
    (tmp_path / "photos").mkdir()
    for row in rows:
        shutil.copy(SAMPLES / row["image"], tmp_path / "photos")
    (tmp_path / "photos.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = str(tmp_path / "views")
    photos = str(tmp_path / "photos")
    assert main(["extract", "--images", photos, "--store", store, "--views", "cells,objects", "--workers", "1"]) == 0
    words = ["--store", store, "--dataset", str(tmp_path / "photos.jsonl"), "--model", str(tmp_path / "model")]
    assert main(["control", "noise", *words, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "noise.json").read_text())
    assert found["cells"]["shares"]["0"]["mean"] == pytest.approx(0, abs=1e-6)
    assert found["cells"]["shares"]["0.9"]["photos"] == 2
    assert (tmp_path / "out" / "noise.png").stat().st_size > 1000
    assert "steps" in capsys.readouterr().out
