"""A hook of mkdocs: writes the references of commands and settings from the code, at build time, so that they cannot
go stale. It imports `haav.cli` and `haav.config`, which do not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from haav.cli import main as cli
from haav.config import load, schema

PACKAGE = Path(inspect.getfile(schema)).parents[1]
REGISTRIES = {"encoding": "encodings", "decoder": "decoders", "aggregator": "aggregators"}
"""settings of the model whose choices are registered classes"""
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in (("reference/cli.md", commands()), ("reference/settings.md", settings())):
        files.append(File.generated(config, path, content=text))
    return files


def commands() -> str:
    """Every command with its arguments, by group"""
    lines = [
        "# Commands",
        "",
        "This page is generated from the functions in `haav.cli`. `haav COMMAND --help` prints the same.",
        "",
        "| exit code | |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in cli.EXIT_CODES.items()),
        "",
        "Commands marked *takes settings* accept any [setting](settings.md) as a flag with its dotted name,",
        "for example `--decode.beam 1`. Commands that use a trained model accept only `--decode` settings.",
    ]
    for group, verbs in cli.GROUPS.items():
        lines += ["", f"## {group.capitalize()}"]
        for name, function in verbs.items():
            lines += ["", f"### haav {name}", "", inspect.getdoc(function) or ""]
            if "overrides" in inspect.signature(function).parameters:
                lines += ["", "*Takes settings.*"]
            parser = argparse.ArgumentParser(prog=f"haav {name}", add_help=False)
            cli._add_flags(parser, function)
            for action in parser._actions:
                lines += ["", _argument(action), f":   {_sentence((action.help or '').replace('%%', '%'))}"]
    return "\n".join([*lines, ""])


def _argument(action: argparse.Action) -> str:
    if not action.option_strings:
        required = {"+": "one or more", "*": "any number", "?": "optional"}.get(str(action.nargs), "required")
        return f"`{action.dest.upper()}` – {required}"
    flag = action.option_strings[0]
    if action.nargs == 0:
        return f"`{flag}`"
    kind = TYPES.get(action.type, "text") if isinstance(action.type, type) else "text"
    if action.required:
        return f"`{flag}` – {kind}, required"
    return f"`{flag}` – {kind}" + ("" if action.default in (None, "") else f", default `{action.default}`")


def settings() -> str:
    """Every setting by section, what presets change, and the recipes and grids"""
    lines = [
        "# Settings",
        "",
        "This page is generated from `haav.config.schema`.",
        "",
        "A configuration is a preset, then a YAML file, then flags. The last one wins. The flag of a setting is its",
        "dotted name, for example `--train.lr 1e-4`. All mistakes in a configuration are reported at once.",
    ]
    sections = get_type_hints(schema.Config)
    for section in dataclasses.fields(schema.Config):
        kind = sections[section.name]
        lines += ["", f"## {section.name}"]
        if not dataclasses.is_dataclass(kind):
            lines += ["", _sentence(section.metadata["doc"])]
            continue
        lines += ["", inspect.getdoc(kind) or ""]
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            name = f"{section.name}.{field.name}"
            about = ", ".join(_about(field, hints[field.name]))
            lines += ["", f"`{name}` – {about}", f":   {_sentence(field.metadata['doc'])}"]
    lines += ["", "## Presets", "", "Settings in which presets differ, from each other or from the default.", ""]
    lines += _presets()
    for what, names in (("recipes", load.recipe_names()), ("grids", load.grid_names())):
        command = "haav train NAME" if what == "recipes" else "haav ablate NAME"
        lines += ["", f"## {what.capitalize()}", "", f"Used by `{command}`. A path of a YAML file works too."]
        for name in names:
            lines += ["", f"`{name}`", f":   {_head(PACKAGE / 'config' / what / f'{name}.yaml')}"]
    return "\n".join([*lines, ""])


def _about(field: dataclasses.Field[Any], hint: Any) -> list[str]:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    limits = field.metadata
    choices = limits.get("choices") or _registered(field.name)
    if choices:
        about = ["one of " + ", ".join(f"`{choice}`" for choice in choices)]
    else:
        about = ["table" if get_origin(hint) is dict else TYPES[kinds[0]]]
    if limits.get("low") is not None:
        about.append(f"at least {limits['low']}")
    if limits.get("below") is not None:
        about.append(f"below {limits['below']}")
    if limits.get("most") is not None:
        about.append(f"at most {limits['most']}")
    if field.default is not dataclasses.MISSING and field.default != "":
        about.append(f"default `{_yaml(field.default)}`")
    return about


def _registered(setting: str) -> list[str]:
    """Names of the classes that a setting chooses among, read from the source: importing it would import torch"""
    if setting not in REGISTRIES:
        return []
    files = sorted((PACKAGE / "model" / REGISTRIES[setting]).glob("*.py"))
    names = [name for file in files for name in re.findall(r'^@\w+\.register\("(\w+)"\)', file.read_text(), re.M)]
    return [*(["auto", "unused"] if setting == "aggregator" else []), *sorted(names)]


def _presets() -> list[str]:
    names = load.preset_names()
    values = [_flat(schema.Config()), *(_flat(load.read_settings(name)[0]) for name in names)]
    rows = [f"| setting | default | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for path in values[0]:
        cells = [_yaml(config[path]) for config in values]
        if len(set(cells)) > 1:
            rows.append(f"| `{path}` | {' | '.join(cells)} |")
    return rows


def _flat(config: schema.Config) -> dict[str, Any]:
    flat = {}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        if dataclasses.is_dataclass(part):
            values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
            flat |= {f"{section.name}.{name}": value for name, value in values.items()}
    views = flat.get("model.views") or {}
    return {**flat, "model.views": ", ".join(views) or "none"}


def _head(file: Path) -> str:
    """The comment that a YAML file begins with; it ends in a command"""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = [line.lstrip("# ").rstrip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    return re.sub(r"\bhaav (train|ablate) .*$", r"`\g<0>`", " ".join(comment))


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _sentence(text: str) -> str:
    """A note as a sentence; what looks like HTML is escaped"""
    text = text[:1].upper() + text[1:]
    return re.sub(r"<(\w+)>", r"`<\1>`", text if text.endswith((".", ":")) else f"{text}.")
