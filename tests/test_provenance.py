"""A model knows who made its views, and refuses those of anybody else wherever it meets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import haav
from haav import provenance
from haav.cli.main import main
from haav.data.annotations import Photo, load_dataset
from haav.data.toy import make_toy
from haav.errors import CheckpointError, ConfigError, ViewError
from haav.export.onnx import export_onnx
from haav.inference.captioner import Captioner
from haav.inference.pack import pack
from haav.inference.predict import predict
from haav.model.build import build_model, resolve
from haav.photos.sources import find_photos
from haav.pretrained import read_config
from haav.store import Store, open_store, shards
from haav.text import SPECIAL, Vocabulary
from haav.types import ViewSpec
from haav.views import ExtractorOptions, build_extractor
from haav.views.embedded.regions import WIDTH
from haav.views.extract import extract
from haav.views.retrieval.bridge import Bridge, BridgeConfig, CrossFitted
from haav.views.retrieval.textdb import Entry, Manifest, TextDatabase
from helpers import tiny_config

SAMPLES = Path(haav.__file__).parent / "samples"
WORDS = Vocabulary((*SPECIAL, *(f"w{n}" for n in range(4, 23))))


def make_texts(folder: Path, seed: int = 0, view: str = "regions", made_by: Sequence[str] = ()) -> ExtractorOptions:
    """A bridge and a text database of chance"""
    torch.manual_seed(seed)
    vectors = torch.nn.functional.normalize(torch.randn(40, 384), dim=1)
    TextDatabase([Entry(f"{n}", (f"p{n}",)) for n in range(40)], vectors, Manifest("toy")).save(folder / "textdb")
    config = BridgeConfig(features=WIDTH, vectors=384, hidden=16, folds=1)
    bridges = [Bridge(config), Bridge(config)]
    CrossFitted(config, bridges, {"p1": 0}, "toy", view, made_by).save(folder / "bridge")
    return texts_in(folder)


def texts_in(folder: Path) -> ExtractorOptions:
    return ExtractorOptions(bridge=folder / "bridge", textdb=folder / "textdb")


def save_model(folder: Path, specs: dict[str, ViewSpec], made_by: dict[str, tuple[str, ...]]) -> Path:
    config = tiny_config()
    model = replace(config.model, views=specs, vocabulary_size=len(WORDS))
    contrast = replace(config.contrast, enabled=False)
    config, problems = resolve(replace(config, model=model, contrast=contrast, made_by=made_by))
    assert not problems
    Captioner(build_model(config.model), config, WORDS).save_pretrained(folder)
    return folder


def trained_on(folder: Path, store: Path) -> Path:
    """A model as training on a store would leave it"""
    with Store(store) as opened:
        manifests = opened.views
    made_by = {name: (manifest.made_by,) for name, manifest in manifests.items()}
    return save_model(folder, {name: manifest.spec for name, manifest in manifests.items()}, made_by)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, two sets of texts, a store of either, and a model of the first"""
    place = tmp_path_factory.mktemp("world")
    photos = find_photos([SAMPLES])[:2]
    for index, name in enumerate(("ours", "theirs")):
        texts = make_texts(place / name, index)
        extract(photos, place / f"{name}-store", ["cells", "text_whole"], texts, workers=1)
    trained_on(place / "model", place / "ours-store")
    return place


@given(st.text(min_size=1), st.lists(st.text(min_size=1), max_size=3))
def test_a_view_is_accepted_where_its_maker_is_named_or_none_is(maker: str, accepted: list[str]) -> None:
    if not accepted or maker in accepted:
        provenance.check_made_by({"grid": accepted}, {"grid": maker}, "that of a store")
    else:
        with pytest.raises(ViewError) as found:
            provenance.check_made_by({"grid": accepted}, {"grid": maker}, "that of a store")
        assert all(one in str(found.value) for one in (*accepted, maker, "'grid'", "that of a store"))


def test_what_several_accept_is_what_each_accepts() -> None:
    first, second = {"grid": ("a", "b"), "cells": ("c",)}, {"grid": ("b", "d"), "objects": ()}
    assert provenance.accepted_by_all([first, second]) == {"grid": ("b",), "cells": ("c",)}
    with pytest.raises(ViewError, match=r"'cells':\n  one with      c\n  another with  x or y\n"):
        provenance.accepted_by_all([first, {"cells": ("x", "y")}])


def test_what_is_compact_remembers_what_it_was_made_from(world: Path, tmp_path: Path) -> None:
    bridge, texts = CrossFitted.load(world / "ours" / "bridge"), TextDatabase.load(world / "ours" / "textdb")
    assert (bridge.origin, texts.origin) == (bridge.fingerprint, texts.fingerprint)
    for index in range(2):  # packed, and packed once more
        small, few = bridge.compact(), texts.compact()
        assert (small.origin, few.origin) == (bridge.origin, texts.origin)
        assert small.fingerprint != small.origin
        assert few.fingerprint != few.origin
        small.save(tmp_path / f"{index}" / "bridge", half=True)
        few.save(tmp_path / f"{index}" / "textdb", quantised=True)
        bridge, texts = (
            CrossFitted.load(tmp_path / f"{index}" / "bridge"),
            TextDatabase.load(tmp_path / f"{index}" / "textdb"),
        )
    whole = build_extractor("text_whole", texts_in(world / "ours"))
    rounded = build_extractor("text_whole", ExtractorOptions(bridge=bridge, textdb=texts))
    assert rounded.origin == whole.origin == whole.fingerprint
    assert rounded.fingerprint != whole.fingerprint
    assert all(f"{need}-" in whole.fingerprint for need in whole.needs)


def test_photos_are_looked_at_with_what_the_model_was_trained_with(world: Path) -> None:
    ours, theirs = texts_in(world / "ours"), texts_in(world / "theirs")
    photo = SAMPLES / "cat.jpg"
    assert haav.load(world / "model", options=ours).caption(photo).text
    with pytest.raises(
        ViewError, match=r"another 'text_whole'(?s:.*)trained with  bridge-(?s:.*)given         bridge-"
    ):
        haav.load(world / "model", options=theirs).caption(photo)
    assert haav.load(world / "model", options=theirs).caption(photo, views=["cells"]).text


def test_another_network_is_noticed(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haav.views.embedded.efficientnet.fingerprint", lambda: "other")
    with pytest.raises(ViewError, match=r"another 'cells'(?s:.*)given         efficientnet-lite2-other"):
        haav.load(world / "model").caption(SAMPLES / "cat.jpg", views=["cells"])


def test_several_makers_can_be_accepted_and_old_models_accept_any(world: Path, tmp_path: Path) -> None:
    theirs = texts_in(world / "theirs")
    config = read_config(world / "model")
    both = {
        **config.made_by,
        "text_whole": (*config.made_by["text_whole"], build_extractor("text_whole", theirs).origin),
    }
    for made_by in (both, {}):
        model = save_model(tmp_path / f"{len(made_by)}", config.model.views, made_by)
        assert haav.load(model, options=theirs).caption(SAMPLES / "cat.jpg").text
    plain = json.loads((tmp_path / "0" / "config.json").read_text())
    assert plain["made_by"] == {}
    assert json.loads((tmp_path / "2" / "config.json").read_text())["made_by"]["text_whole"] == list(both["text_whole"])


def test_the_model_in_the_box_knows_its_extractors_and_can_be_joined() -> None:
    assert set(read_config("best").made_by) == set(haav.load().views)
    joined = Captioner.ensemble([haav.load(), haav.load()])
    assert joined.caption(SAMPLES / "cat.jpg", beam=1).text


def test_stored_views_are_those_that_the_model_was_trained_with(world: Path, tmp_path: Path) -> None:
    captioner = Captioner.from_pretrained(world / "model")
    for name in ("ours-store", "theirs-store"):
        with Store(world / name) as store:
            shards.write_shards(store, ["cells", "text_whole"], tmp_path / name)
    photos = [Photo(ref.id, "val") for ref in find_photos([SAMPLES])[:2]]
    for ours in (world / "ours-store", tmp_path / "ours-store"):
        assert len(list(predict(captioner, open_store(ours), photos))) == 2
    for theirs in (world / "theirs-store", tmp_path / "theirs-store"):
        with pytest.raises(ViewError, match=f"another 'text_whole' than that of {theirs}"):
            list(predict(captioner, open_store(theirs), photos))


def test_a_store_by_a_packed_model_serves_it_and_those_trained_with_the_whole(world: Path, tmp_path: Path) -> None:
    ours, theirs = ([world / name / need for need in ("bridge", "textdb")] for name in ("ours", "theirs"))
    for index in range(2):
        with pytest.raises(ViewError, match=r"another (bridge|textdb) of 'text_whole' than the one to pack"):
            pack(world / "model", tmp_path / "packed", *(theirs[n] if n == index else ours[n] for n in range(2)))
    pack(world / "model", tmp_path / "packed", *ours)
    assert (
        main(
            [
                "extract",
                "--model",
                str(tmp_path / "packed"),
                "--images",
                str(SAMPLES),
                "--store",
                str(tmp_path / "s"),
                "--workers",
                "1",
            ]
        )
        == 0
    )
    with Store(tmp_path / "s") as store, Store(world / "ours-store") as whole:
        assert store.views["text_whole"].fingerprint != whole.views["text_whole"].fingerprint
        photos = [Photo(photo, "val") for photo in store.ids("cells")]
        for model in (tmp_path / "packed", world / "model"):
            assert len(list(predict(Captioner.from_pretrained(model), store, photos))) == len(photos)
    options = ExtractorOptions(bridge=theirs[0], textdb=theirs[1])
    with pytest.raises(ViewError, match="than the one to be extracted"):
        extract([], tmp_path / "t", ["text_whole"], options, made_by=read_config(tmp_path / "packed").made_by)
    pack(tmp_path / "packed", tmp_path / "again")  # what lies beside it goes along
    assert haav.load(tmp_path / "again").caption(SAMPLES / "cat.jpg").text


def test_a_model_with_any_text_view_is_packed_with_its_texts_or_not_at_all(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads text_whole: give the --bridge of its photos"):
        pack(world / "model", tmp_path / "out", None, world / "ours" / "textdb")
    clip = save_model(tmp_path / "clip", {"clip_text_five": ViewSpec(8, 80, {"crop": 5, "rank": 16})}, {})
    with pytest.raises(ConfigError, match="reads clip_text_five: give the --textdb of its photos"):
        pack(clip, tmp_path / "out")
    assert pack(clip, tmp_path / "out", None, world / "ours" / "textdb").keys() == {"model", "textdb"}
    blind = save_model(tmp_path / "blind", {"cells": ViewSpec(8, 25)}, {})
    assert pack(blind, tmp_path / "small", like="best").keys() == {"model"}


def test_members_of_an_ensemble_share_the_makers_of_their_views(world: Path, tmp_path: Path) -> None:
    ours, theirs = ([world / name / need for need in ("bridge", "textdb")] for name in ("ours", "theirs"))
    other = trained_on(tmp_path / "other", world / "theirs-store")
    with pytest.raises(ViewError, match="different views by the name of 'text_whole'"):
        Captioner.ensemble([Captioner.from_pretrained(model) for model in (world / "model", other)])
    # Models that do not say it are told apart by what they bring along.
    packed = []
    for name, texts in (("a", ours), ("b", theirs), ("c", ours)):
        unknown = save_model(tmp_path / f"{name}-whole", read_config(other).model.views, {})
        pack(unknown, tmp_path / name, *texts)
        packed.append(Captioner.from_pretrained(tmp_path / name))
    with pytest.raises(ViewError, match="a different bridge for 'text_whole'"):
        Captioner.ensemble(packed[:2])
    joined = Captioner.ensemble([packed[0], packed[2]])
    assert joined.caption(SAMPLES / "cat.jpg", beam=1).text


def test_members_of_an_ensemble_keep_their_own_texts_for_their_own_views(world: Path, tmp_path: Path) -> None:
    ours, theirs = ([world / name / need for need in ("bridge", "textdb")] for name in ("ours", "theirs"))
    spec = read_config(world / "model").model.views["text_whole"]
    five = replace(spec, max_tokens=20, indices={"crop": 5, "rank": 4})
    for name, view, texts in (("a", {"text_whole": spec}, ours), ("b", {"text_five": five}, theirs)):
        pack(save_model(tmp_path / f"{name}-whole", view, {}), tmp_path / name, *texts)
    joined = Captioner.ensemble([Captioner.from_pretrained(tmp_path / name) for name in ("a", "b")])
    assert joined.extractors is not None
    for view, name in (("text_whole", "ours"), ("text_five", "theirs")):
        assert joined.extractors.extractor(view).textdb.origin == TextDatabase.load(world / name / "textdb").fingerprint


def test_export_refuses_what_captioning_would(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    theirs = [world / "theirs" / need for need in ("bridge", "textdb")]
    config = read_config(world / "model")
    pack(save_model(tmp_path / "whole", config.model.views, {}), tmp_path / "packed", *theirs)
    stamped = save_model(tmp_path / "packed", config.model.views, dict(config.made_by))
    with pytest.raises(ViewError, match="another 'text_whole'"):
        export_onnx(stamped, tmp_path / "out")
    with pytest.raises(ViewError, match="haav pack"):
        export_onnx(world / "model", tmp_path / "out")


def test_training_records_the_stores_makers_and_goes_on_with_them_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, store = make_toy(tmp_path / "toy")
    words = ["--data.dataset", str(dataset), "--train.epochs", "1", "--model.d_model", "16"]
    assert main(["train", "toy", "--out", str(tmp_path / "run"), "--data.store", str(store), *words]) == 0
    assert read_config(tmp_path / "run" / "best").made_by == dict.fromkeys(("objects", "grid", "text"), ("toy-1",))
    other = tmp_path / "other"
    with Store(store) as one, Store(other, write=True) as two:
        for name, manifest in one.views.items():
            two.add_view(name, replace(manifest, fingerprint="toy-2"))
            two.put(name, dict(one.items(name)))
    further = ["train", "toy", "--data.store", str(other), "--init", str(tmp_path / "run" / "best"), *words]
    capsys.readouterr()
    assert main([*further, "--out", str(tmp_path / "further")]) == 1
    error = capsys.readouterr().err
    assert f"another 'objects' than that of {other}" in error
    assert "trained with  toy-1\n  given         toy-2\n" in error
    accepting = [word for name in ("objects", "grid", "text") for word in (f"--made_by.{name}", "toy-1,toy-2")]
    assert main([*further, "--out", str(tmp_path / "accepting"), *accepting]) == 0
    assert read_config(tmp_path / "accepting" / "best").made_by["grid"] == ("toy-1", "toy-2")
    run = tmp_path / "run" / "config.yaml"
    run.write_text(run.read_text().replace(str(store), str(other)))
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "2"]) == 1
    assert "another 'objects'" in capsys.readouterr().err
    photos = load_dataset(dataset).split("val")
    with Store(other) as opened, pytest.raises(ViewError):
        list(predict(Captioner.from_pretrained(tmp_path / "run" / "best"), opened, photos))


def test_a_bridge_starts_from_the_view_that_it_was_trained_on(tmp_path: Path) -> None:
    photos = find_photos([SAMPLES])[:1]
    texts = make_texts(tmp_path / "texts", made_by=[build_extractor("regions").fingerprint])
    extract(photos, tmp_path / "s", ["regions"], workers=1)
    extract(photos, tmp_path / "s", ["text_whole"], texts, workers=1)
    other = make_texts(tmp_path / "other", made_by=["regions of another network"])
    with pytest.raises(ViewError, match="the bridge was trained with another 'regions' than that of"):
        extract(photos, tmp_path / "s", ["text_five"], other, workers=1)
    extractor = build_extractor("text_five", other)
    assert dict(extractor.reads) == {"regions": ("regions of another network",)}
    with pytest.raises(ViewError, match="the bridge was trained with another 'regions' than the one installed"):
        haav.load(save_model(tmp_path / "m", {"text_five": extractor.spec}, {}), options=other).caption(
            SAMPLES / "cat.jpg"
        )


def test_a_config_with_makers_that_are_no_words_is_refused(world: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", {"cells": ViewSpec(8, 25)}, {"cells": ("a",)})
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace('"a"', "7"))
    with pytest.raises(CheckpointError, match=r"'made_by.cells' takes a list of words, not \[7\]"):
        read_config(model)
