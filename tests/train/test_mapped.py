"""Training from a mapped file of photos and a mapped index of shards is training from lists in memory."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haav.config import Config, DataConfig, to_dict
from haav.config.load import find_recipe, flags_from
from haav.data.convert import convert
from haav.data.mixture import load_mixture, parse_sources
from haav.data.toy import make_toy
from haav.model.build import load_config
from haav.store import Store
from haav.store.shards import FORMAT_WITH_IDS, read_shard, write_shards
from haav.train import loop
from haav.train.setup import ADDED, _json_of, prepare
from helpers import assert_identical

pytest.importorskip("lightning_fabric", reason="needs the train extra")
pytest.importorskip("pyarrow", reason="needs the remote extra")

items = st.none() | st.floats(allow_nan=False) | st.text(max_size=4) | st.lists(st.floats(0, 9), max_size=2).map(tuple)


@given(settings=st.dictionaries(st.text(max_size=3), items), lists=st.lists(st.lists(items, max_size=4), max_size=4))
def test_the_hashed_text_is_that_of_the_lists_in_memory(settings: dict[str, Any], lists: list[list[Any]]) -> None:
    assert "".join(_json_of(settings, map(iter, lists))) == json.dumps([settings, *lists])


def configured(dataset: Path | str, store: Path) -> Config:
    flags = {"data.dataset": dataset, "data.store": store, "train.epochs": 2, "train.checkpoint_every": 3}
    return load_config(
        file=find_recipe("toy"), flags=flags_from([(f"--{name}", str(value)) for name, value in flags.items()])
    )


def test_a_toy_run_of_an_earlier_commit_can_be_resumed(tmp_path: Path) -> None:
    """A new setting must not change the fingerprint of runs that do without it, nor one that changes no bits."""
    for flags in ([], [("--train.recompute", "true")]):
        setup = prepare(load_config(file=find_recipe("toy"), flags=flags_from(flags)), tmp_path)
        setup.close()
        assert setup.fingerprint == "a42d83f53d47acd8"  # by commit 6799eba, before decoders could be chosen


@pytest.mark.parametrize("weight", ["", ":human:0.5"])
def test_runs_of_earlier_versions_have_the_fingerprint_of_now(tmp_path: Path, weight: str) -> None:
    dataset, store = make_toy(tmp_path / "toy")
    config = replace(configured(f"{dataset}{weight}", store))
    config = replace(
        config, data=replace(config.data, label_fraction=0.5), train=replace(config.train, unlabelled_batch=4)
    )
    setup = prepare(config, tmp_path / "run")
    setup.close()
    mixture = load_mixture(parse_sources(f"{dataset}{weight}"), 0.5, "photo", config.train.seed)
    settings = to_dict(replace(setup.config, data=DataConfig()))
    for section, defaults in ADDED.items():
        for name, value in defaults.items():
            if settings[section][name] == value:
                del settings[section][name]
    del settings["train"]["epochs"], settings["train"]["recompute"], settings["made_by"]
    ids, further = ([photo.id for photo in photos] for photos in (mixture.train, mixture.unlabelled))
    facts = [settings, setup.vocabulary.words, ids, further, *([list(mixture.weights)] if mixture.weights else [])]
    assert further
    assert setup.fingerprint == hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def test_a_run_on_mapped_files_is_stopped_and_resumed_as_one_in_memory_bit_for_bit(tmp_path: Path) -> None:
    dataset, store = make_toy(tmp_path / "toy")
    for name in ("listed", "mapped"):
        with Store(store) as opened:
            write_shards(opened, sorted(opened.views), tmp_path / name, shard_size=40)
    index = json.loads((tmp_path / "listed" / "index.json").read_text())
    for shard in index["shards"]:
        shard["ids"] = [photo for photo, _ in read_shard(tmp_path / "listed" / shard["file"])]
    (tmp_path / "listed" / "index.json").write_text(json.dumps(index | {"format": FORMAT_WITH_IDS}))
    loop.train(configured(dataset, tmp_path / "listed"), tmp_path / "whole")

    def interrupt(status: loop.Status) -> None:
        if status.step in (3, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    convert(dataset, tmp_path / "photos.arrow")
    outcome = loop.train(
        configured(tmp_path / "photos.arrow", tmp_path / "mapped"), tmp_path / "broken", report=interrupt
    )
    assert not outcome.finished
    while not outcome.finished:
        outcome = loop.resume(tmp_path / "broken", report=interrupt)
    assert_identical(tmp_path / "whole", tmp_path / "broken")
