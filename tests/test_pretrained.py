from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from haav import Captioner, pretrained
from haav.errors import CheckpointError, DataError
from haav.inference.pack import pack
from haav.pretrained import CHECKSUM, load_weights, save_weights
from haav.text import SPECIAL, Vocabulary
from haav.views.retrieval.bridge import CrossFitted
from haav.views.retrieval.textdb import TextDatabase
from helpers import every_variant, random_views, save_text_model, tiny_config, tiny_model

FILES = ("config.json", "model.safetensors", "vocabulary.json")


def captioner(**model: object) -> Captioner:
    """Frozen, as a loaded model is: products with frozen weights differ from others in the last bit."""
    config = tiny_config(**model)
    frozen = tiny_model(**model).requires_grad_(False)
    return Captioner(frozen, config, Vocabulary((*SPECIAL, *(f"w{n}" for n in range(4, 23)))))


@every_variant
def test_a_saved_model_captions_as_before(tmp_path: Path, variant: dict[str, str]) -> None:
    tool = captioner(**variant)
    views = random_views()
    tool.save_pretrained(tmp_path / "m")
    assert sorted(os.listdir(tmp_path / "m")) == sorted(FILES)
    again = Captioner.from_pretrained(tmp_path / "m")
    assert again.caption_views(views) == tool.caption_views(views)
    assert again.config == tool.config
    assert not again.model.training


def test_saving_over_a_model_replaces_it(tmp_path: Path) -> None:
    captioner().save_pretrained(tmp_path)
    other = captioner(d_model=8)
    other.save_pretrained(tmp_path)
    assert Captioner.from_pretrained(tmp_path).config.model.d_model == 8
    assert sorted(os.listdir(tmp_path)) == sorted(FILES), "no temporary file stays"


def test_float16_weights_are_read_as_float32(tmp_path: Path) -> None:
    tool, views = captioner(), random_views()
    tool.model.half()
    tool.save_pretrained(tmp_path)
    again = Captioner.from_pretrained(tmp_path)
    assert {p.dtype for p in again.model.parameters()} == {torch.float32}
    assert again.caption_views(views)[0].text


def test_loading_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    captioner().save_pretrained(tmp_path)
    before = torch.get_rng_state()
    Captioner.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def metadata_without_checksum(path: Path) -> dict[str, str]:
    """What haav 0.2 wrote into a file of weights"""
    _, metadata = load_weights(path)
    return {key: value for key, value in metadata.items() if key != CHECKSUM}


def flip_a_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def broken(tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Captioner.from_pretrained(tmp_path)
    return str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_or_truncated_file_is_named(tmp_path: Path, file: str) -> None:
    captioner().save_pretrained(tmp_path)
    whole = (tmp_path / file).read_bytes()
    for keep in (len(whole) // 2, 5, 0):
        (tmp_path / file).write_bytes(whole[:keep])
        assert file in broken(tmp_path)
    (tmp_path / file).unlink()
    assert f"{file} is missing" in broken(tmp_path)


def test_a_flipped_bit_of_the_weights_is_noticed(tmp_path: Path) -> None:
    captioner().save_pretrained(tmp_path, torch.float16)
    path = tmp_path / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for position in (header, (header + path.stat().st_size) // 2, path.stat().st_size - 1):
        flip_a_bit(path, position)
        assert "model.safetensors is damaged: its checksum does not match.\n  Copy" in broken(tmp_path)
        flip_a_bit(path, position)
    Captioner.from_pretrained(tmp_path)


def test_a_packed_model_notices_a_flipped_bit_in_every_tensor_file(tmp_path: Path) -> None:
    save_text_model(tmp_path / "trained", ("cells", "text_whole"))
    parts = {"bridge": tmp_path / "trained" / "bridge", "textdb": tmp_path / "trained" / "textdb"}
    pack(tmp_path / "trained" / "model", tmp_path / "packed", **parts)
    load = {"packed": Captioner.from_pretrained, "bridge": CrossFitted.load, "textdb": TextDatabase.load}
    files = {file.parent.name: file for file in (tmp_path / "packed").rglob("*.safetensors")}
    assert files.keys() == load.keys()
    for name, file in files.items():
        load[name](file.parent)
        flip_a_bit(file, file.stat().st_size - 1)
        with pytest.raises((CheckpointError, DataError), match=f"{name}.* is damaged"):
            load[name](file.parent)


def test_a_model_saved_without_a_checksum_loads(tmp_path: Path) -> None:
    tool, views = captioner(), random_views()
    tool.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, metadata_without_checksum(path))
    assert Captioner.from_pretrained(tmp_path).caption_views(views) == tool.caption_views(views)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    assert "no model directory" in broken(tmp_path / "nowhere")
    tool = captioner()
    tool.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())

    (tmp_path / "config.json").write_text(json.dumps(settings | {"format": "haav-9"}))
    assert "not a haav config of format 'haav-1': found 'haav-9'" in broken(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model": settings["model"] | {"d_modle": 3}}))
    assert "unknown setting 'model.d_modle'" in broken(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json is not whole JSON" in broken(tmp_path)

    tool.save_pretrained(tmp_path)
    words = json.loads((tmp_path / "vocabulary.json").read_text())["words"]
    (tmp_path / "vocabulary.json").write_text(json.dumps({"words": words[:-1]}))
    assert "vocabulary.json has 22 words, config.json says 23" in broken(tmp_path)
    (tmp_path / "vocabulary.json").write_text(json.dumps({"words": [*words[:-1], "other"]}))
    assert "was saved with another config.json or vocabulary.json" in broken(tmp_path)

    tool.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["decoder.output.weight"]
    weights["decoder.positions"] = torch.zeros(3, 16)
    weights["extra"] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors", metadata_without_checksum(tmp_path / "model.safetensors"))
    text = broken(tmp_path)
    assert "(3 tensors)" in text
    assert "'decoder.output.weight' is missing" in text
    assert "'decoder.positions' has shape (3, 16) instead of (13, 16)" in text
    assert "'extra' is not of this model" in text


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_loads_or_gives_a_checkpoint_error(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    captioner().save_pretrained(folder)
    file = folder / data.draw(st.sampled_from(FILES))
    whole = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(len(whole) - 1, 3000)))
        whole[position] = data.draw(st.integers(0, 255))
    file.write_bytes(whole)
    with contextlib.suppress(CheckpointError):
        assert Captioner.from_pretrained(folder).caption_views(random_views())


def test_a_failed_save_leaves_the_old_files_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, views = captioner(), random_views()
    tool.save_pretrained(tmp_path)
    before = tool.caption_views(views)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match="No space left"):
        captioner(d_model=8).save_pretrained(tmp_path)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)
    assert Captioner.from_pretrained(tmp_path).caption_views(views) == before


def test_config_survives_the_way_to_disk_and_back(tmp_path: Path) -> None:
    tool = captioner()
    tool.config = replace(tool.config, decode=replace(tool.config.decode, beam=2, max_words=4))
    tool.save_pretrained(tmp_path)
    again = Captioner.from_pretrained(tmp_path)
    assert again.config.decode.beam == 2
    assert len(again.caption_views(random_views(), n_best=2)[0].n_best) == 1


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_save_that_fails_at_any_file_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    captioner().save_pretrained(tmp_path)
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == step:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space"):
        captioner(d_model=8).save_pretrained(tmp_path)
    assert Captioner.from_pretrained(tmp_path).config.model.d_model == 16
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)


def test_a_json_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captioner().save_pretrained(tmp_path)
    monkeypatch.setattr("haav.pretrained.MAX_JSON_BYTES", 100)
    assert "holds more than 100 bytes" in broken(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value"), [("max_words", 10**9), ("d_ff", 10**9), ("encoder_layers", 10**9), ("memory_slots", 10**9)]
)
def test_a_strangers_config_cannot_make_us_allocate(tmp_path: Path, setting: str, value: int) -> None:
    tool = captioner()
    tool.config = replace(tool.config, model=replace(tool.config.model, **{setting: value}))
    tool.save_pretrained(tmp_path)
    assert "describes a larger model than model.safetensors holds" in broken(tmp_path)


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    tool = captioner()
    tool.model.decoder.positions = tool.model.decoder.positions.long()
    tool.save_pretrained(tmp_path)
    assert "'decoder.positions' is of type torch.int64" in broken(tmp_path)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training run replaces its best model, and somebody captions with it."""
    path = tmp_path / "weights.safetensors"
    save_weights(path, {"a": torch.zeros(9)}, {"number": "0"})
    reads = iter((True, True, False))

    def read_while_replaced(path: Path, framework: str) -> Any:
        opened = safe_open(path, framework=framework)
        if next(reads):
            save_weights(path, {"a": torch.ones(9)}, {"number": "1"})
        return opened

    monkeypatch.setattr(pretrained, "safe_open", read_while_replaced)
    tensors, metadata = load_weights(path)
    assert (tensors["a"].tolist(), metadata["number"]) == ([1.0] * 9, "1")
    assert next(reads, None) is None, "read again until it stayed the same"
