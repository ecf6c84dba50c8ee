"""Why this word: weights and looks that add up, counterfactuals that are what they say, pages that stand alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import haav
from haav.cli.main import main
from haav.data.collate import collate
from haav.errors import ConfigError
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import CaptionedPhoto, PhotoItem
from haav.model.build import build_model
from haav.photos.images import load_image
from haav.studies.explain import ALTERNATIVES, ExplainedView, Look, Place, _without, explain
from haav.studies.explain_figure import heat_map
from haav.studies.html import render_explanation
from haav.text import BOS, SPECIAL
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
                assert all(token < len(each.views[name].places) for token, _ in look.places)


def test_places_are_cells_and_named_boxes(captioner: Captioner, seen: dict[str, list[PhotoView]]) -> None:
    cat = explain(captioner, captioned(captioner, seen))[0]
    cells, objects = cat.views["cells"], cat.views["objects"]
    assert (cells.shows, objects.shows) == ("heat", "boxes")
    assert (cells.title, objects.title) == ("what the image encoder saw", "objects found")
    assert (cells.position, objects.position) == (0, 1)
    assert len(cells.places) == 25
    assert cells.places[7].box == (0.4, 0.2, 0.6, 0.4)
    assert "cat" in {place.label for place in objects.places}


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
        alone = blind[position].argmax().item()
        kept = alone in (index, whole[position].argmax().item())
        assert word.looks["objects"].instead == ("" if kept else captioner.vocabulary.words[int(alone)])
    assert cat.without["objects"] == captioner.caption(SAMPLES / "cat.jpg", views=["cells"]).text
    assert cat.alone["objects"] == captioner.caption(SAMPLES / "cat.jpg", views=["objects"]).text


def test_alternatives_are_the_likeliest_other_words(captioner: Captioner, seen: dict[str, list[PhotoView]]) -> None:
    (cat, _) = explain(captioner, captioned(captioner, seen))
    ids = [captioner.vocabulary.ids[word.word] for word in cat.words]
    own = {name: [views[0]] for name, views in seen.items()}
    with torch.no_grad():
        logprobs = captioner.model(collate([""], own).views, torch.tensor([[[BOS, *ids[:-1]]]])).logprobs[0, 0]
    for position, (index, word) in enumerate(zip(ids, cat.words, strict=True)):
        shares = {text: logprobs[position, token].exp().item() for text, token in captioner.vocabulary.ids.items()}
        others = sorted((text for text in shares if text not in (*SPECIAL, word.word)), key=shares.__getitem__)
        assert [text for text, _ in word.alternatives] == others[: -ALTERNATIVES - 1 : -1]
        assert all(share == pytest.approx(shares[text], abs=1e-6) for text, share in word.alternatives), index


def test_views_disagree_on_a_word_as_much_as_its_losses_differ(
    captioner: Captioner, seen: dict[str, list[PhotoView]]
) -> None:
    (cat, _) = explain(captioner, captioned(captioner, seen))
    for word in cat.words:
        cells, objects = (word.looks[name].lost for name in ("cells", "objects"))
        assert word.disagreement == pytest.approx(abs(cells - objects))
    assert {word.word for word in cat.words if word.content}.isdisjoint({"a", "the", "of", "on", "with"})


def test_further_captions_are_explained_too(captioner: Captioner) -> None:
    options = CaptionOptions(n_best=3)
    photos = list(captioner.stream([PhotoItem("cat", (SAMPLES / "cat.jpg").read_bytes)], options))
    (cat,) = explain(captioner, photos, options)
    data = cat.to_json()
    assert len(data["n_best"]) == 2
    for other, candidate in zip(data["n_best"], cat.caption.n_best, strict=True):
        assert [word["word"] for word in other["words"]] == candidate.text.split()
        for word, plain in zip(other["words"], candidate.words, strict=True):
            assert word["looks"]["cells"]["weight"] == pytest.approx(plain.views["cells"], abs=1e-3)
    assert cat.without["objects"] == captioner.caption(SAMPLES / "cat.jpg", views=["cells"]).text


def test_a_heat_map_is_highest_where_the_word_looked() -> None:
    boxes = [(x / 4, y / 4, (x + 1) / 4, (y + 1) / 4) for y in range(4) for x in range(4)]
    whole = Place("", (0.0, 0.0, 1.0, 1.0))
    view = ExplainedView("", "heat", 0, (whole, *(Place("", box) for box in boxes)))
    shares = ((0, 0.5), (1 + 6, 0.4), *((1 + cell, 0.01) for cell in range(16) if cell != 6))
    heat = heat_map(view, Look(1.0, (), shares, 0.0, ""))
    assert heat is not None
    row, column = np.unravel_index(heat.argmax(), heat.shape)
    assert (row // 16, column // 16) == (1, 2), "the cell of the second row and third column"
    assert (heat.min(), heat.max()) == (0.0, pytest.approx(1.0))
    assert np.abs(np.diff(heat, axis=0)).max() < 0.2, "smooth"
    assert heat_map(view, Look(1.0, (), ((0, 1.0),), 0.0, "")) is None


def test_a_view_that_a_photo_lacks_weighs_nothing_and_is_not_taken_away(
    captioner: Captioner, seen: dict[str, list[PhotoView]]
) -> None:
    (found, _) = explain(captioner, captioned(captioner, _without(seen, ["objects"])))
    assert found.views["objects"].places == ()
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
    assert page.count("</script>") == 1
    assert "</title><b>" not in page


def test_a_model_that_does_not_weigh_views_is_refused_before_any_work(captioner: Captioner) -> None:
    config = replace(captioner.config, model=replace(captioner.config.model, aggregator="mean"))
    blunt = Captioner(build_model(config.model), config, captioner.vocabulary, captioner.extractors)
    with pytest.raises(ConfigError, match="does not weigh views"):
        explain(blunt, [])
