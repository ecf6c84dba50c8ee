from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from haav.config import Config, flatten, parse, to_dict
from haav.config.load import flags_from, preset_names
from haav.errors import ConfigError, HaavError
from haav.model.build import load_config
from helpers import ROOT


def message(*flags: tuple[str, str], preset: str | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(preset, file, flags_from(flags))
    return str(caught.value)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_complete_and_valid(name: str) -> None:
    config = load_config(name)
    again, problems = parse([flatten(to_dict(config))])
    assert (again, problems) == (config, [])


@pytest.mark.parametrize("name", ["paper", "release", "best"])
def test_presets_are_the_papers_model(name: str) -> None:
    config = load_config(name)
    assert config.model.aggregator == "hierarchical"
    assert config.contrast.enabled is True
    assert [spec.dim for spec in config.model.views.values()] == [2054, 768, 768, 768]


def test_release_differs_from_the_paper_only_where_fidelity_says() -> None:
    paper, release = (flatten(to_dict(load_config(name))) for name in ("paper", "release"))
    changed = {".".join(path) for path in paper if paper[path].value != release[path].value}
    assert changed == {
        "model.encoder_outputs",
        "model.cls",
        "model.channel_dropout_unit",
        "model.token_dropout_leaves",
        "model.view_dropout_draw",
        "contrast.positives",
        "decode.keep_greedy",
        "decode.no_repeat",
        "decode.allow_unk",
        "decode.allow_cut",
        "decode.collapse_repeats",
    }


def test_every_problem_is_reported_at_once_in_the_users_spelling() -> None:
    text = message(
        ("--model.d_modle", "5"),
        ("--model.heads", "seven"),
        ("--model.dropout", "2"),
        ("--model.encoding", "shred"),
        ("--model.cls", "men"),
        ("--contrast.enabled", "maybe"),
        ("--model.views.grid.dim", "0"),
        ("--modell.x", "1"),
    )
    assert text.startswith("8 problems:")
    for part in (
        "unknown setting '--model.d_modle'. Did you mean '--model.d_model'?",
        "'--model.heads' takes a whole number, not 'seven'.",
        "'--model.dropout' must be below 1, not 2.0.",
        "unknown encoding 'shred'. Did you mean 'shared'?",
        "'--model.cls' is one of learned, mean, not 'men'. Did you mean 'mean'?",
        "'--contrast.enabled' takes true or false, not 'maybe'.",
        "'--model.views.grid.dim' must be at least 1, not 0.",
        "unknown setting '--modell.x'. Did you mean '--model.x'?",
    ):
        assert part in text


def test_relations_between_settings_are_checked() -> None:
    assert "d_model 256 does not divide into 7 heads" in message(("--model.heads", "7"))
    assert "decode.max_words 99 is more than model.max_words 54" in message(("--decode.max_words", "99"))
    none = [(f"--model.views.{view}", "null") for view in ("objects", "grid", "text_whole", "text_five")]
    assert "no view is left" in message(*none)


def test_combinations_that_make_no_sense_are_refused_with_the_reason() -> None:
    text = message(("--model.encoding", "concat_views"), ("--contrast.enabled", "true"))
    assert "pulls the views of a photo together, but encoding 'concat_views' does not keep views apart" in text
    text = message(("--model.encoding", "model_per_view"), ("--model.aggregator", "hierarchical"))
    assert "aggregator 'hierarchical' weighs views against each other" in text
    assert "--aggregator concat_tokens" in text
    three = [(f"--model.views.{view}", "null") for view in ("objects", "text_whole", "text_five")]
    assert "this model has one view" in message(*three, ("--contrast.enabled", "true"))
    assert load_config("paper", flags=flags_from(three)).contrast.enabled is False
    one = (("--data.views", "cells"),)
    assert load_config("paper", flags=flags_from(one)).contrast.enabled is False
    assert "this model has one view" in message(*one, ("--contrast.enabled", "true"))


def test_what_is_left_to_the_encoding_is_filled_in() -> None:
    config = load_config("paper", flags=flags_from([("--model.encoding", "concat_views")]))
    assert (config.model.aggregator, config.contrast.enabled) == ("concat_tokens", False)


def test_a_file_overrides_its_preset_and_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: release\nmodel: {d_model: 128, dropout: 1e-1}\ncontrast: {temperature: 1e-2}\n")
    config = load_config(file=file, flags=flags_from([("--model.d_model", "64")]))
    assert config.model.d_model == 64
    assert config.model.dropout == 0.1
    assert config.contrast.temperature == 0.01
    assert config.model.cls == "mean"
    assert load_config("paper", file).model.cls == "learned"


def test_a_model_to_start_from_replaces_decoding_and_confidence_of_the_preset_only(tmp_path: Path) -> None:
    start = parse([flatten({"decode": {"beam": 2, "no_repeat": 1, "consensus": 7}, "confidence": {"offset": 1.4}})])[0]
    file = tmp_path / "mine.yaml"
    file.write_text("preset: best\ndecode: {no_repeat: 2}\n")
    config = load_config(file=file, flags=flags_from([("--decode.beam", "4")]), init=start)
    assert (config.decode.beam, config.decode.no_repeat, config.decode.consensus) == (4, 2, 7)
    assert config.confidence.offset == 1.4
    assert config.model == load_config(file=file).model
    assert load_config("best", init=start).decode == start.decode


def test_a_file_states_its_views_as_a_whole_and_a_flag_edits_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {views: {grid: {dim: 1280, max_tokens: 81, indices: {row: 9}}}}\n")
    assert list(load_config(file=file).model.views) == ["grid"]
    flags = flags_from([("--model.views.tags.dim", "4"), ("--model.views.tags.max_tokens", "3")])
    assert list(load_config(file=file, flags=flags).model.views) == ["grid", "tags"]
    assert "'model.views.tags.max_tokens' is missing" in message(("--model.views.tags.dim", "4"), file=file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: [1, 2", "is not YAML"),
        ("- a\n- b", "must hold settings"),
        ("model: 5", "'{file}: model' takes settings of its own, not 5"),
        ("model: {views: 3}", "takes named entries, not 3"),
        ("model: {d_model: {deep: 1}}", "goes too deep"),
        ("model: {views: {Big View: {dim: 1, max_tokens: 2}}}", "is not a name"),
        ("model: {views: {grid: {dim: 1, max_tokens: 2, indices: {row: 0}}}}", "must be at least 1, not 0"),
        ("model: {d_modle: 5}", "unknown setting '{file}: model.d_modle'. Did you mean '{file}: model.d_model'?"),
        ("preset: papr", "unknown preset 'papr'. Did you mean 'paper'?"),
        ("a: &x {b: 1}\nc: *x", "aliases"),
        ("model: {dropout: .nan}", "takes a number, not nan"),
        ("model: {heads: true}", "takes a whole number, not True"),
    ],
)
def test_broken_files_are_explained(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert says.replace("{file}", str(file)) in message(file=file)


def test_unreadable_files_are_explained(tmp_path: Path) -> None:
    assert "none.yaml is missing" in message(file=tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not text in UTF-8" in message(file=tmp_path / "binary.yaml")
    (tmp_path / "big.yaml").write_text("#" * 1_000_001)
    assert "holds more than 1,000,000 bytes" in message(file=tmp_path / "big.yaml")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
trees = st.recursive(
    scalars | st.lists(scalars, max_size=2),
    lambda inner: st.dictionaries(
        st.sampled_from(["model", "views", "contrast", "decode", "d_model", "grid", "dim", "indices", "beam"])
        | st.text(max_size=6),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["model", "contrast", "decode", "x"]), trees, max_size=4))
@settings(max_examples=500, deadline=None)
def test_any_tree_gives_a_config_or_problems_never_a_crash(tree: dict) -> None:
    config, problems = parse([flatten(tree)])
    assert isinstance(config, Config)
    assert all(isinstance(problem, str) for problem in problems)


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_as_a_file_gives_a_config_or_a_haav_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "c.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(HaavError):
        assert isinstance(load_config(file=file), Config)


def test_shipped_presets_are_plain_yaml() -> None:
    files = sorted((ROOT / "src" / "haav" / "config" / "presets").glob("*.yaml"))
    assert [file.stem for file in files] == sorted(preset_names())
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text()), dict)


@pytest.mark.parametrize("name", ["paper", "release"])
def test_presets_have_the_papers_numbers(name: str) -> None:
    config = load_config(name)
    model = config.model
    sizes = (model.d_model, model.d_ff, model.heads, model.encoder_layers, model.decoder_layers, model.memory_slots)
    assert sizes == (256, 1024, 8, 3, 3, 40)
    assert (model.vocabulary_size, model.max_words) == (10199, 54)
    assert {model.dropout, model.channel_dropout, model.token_dropout, model.view_dropout} == {0.1}
    assert [spec.max_tokens for spec in model.views.values()] == [50, 50, 64, 80]
    contrast = config.contrast
    assert (contrast.temperature, contrast.momentum, contrast.queue_size, contrast.hidden) == (0.06, 0.999, 8000, 1024)
    assert (config.decode.beam, config.decode.max_words) == (5, 20)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--model.dropout", "1", "must be below 1, not 1"),
        ("--model.d_model", "15", "must be even"),
        ("--model.d_model", "1__0", "takes a whole number"),
        ("--model.dropout", "9" * 400, "takes a number"),
        ("--model.views.items.dim", "3", "a view cannot be called 'items'"),
    ],
)
def test_odd_values_are_explained(flag: str, value: str, says: str) -> None:
    assert says in message((flag, value))


@pytest.mark.parametrize(
    "text", ["a: 2001-99-99", "a: !!int abc", f"a: {'9' * 5000}", "a: !!python/object:os.system x"]
)
def test_values_that_yaml_chokes_on_are_explained(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "{x}"
    folder.mkdir()
    (folder / "c.yaml").write_text(text)
    assert "c.yaml" in message(file=folder / "c.yaml")
