"""Photos in, captions out: one or many, good or bad, with and without a file that goes on."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import haav
from haav import pretrained
from haav.cli.main import main
from haav.config import DecodeConfig
from haav.errors import CheckpointError, ConfigError, ImageError
from haav.inference import stream
from haav.inference.captioner import Captioner
from haav.inference.pack import pack
from haav.photos.images import load_image
from haav.types import Caption
from helpers import SAMPLES, save_model, save_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def captioner(model: Path) -> Captioner:
    return haav.load(model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two photos, one of them deep down, a broken one and a file that is none"""
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    with Image.open(SAMPLES / "cat.jpg") as image:
        image.resize((90, 60)).save(tmp_path / "photos" / "deep" / "cat.png")
    with Image.open(SAMPLES / "coffee.jpg") as image:
        image.resize((90, 60)).save(tmp_path / "photos" / "a.jpg")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"\xff\xd8 not a photo")
    (tmp_path / "photos" / "notes.md").write_text("nothing")
    return tmp_path / "photos"


def test_paths_pictures_arrays_and_bytes_give_the_same_caption(captioner: Captioner, folder: Path) -> None:
    path = folder / "deep" / "cat.png"
    picture = Image.open(path)
    photos = [str(path), path, picture, np.asarray(picture), path.read_bytes()]
    captions = captioner.caption(photos)
    assert len({caption.text for caption in captions}) == 1
    assert isinstance(captioner.caption(path), Caption)
    assert captioner.caption(path).text == captions[0].text
    assert captioner.caption([]) == []


def test_a_caption_does_not_depend_on_its_batch(captioner: Captioner, folder: Path) -> None:
    photos = [SAMPLES / "cat.jpg", SAMPLES / "coffee.jpg", folder / "a.jpg"]
    together, one_by_one = captioner.caption(photos), captioner.caption(photos, batch=1)
    assert [caption.text for caption in together] == [caption.text for caption in one_by_one]


def test_threads_share_a_captioner(model: Path) -> None:
    fresh = haav.load(model)
    photos = [SAMPLES / "cat.jpg", SAMPLES / "coffee.jpg"] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda photo: fresh.caption(photo).text, photos))
    assert found == [caption.text for caption in fresh.caption(photos)]


def test_views_can_be_chosen_and_the_others_weigh_nothing(captioner: Captioner) -> None:
    caption = captioner.caption(SAMPLES / "cat.jpg", views=["cells"])
    assert all(word.views == {"cells": 1.0, "objects": 0.0} for word in caption.words)
    with pytest.raises(ConfigError, match="unknown view 'cels'. Did you mean 'cells'"):
        captioner.caption(SAMPLES / "cat.jpg", views=["cels"])


def test_json_has_a_line_for_each_photo_and_bad_ones_stop_nobody(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["caption", str(folder), "nowhere.jpg", "--model", str(model), "--json", "--beam", "3", "--n-best", "2"]
    assert main(words) == 3
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {Path(row["image"]).name: row for row in rows}
    assert set(by_name) == {"a.jpg", "broken.jpg", "cat.png", "nowhere.jpg"}
    assert set(by_name["broken.jpg"]) == set(by_name["nowhere.jpg"]) == {"image", "error"}
    assert "does not exist" in by_name["nowhere.jpg"]["error"]
    good = by_name["cat.png"]
    assert set(good) == {"image", "caption", "confidence", "unfamiliar", "words", "n_best"}
    assert len(good["n_best"]) == 1
    assert good["caption"].split() == [word["word"] for word in good["words"]]
    for word in good["words"]:
        assert set(word) == {"word", "probability", "confidence", "views"}
        assert sum(word["views"].values()) == pytest.approx(1, abs=1e-3)


def test_people_see_captions_and_errors_apart_without_a_legend_of_colours_that_are_not_there(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["caption", str(folder / "*.jpg"), "--model", str(model)]) == 3
    shown = capsys.readouterr()
    assert "a.jpg" in shown.out
    assert "% sure" in shown.out
    assert "words by the view" not in shown.out
    assert "broken.jpg" in shown.err


@pytest.mark.parametrize(
    ("words", "legend"),
    [
        (["a.jpg"], "words by the view that each trusts most: cells objects"),
        (["a.jpg", "--views", "cells"], "words by the view that each trusts most: cells"),
        (["a.jpg", "--quiet"], ""),
        (["broken.jpg"], ""),
    ],
)
def test_the_legend_names_the_views_in_use_after_the_captions(
    model: Path,
    folder: Path,
    words: list[str],
    legend: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["caption", str(folder / words[0]), *words[1:], "--model", str(model), "--decode.min_words", "2"])
    shown = capsys.readouterr().out
    assert ("\x1b[" in shown) == (words[0] == "a.jpg")
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert [line for line in lines if line.startswith("words by")] == ([legend] if legend else [])
    assert not legend or lines[-1] == legend


def test_captions_can_be_plain_text_or_csv(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["caption", str(folder), "--model", str(model)]
    assert main([*words, "--format", "json"]) == 3
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    good = [row for row in rows if "caption" in row]
    assert main([*words, "--format", "text"]) == 3
    shown = capsys.readouterr()
    assert shown.out == "".join(f"{row['image']}\t{row['caption']}\n" for row in good)
    assert "broken.jpg" in shown.err
    assert main([*words, "--format", "csv"]) == 3
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["image"], row["caption"]) for row in table] == [(row["image"], row["caption"]) for row in good]
    assert [float(row["confidence"]) for row in table] == [pytest.approx(row["confidence"], abs=1e-4) for row in good]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "xml"], "unknown format 'xml'"),
        (["--format", "csv", "--json"], "give either --json or --format csv"),
        (["--format", "csv", "--out", "c.csv"], "redirect the output: --format csv > FILE"),
        (["--overwrite"], "--overwrite needs --out FILE"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["caption", "a.jpg", *words]) == 2
    assert message in capsys.readouterr().err


def test_folders_inside_of_folders_are_left_out_if_asked_and_a_photo_is_one_by_any_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    def names(*paths: str, recursive: bool = True) -> list[str]:
        return [item.name for item in stream.find_items(paths, lambda most: b"", recursive)]

    assert names(".") == ["a.jpg", "broken.jpg", "deep/cat.png"]
    assert names(".", recursive=False) == ["a.jpg", "broken.jpg"]
    assert names(str(folder), recursive=False) == [str(folder / name) for name in ("a.jpg", "broken.jpg")]
    assert names("a.jpg", "./a.jpg", str(folder / "a.jpg"), "deep/../a.jpg") == ["a.jpg"]


def test_a_seed_repeats_samples(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["caption", str(folder / "a.jpg"), "--model", str(model), "--format", "text", "--decode.method", "sample"]

    def said(seed: str) -> str:
        assert main([*words, "--decode.temperature", "5", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert said("1") == said("1") != said("2")


def test_standard_input_is_a_photo(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((SAMPLES / "cat.jpg").read_bytes())))
    assert main(["caption", "-", "--model", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["image"] == "-"


def test_a_file_of_captions_goes_on_where_it_was_cut_off(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "captions.jsonl"
    words = ["caption", str(folder), "--model", str(model), "--out", str(out)]
    assert main(words) == 3
    whole = out.read_text()
    first, *rest = whole.splitlines(keepends=True)
    out.write_text(first + rest[0][:20])  # cut off while writing the second line
    asked: list[str] = []
    plain = Captioner.stream

    def watched(tool: Captioner, items: list[stream.PhotoItem], *rest: Any) -> object:
        asked.extend(item.name for item in items)
        return plain(tool, items, *rest)

    monkeypatch.setattr(Captioner, "stream", watched)
    assert main(words) == 3
    assert json.loads(first)["image"] not in asked
    assert len(asked) == 2
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    (folder / "broken.jpg").write_bytes((folder / "a.jpg").read_bytes())
    assert main(words) == 0, "what failed is tried again"
    assert "3 captions, 2 of them kept; 0 failed" in capsys.readouterr().out


def test_names_that_are_no_text_and_places_that_cannot_be_read_stop_nobody(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(b"caf\xe9.jpg")
    (folder / odd).write_bytes((folder / "a.jpg").read_bytes())
    (folder / "torn.tar").write_bytes(b"no tar")
    out = tmp_path / "captions.jsonl"
    words = ["caption", str(folder), "x" * 5000, "--model", str(model)]
    assert main([*words, "--out", str(out)]) == 3
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {Path(row["image"]).name for row in rows if "caption" in row} == {"a.jpg", "cat.png", odd}
    assert any("torn.tar" in row.get("error", "") for row in rows)
    assert main([*words, "--out", str(out)]) == 3
    assert "3 captions, 3 of them kept" in capsys.readouterr().out
    assert main(words) == 3


def test_the_exit_code_tells_some_from_none(model: Path, folder: Path) -> None:
    words = ["caption", "--model", str(model), "--json"]
    assert main([*words, str(folder / "a.jpg")]) == 0
    assert main([*words, str(folder / "a.jpg"), str(folder / "broken.jpg")]) == 3
    assert main([*words, str(folder / "broken.jpg"), "nowhere.jpg"]) == 1
    with pytest.raises(SystemExit, match="2"):
        main([*words, str(folder), "--bean", "3"])


def test_a_batch_is_as_large_as_was_asked_for(captioner: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = captioner.extract

    def look(images: list[Image.Image], views: list[str] | None = None) -> object:
        sizes.append(len(images))
        return plain(images, views)

    monkeypatch.setattr(captioner, "extract", look)
    cat = (SAMPLES / "cat.jpg").read_bytes()
    items = [stream.PhotoItem(str(index), lambda: cat) for index in range(11)]
    assert len(list(captioner.stream(items, batch=10))) == 11
    assert sizes == [10, 1]


@pytest.mark.parametrize("options", [{}, {"method": "sample", "seed": 3}, {"method": "sample"}])
def test_batches_side_by_side_say_what_they_say_one_by_one(captioner: Captioner, options: dict[str, object]) -> None:
    good = [file.read_bytes() for file in sorted(SAMPLES.glob("*.jpg"))]
    photos = [b"broken" if index == 2 else good[index % len(good)] for index in range(6)]
    items = [stream.PhotoItem(str(index), lambda data=data: data) for index, data in enumerate(photos)]
    found: list[object] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        rows = [row.to_json() for row in captioner.stream(items, haav.CaptionOptions(**options), 2)]
        captions = [caption.text for caption in captioner.caption(photos[3:], batch=2, **options)]
        found.append(([(row["image"], row.get("caption"), row.get("error")) for row in rows], captions))
    torch.set_num_threads(1)
    assert found[0] == found[1]
    assert found[0][0][2][1] is None, "the broken one"


def test_pictures_read_at_once_leave_warnings_as_they_were() -> None:
    before = list(warnings.filters)
    data = (SAMPLES / "cat.jpg").read_bytes()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: load_image(data).size, range(40)))
    assert list(warnings.filters) == before


def test_a_folder_called_best_does_not_hide_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "package"
    save_model(shipped / "best")
    (tmp_path / "here" / "best").mkdir(parents=True)
    monkeypatch.setattr(pretrained, "SHIPPED", shipped)
    monkeypatch.chdir(tmp_path / "here")
    assert pretrained.find_model("best") == shipped / "best"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--beam", "100000"], "'--beam' must be at most 50, not 100000"),
        (["--decode.beam=51"], "'--decode.beam' must be at most 50, not 51"),
        (["--n-best", "51"], "n_best must be a whole number from 1 to 50, not 51"),
        (["--decode.bean", "3"], "unknown setting '--decode.bean'. Did you mean '--decode.beam'?"),
        (["--beam", "2", "--n-best", "3"], "3 captions per photo need decode.beam of at least 3, not 2"),
    ],
)
def test_settings_that_cannot_work_are_named_as_they_were_typed(
    model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["caption", "a.jpg", "--model", str(model), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", "a.jpg", "--model", "bset"]) == 1
    assert "no model directory bset" in capsys.readouterr().err


def test_a_packed_model_is_small_complete_and_says_the_same(tmp_path: Path) -> None:
    model = save_text_model(tmp_path)
    with pytest.raises(ConfigError, match="this model reads text_whole"):
        pack(model, tmp_path / "out", None, None)
    sizes = pack(model, tmp_path / "out", tmp_path / "bridge", tmp_path / "textdb")
    assert set(sizes) == {"model", "bridge", "textdb"}
    assert sizes["bridge"] < 0.2 * sum(file.stat().st_size for file in (tmp_path / "bridge").iterdir())
    whole = haav.load(
        model, options=haav.ExtractorOptions(bridge=str(tmp_path / "bridge"), textdb=str(tmp_path / "textdb"))
    )
    packed = haav.load(tmp_path / "out")
    for photo in (SAMPLES / "cat.jpg", SAMPLES / "coffee.jpg"):
        one, other = whole.caption(photo), packed.caption(photo)
        assert one.text == other.text
        assert one.logprob == pytest.approx(other.logprob, rel=0.02)


def test_a_model_of_other_features_is_refused(model: Path, tmp_path: Path) -> None:
    tool = haav.load(model)
    assert tool.extractors is not None
    tool.extractors.specs["cells"] = replace(tool.extractors.specs["cells"], dim=7)
    with pytest.raises(CheckpointError, match="another 'cells'"):
        tool.caption(SAMPLES / "cat.jpg")


def test_a_picture_may_be_a_file_a_tensor_or_one_of_a_batch(captioner: Captioner, folder: Path) -> None:
    path = folder / "a.jpg"
    expected = captioner.caption(path).text
    pixels = np.asarray(load_image(path))
    with open(path, "rb") as file:
        assert captioner.caption(file).text == expected
    assert captioner.caption(io.BytesIO(path.read_bytes())).text == expected
    assert captioner.caption(torch.from_numpy(pixels.copy()).permute(2, 0, 1)).text == expected
    assert [caption.text for caption in captioner.caption(np.stack([pixels, pixels]))] == [expected, expected]
    assert captioner.caption(path, views="cells") == captioner.caption(path, views=["cells"])
    for wrong in (3, None, {"a": 1}):
        with pytest.raises(ImageError, match=f"of type {type(wrong).__name__} is not a photo"):
            captioner.caption(wrong)  # type: ignore[call-overload]
    with pytest.raises(ImageError, match="open as text"):
        captioner.caption(io.StringIO("text"))  # type: ignore[call-overload]


def test_a_bad_photo_among_many_stops_the_others_only_if_asked(captioner: Captioner, folder: Path) -> None:
    photos = [folder / "a.jpg", folder / "broken.jpg", folder / "deep" / "cat.png"]
    with pytest.raises(ImageError, match="broken.jpg"):
        captioner.caption(photos)
    first, error, last = captioner.caption(photos, errors="return")
    assert isinstance(error, ImageError)
    assert isinstance(first, Caption)
    assert isinstance(last, Caption)
    with pytest.raises(ConfigError, match="unknown value of errors 'skip'"):
        captioner.caption(photos, errors="skip")  # type: ignore[call-overload]


def test_explaining_extracts_a_photo_once(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extracted: list[int] = []
    plain = Captioner.extract

    def watched(tool: Captioner, images: list[Image.Image], *rest: Any) -> object:
        extracted.append(len(images))
        return plain(tool, images, *rest)

    monkeypatch.setattr(Captioner, "extract", watched)
    words = ["caption", str(folder / "a.jpg"), "--model", str(model), "--explain", str(tmp_path / "why")]
    assert main(words) == 0
    assert extracted == [1]
    assert (tmp_path / "why" / "a.html").exists()


def test_a_caption_prints_as_its_text_and_its_words_know_their_tokens(captioner: Captioner, folder: Path) -> None:
    caption = captioner.caption(folder / "a.jpg")
    assert str(caption) == caption.text
    assert repr(caption) == f"Caption({caption.text!r}, confidence={caption.confidence:.2f})"
    assert [captioner.vocabulary.words[word.token] for word in caption.words] == caption.text.split()


def test_options_are_every_decode_setting_and_misspelt_ones_are_suggested(captioner: Captioner) -> None:
    named = {field.name: str(field.type) for field in fields(haav.CaptionOptions)}
    for field in fields(DecodeConfig):
        assert named[field.name] == f"{field.type} | None", "a decode setting can be asked for"
    with pytest.raises(ConfigError, match="unknown setting 'beem'. Did you mean 'beam'"):
        captioner.caption(SAMPLES / "cat.jpg", beem=3)
    with pytest.raises(ConfigError, match="'beam' must be at least 1, not 0"):
        captioner.caption(SAMPLES / "cat.jpg", haav.CaptionOptions(beam=0))
