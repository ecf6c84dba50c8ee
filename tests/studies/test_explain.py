"""Why this word: weights and looks that add up, counterfactuals that are what they say, pages that stand alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import haav
from haav.cli.main import main
from haav.data.collate import collate
from haav.errors import ConfigError
from haav.inference.captioner import Captioner
from haav.inference.stream import CaptionedPhoto, PhotoItem
from haav.model.build import build_model
from haav.photos.images import load_image
from haav.studies.explain import _without, explain
from haav.studies.html import render_explanation
from haav.text import BOS
from haav.types import PhotoView
from helpers import SAMPLES, save_model


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    return haav.load(save_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def seen(captioner: Captioner) -> dict[str, list[PhotoView]]:
    return captioner.extract([load_image(SAMPLES / "cat.jpg"), load_image(SAMPLES / "motorcycles.jpg")])


def captioned(captioner: Captioner, seen: dict[str, list[PhotoView]]) -> list[CaptionedPhoto]:
    """Photos with these views, as they come out of the stream"""
    captions = captioner.caption_extracted(seen)
    item = PhotoItem("photo", lambda: b"")
    return [
        CaptionedPhoto(item, views={name: views[index] for name, views in seen.items()}, caption=caption)
        for index, caption in enumerate(captions)
    ]


def test_an_explanation_changes_nothing_and_its_shares_add_up(
    captioner: Captioner, seen: dict[str, list[PhotoView]]
) -> None:
    plain = captioner.caption_extracted(seen)
    found = explain(captioner, captioned(captioner, seen))
    assert [each.caption.text for each in found] == [caption.text for caption in plain]
    for each, caption in zip(found, plain, strict=True):
        assert [word.word for word in each.words] == caption.text.split()
        for word, said in zip(each.words, caption.words, strict=True):
            assert sum(look.weight for look in word.looks.values()) == pytest.approx(1, abs=1e-5)
            assert said.views is not None
            for name, look in word.looks.items():
                assert look.weight == pytest.approx(said.views[name], abs=1e-5)
                last = look.heads[-1]
                assert sum(last) / len(last) == pytest.approx(look.weight, abs=1e-5)
                assert sum(share for _, share in look.places) <= 1 + 1e-5
                assert all(token < len(each.views[name]) for token, _ in look.places)


def test_places_are_cells_and_named_boxes(captioner: Captioner, seen: dict[str, list[PhotoView]]) -> None:
    cat = explain(captioner, captioned(captioner, seen))[0]
    assert len(cat.views["cells"]) == 25
    assert cat.views["cells"][7].box == (0.4, 0.2, 0.6, 0.4)
    assert "cat" in {place.label for place in cat.views["objects"]}


def test_what_a_word_loses_is_its_probability_without_the_view(
    captioner: Captioner, seen: dict[str, list[PhotoView]]
) -> None:
    (cat, _) = explain(captioner, captioned(captioner, seen))
    ids = [captioner.vocabulary.ids[word.word] for word in cat.words]
    tokens = torch.tensor([[[BOS, *ids[:-1]]]])
    own = {name: [views[0]] for name, views in seen.items()}
    with torch.no_grad():
        whole = captioner.model(collate([""], own).views, tokens).logprobs.exp()[0, 0]
        blind = captioner.model(collate([""], {"cells": own["cells"]}).views, tokens).logprobs.exp()[0, 0]
    for position, (index, word) in enumerate(zip(ids, cat.words, strict=True)):
        assert word.probability == pytest.approx(whole[position, index].item(), abs=1e-6)
        assert word.looks["objects"].lost == pytest.approx((whole - blind)[position, index].item(), abs=1e-6)
    assert cat.without["objects"] == captioner.caption(SAMPLES / "cat.jpg", views=["cells"]).text
    assert cat.alone["objects"] == captioner.caption(SAMPLES / "cat.jpg", views=["objects"]).text


def test_a_view_that_a_photo_lacks_weighs_nothing_and_is_not_taken_away(
    captioner: Captioner, seen: dict[str, list[PhotoView]]
) -> None:
    (found, _) = explain(captioner, captioned(captioner, _without(seen, ["objects"])))
    assert found.views["objects"] == ()
    assert set(found.alone) == {"cells"}
    assert found.without == {}
    for word in found.words:
        assert (word.looks["objects"].weight, word.looks["objects"].lost) == (0.0, 0.0)
        assert word.looks["cells"].lost == pytest.approx(word.probability)


def test_pages_figures_and_data_are_written_for_each_photo(
    tmp_path: Path, captioner: Captioner, capsys: pytest.CaptureFixture[str]
) -> None:
    captioner.save_pretrained(tmp_path / "model")
    (tmp_path / "broken.jpg").write_bytes(b"no")
    words = [str(SAMPLES / "cat.jpg"), str(SAMPLES / "coffee.jpg"), str(tmp_path / "broken.jpg")]
    assert main(["explain", *words, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "why")]) == 3
    made = sorted(file.name for file in (tmp_path / "why").iterdir())
    assert made == sorted(f"{name}.{suffix}" for name in ("cat", "coffee") for suffix in ("html", "json", "png"))
    with Image.open(tmp_path / "why" / "cat.png") as figure:
        assert figure.width > 400
    data = json.loads((tmp_path / "why" / "cat.json").read_text())
    assert {"image", "caption", "words", "views", "without", "alone"} <= data.keys()
    page = (tmp_path / "why" / "cat.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_caption_explains_what_it_captions_also_from_standard_input(
    tmp_path: Path, captioner: Captioner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captioner.save_pretrained(tmp_path / "model")
    (tmp_path / "broken.jpg").write_bytes(b"no")
    picture = (SAMPLES / "cat.jpg").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(picture)))
    words = ["-", str(SAMPLES / "coffee.jpg"), str(tmp_path / "broken.jpg"), "--beam", "2", "--views", "cells"]
    model = ["--model", str(tmp_path / "model"), "--json"]
    assert main(["caption", *words, *model, "--explain", str(tmp_path / "why")]) == 3
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["caption" in row for row in said] == [True, True, False]
    for name, row in zip(("photo", "coffee"), said[:2], strict=True):
        page = json.loads((tmp_path / "why" / f"{name}.json").read_text())
        assert (page["image"], page["caption"]) == (row["image"], row["caption"])
        assert set(page["views"]) == {"cells"}
    assert not (tmp_path / "why" / "broken.json").exists()


def test_no_caption_can_end_the_script_of_a_page() -> None:
    image = Image.new("RGB", (8, 8))
    data = {"caption": "</script><script>alert(1)</script>", "words": [], "views": {}, "without": {}, "alone": {}}
    page = render_explanation("</title><b>", image, data)
    assert page.count("</script>") == 2
    assert "</title><b>" not in page


def test_a_model_that_does_not_weigh_views_is_refused_before_any_work(captioner: Captioner) -> None:
    config = replace(captioner.config, model=replace(captioner.config.model, aggregator="mean"))
    blunt = Captioner(build_model(config.model), config, captioner.vocabulary, captioner.extractors)
    with pytest.raises(ConfigError, match="does not weigh views"):
        explain(blunt, [])
