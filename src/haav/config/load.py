"""Find presets, recipes and grids by name, and layer settings: preset, then file, then flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from haav.config.parse import Given, SettingPath, flatten, parse, to_dict
from haav.config.schema import Config
from haav.errors import ConfigError, unknown
from haav.files import read_text

MAX_BYTES = 1_000_000
TABLES = (("model", "views"),)
"""tables that a file replaces as a whole: its views replace those of the preset and are not merged with them"""
TAKEN_OVER = ("decode", "confidence")
"""sections that a model trained further takes from the model it starts from"""

Source = dict[SettingPath, Given]


def preset_names() -> list[str]:
    return _names("presets")


def recipe_names() -> list[str]:
    return _names("recipes")


def grid_names() -> list[str]:
    return _names("grids")


def table_names() -> list[str]:
    """Grids that are tables of the paper, the most important first"""
    return [str(name) for name in read_data("claims.yaml")["tables"]]


def read_data(name: str) -> dict[str, Any]:
    """A YAML file of the package that is neither a preset nor a recipe nor a grid"""
    return dict(yaml.safe_load(_folder(name).read_text(encoding="utf-8")))


def summary(folder: str, name: str) -> str:
    """What the comment at the top of a YAML file says, without the command at its end"""
    lines = (_folder(folder) / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"[:.]? haav (?:train|ablate|describe|reproduce) ", comment)[0].rstrip(":. ")


def find_recipe(name: str) -> Path:
    """Path of a YAML file, or of a recipe by name, with or without `.yaml`"""
    return _find("recipe", name)


def find_grid(name: str) -> Path:
    """Path of a YAML file, or of a grid by name, with or without `.yaml`"""
    return _find("grid", name)


def _folder(folder: str) -> Path:
    return Path(str(resources.files("haav.config"))) / folder


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in _folder(folder).glob("*.yaml"))


def _find(what: str, name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    folder, short = f"{what}s", name.removesuffix(".yaml")
    if short not in _names(folder):
        raise ConfigError(unknown(what, name, _names(folder)) + "\n  Or give the path of a YAML file.")
    return _folder(folder) / f"{short}.yaml"


def read_settings(
    preset: str | None = None,
    file: str | Path | None = None,
    flags: Mapping[SettingPath, Given] | None = None,
    init: Config | None = None,
) -> tuple[Config, list[str]]:
    """The settings and all problems with them. `model.build.load_config` resolves settings that depend on others.

    `preset` is the base (default: the one that the file names, otherwise best). `init` is the config of a model to
    start from: how it decodes and its confidence override the preset. `file` overrides both, `flags` override all.
    """
    layers = _preset_layers(preset or "best") if file is None else _file_layers(Path(file), preset)
    if init is not None:
        settings = to_dict(init)
        below_file = len(layers) if file is None else len(layers) - 1
        layers.insert(below_file, flatten({name: settings[name] for name in TAKEN_OVER}, "the model to start from: "))
    return parse([*layers, dict(flags or {})])


def _file_layers(path: Path, preset: str | None) -> list[Source]:
    return _layers(read_text(path, MAX_BYTES, ConfigError), str(path), base=preset)


def _preset_layers(name: str) -> list[Source]:
    if name not in preset_names():
        raise ConfigError(unknown("preset", name, preset_names()))
    text = (_folder("presets") / f"{name}.yaml").read_text(encoding="utf-8")
    return _layers(text, f"preset {name}", base=None)


def _layers(text: str, origin: str, base: str | None) -> list[Source]:
    """Layers of a YAML text, its base first. The base is `base` if given, otherwise the `preset: NAME` of the text."""
    tree = _parse_yaml(text, origin)
    named = tree.pop("preset", None)
    below = _preset_layers(base or str(named)) if base or named else []
    if not below and not origin.startswith("preset "):
        below = _preset_layers("best")
    flat = flatten(tree, f"{origin}: ")
    for table in TABLES:
        if any(path[: len(table)] == table for path in flat):
            below = [{path: leaf for path, leaf in layer.items() if path[: len(table)] != table} for layer in below]
    return [*below, flat]


class _Loader(yaml.SafeLoader):
    """Plain YAML without aliases, because a few lines of aliases can expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def _parse_yaml(text: str, origin: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, AttributeError, IndexError, TypeError) as error:
        raise ConfigError(f"{origin} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin} must hold settings like 'model: …', not a {type(tree).__name__}.")
    return tree


def flags_from(pairs: Sequence[tuple[str, str]]) -> dict[SettingPath, Given]:
    """[("--model.d_model", "512")] → flags for `read_settings`. Problems spell the flags as they were typed."""
    return {tuple(flag.removeprefix("--").split(".")): Given(_scalar(value), flag) for flag, value in pairs}


def _scalar(value: str) -> Any:
    return None if value.lower() in ("null", "none") else value
