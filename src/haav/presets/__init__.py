"""Named starting points, and how a config is put together: preset, then file, then flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from haav.config import Config, Given, flatten, parse
from haav.config import Path as SettingPath
from haav.errors import ConfigError, unknown
from haav.model.build import resolve

MAX_BYTES = 1_000_000
TABLES = (("model", "views"),)
"""tables that a file states as a whole: its views replace the preset's, they do not join them"""

Source = dict[SettingPath, Given]


def preset_names() -> list[str]:
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_config(
    preset: str | None = None, file: str | Path | None = None, flags: Mapping[SettingPath, Given] | None = None
) -> Config:
    """A checked config with nothing left open, or a ConfigError that names every problem.

    `preset` starts (default: the file's own, else best), `file` overrides it, `flags` override both.
    """
    sources: list[Source] = []
    if file is not None:
        text = _read_text(Path(file))
        sources = _layers(text, str(file), base=preset)
    else:
        sources = _preset_layers(preset or "best")
    config, problems = parse([*sources, dict(flags or {})])
    config, more = resolve(config)
    if problems or more:
        raise ConfigError.of([*problems, *more])
    return config


def _preset_layers(name: str) -> list[Source]:
    if name not in preset_names():
        raise ConfigError(unknown("preset", name, preset_names()))
    text = resources.files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return _layers(text, f"preset {name}", base=None)


def _layers(text: str, origin: str, base: str | None) -> list[Source]:
    """The YAML and what it is based on (`preset: NAME`, or `base` when the user says so), the base first."""
    tree = _parse_yaml(text, origin)
    named = tree.pop("preset", None)
    below = _preset_layers(base or str(named)) if base or named else []
    if not below and not origin.startswith("preset "):
        below = _preset_layers("best")
    flat = flatten(tree, f"{origin}: ")
    for table in TABLES:
        if any(path[: len(table)] == table for path in flat):
            below = [{path: given for path, given in layer.items() if path[: len(table)] != table} for layer in below]
    return [*below, flat]


class _Loader(yaml.SafeLoader):
    """Plain YAML without aliases: a few lines of them can unfold into gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
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


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes; a config is at most {MAX_BYTES:,}.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}.") from None


def flags_from(pairs: Sequence[tuple[str, str]]) -> dict[SettingPath, Given]:
    """[("--model.d_model", "512")] → flags for `load_config`; problems will spell them as they were typed."""
    return {tuple(flag.removeprefix("--").split(".")): Given(_scalar(value), flag) for flag, value in pairs}


def _scalar(value: str) -> Any:
    return None if value.lower() in ("null", "none") else value
