"""Parse layers of settings into a validated `Config`. All problems are reported at once.

`parse` merges layers (preset, file, flags). Later layers win. It remembers where each value was written, and problems
spell a setting as the user spelled it.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Union

from haav.config.schema import Config
from haav.errors import ConfigError, did_you_mean

_type_hints = cache(typing.get_type_hints)  # they are evaluated from text, and asked for with each caption


@dataclass(frozen=True)
class Given:
    """A value as the user wrote it, and how the user spelled the setting."""

    value: Any
    spelling: str


SettingPath = tuple[str, ...]


def parse(sources: Sequence[Mapping[SettingPath, Given]]) -> tuple[Config, list[str]]:
    """Merge the sources into a Config. Problems are returned as sentences. Defaults replace invalid values."""
    problems: list[str] = []
    config = _read(Config, _nest(sources), (), problems)
    assert isinstance(config, Config)
    _check_relations(config, problems)
    return config, problems


def flatten(tree: Mapping[str, Any], origin: str = "", path: SettingPath = ()) -> dict[SettingPath, Given]:
    """Nested mapping → {path: Given}. The spelling is `origin` followed by the dotted path."""
    flat: dict[SettingPath, Given] = {}
    for key, value in tree.items():
        here = (*path, str(key))
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, origin, here)
        else:
            flat[here] = Given(value, origin + ".".join(here))
    return flat


def changed_settings(section: Any) -> dict[str, Any]:
    """Settings of a section that differ from their defaults"""
    values = {item.name: (getattr(section, item.name), item.default) for item in dataclasses.fields(section)}
    return {name: value for name, (value, default) in values.items() if value != default}


def override(config: Config, section: str, settings: Mapping[str, Any]) -> Config:
    """A validated copy of the config with some settings of a section replaced. Problems spell a `Given` as it was."""
    changes: dict[SettingPath, Given] = {
        (section, name): value if isinstance(value, Given) else Given(value, name) for name, value in settings.items()
    }
    changed, problems = parse([flatten(to_dict(config)), changes])
    if problems:
        raise ConfigError.of(problems)
    return changed


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dict for JSON or YAML."""
    return dataclasses.asdict(config)


def _nest(sources: Sequence[Mapping[SettingPath, Given]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for source in sources:
        for path, leaf in source.items():
            node = tree
            for key in path[:-1]:
                if not isinstance(node.get(key), dict):
                    node[key] = {}
                node = node[key]
            node[path[-1]] = leaf
    return tree


def _read(declared: Any, node: Any, path: SettingPath, problems: list[str]) -> Any:
    """`node` (nested dicts with Given leaves) as an instance of the type `declared`."""
    if dataclasses.is_dataclass(declared):
        return _read_dataclass(declared, node, path, problems)
    if typing.get_origin(declared) is dict:
        return _read_table(typing.get_args(declared)[1], node, path, problems)
    if isinstance(node, dict):
        first = _first_leaf(node)
        raise _Problem(f"'{first.spelling}' goes too deep: '{'.'.join(path)}' takes {_type_name(declared)}.")
    return _coerce(declared, node)


class _Problem(Exception):
    pass


def _read_dataclass(declared: Any, node: Any, path: SettingPath, problems: list[str]) -> Any:
    if isinstance(node, Given):
        if node.value not in (None, {}):
            problems.append(f"'{node.spelling}' takes settings of its own, not {node.value!r}.")
        node = {}
    hints = _type_hints(declared)
    fields = {item.name: item for item in dataclasses.fields(declared)}
    for key in sorted(node.keys() - fields.keys()):
        leaf = _first_leaf(node[key])
        problems.append(_unknown_setting(leaf.spelling, key, fields))
    values: dict[str, Any] = {}
    for name, item in fields.items():
        here = (*path, name)
        if name not in node:
            if item.default is MISSING and item.default_factory is MISSING:
                problems.append(f"'{'.'.join(here)}' is missing: {item.metadata['doc']}.")
                values[name] = 1
            elif dataclasses.is_dataclass(hints[name]):
                values[name] = _read(hints[name], {}, here, problems)
            continue
        try:
            value = _read(hints[name], node[name], here, problems)
            _check_range(value, item.metadata, node[name])
            values[name] = value
        except _Problem as problem:
            problems.append(str(problem))
            if item.default is MISSING and item.default_factory is MISSING:
                values[name] = 1
    return declared(**values)


def _read_table(declared: Any, node: Any, path: SettingPath, problems: list[str]) -> dict[str, Any]:
    """A dict of named entries. An entry set to null is removed."""
    if isinstance(node, Given):
        if node.value not in (None, {}):
            raise _Problem(f"'{node.spelling}' takes named entries, not {node.value!r}.")
        return {}
    table: dict[str, Any] = {}
    for name, entry in node.items():
        if isinstance(entry, Given) and entry.value is None:
            continue
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            problems.append(
                f"'{_first_leaf(entry).spelling}': '{name}' is not a name. "
                "Use small letters, digits and '_', a letter first."
            )
            continue
        try:
            table[name] = _read(declared, entry, (*path, name), problems)
        except _Problem as problem:
            problems.append(str(problem))
    return table


def _coerce(declared: Any, leaf: Given) -> Any:
    """Convert a value to its declared type. YAML and flags do not distinguish numbers, words and booleans reliably."""
    value = leaf.value
    if typing.get_origin(declared) in (Union, types.UnionType):
        options = typing.get_args(declared)
        if type(None) in options and value in (None, "null", "none", "auto"):
            return None
        (declared,) = [option for option in options if option is not type(None)]
    if declared is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if isinstance(value, bool):
            return value
    elif declared is str:
        if isinstance(value, str):
            return value
    elif declared == tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, (list, tuple)) and all(isinstance(word, str) and word for word in words):
            return tuple(words)
    elif isinstance(value, bool):
        pass
    elif declared is int:
        if isinstance(value, int):
            return value
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif declared is float and isinstance(value, (int, float, str)):
        try:
            parsed = float(value)
        except (ValueError, OverflowError):
            parsed = float("nan")
        if parsed == parsed and abs(parsed) != float("inf"):
            return parsed
    raise _Problem(f"'{leaf.spelling}' takes {_type_name(declared)}, not {value!r}.")


def _check_range(value: Any, metadata: Mapping[str, Any], node: Any) -> None:
    """Check declared bounds, which apply to a number and to each number of a table."""
    low, below, most, choices = (metadata.get(key) for key in ("low", "below", "most", "choices"))
    entries = value.items() if isinstance(value, dict) else [(None, value)]
    for name, entry in entries:
        leaf = node if name is None else node[name]
        if not isinstance(leaf, Given):
            continue
        if choices and entry not in choices:
            close = did_you_mean(str(entry), choices)
            raise _Problem(f"'{leaf.spelling}' is one of {', '.join(choices)}, not '{entry}'.{close}")
        if low is not None and entry < low:
            raise _Problem(f"'{leaf.spelling}' must be at least {low}, not {entry}.")
        if below is not None and entry >= below:
            raise _Problem(f"'{leaf.spelling}' must be below {below}, not {entry}.")
        if most is not None and entry > most:
            raise _Problem(f"'{leaf.spelling}' must be at most {most}, not {entry}.")


def _check_relations(config: Config, problems: list[str]) -> None:
    """Check constraints between settings."""
    model = config.model
    if model.d_model % model.heads:
        problems.append(f"d_model {model.d_model} does not divide into {model.heads} heads.")
    if model.d_model % 2:
        problems.append(f"d_model {model.d_model} must be even: positions are pairs of sine and cosine.")
    if config.decode.beam % config.decode.groups:
        problems.append(f"decode.beam {config.decode.beam} does not divide into decode.groups {config.decode.groups}.")
    if config.decode.min_words >= config.decode.max_words:
        problems.append(
            f"decode.min_words {config.decode.min_words} and an end token do not fit "
            f"decode.max_words {config.decode.max_words}."
        )
    if config.decode.max_words > model.max_words:
        problems.append(
            f"decode.max_words {config.decode.max_words} is more than model.max_words {model.max_words}: "
            "lower the first or raise the second."
        )


def _unknown_setting(spelling: str, key: str, allowed: Mapping[str, Any]) -> str:
    """Suggest a correction in the spelling of the user: --model.d_modle → --model.d_model."""
    close = did_you_mean(key, allowed)
    if not close:
        return f"unknown setting '{spelling}'. Available here: {', '.join(sorted(allowed))}."
    before, _, after = spelling.rpartition(key)
    better = before + close.split("'")[1] + after
    return f"unknown setting '{spelling}'. Did you mean '{better}'?"


def _first_leaf(node: Any) -> Given:
    while isinstance(node, dict):
        node = next(iter(node.values()))
    assert isinstance(node, Given)
    return node


def _type_name(declared: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    names[tuple[str, ...]] = "a list of words"
    return names.get(declared, str(declared))
