"""`haav VERB …`: parses, calls, prints. Each verb is a function whose annotations are its flags and help.

Flags with a dot, like `--model.d_model 512`, set any setting of the config; they are collected
here and checked together with the config, so that every problem is reported at once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

from haav import __version__
from haav.errors import HaavError, did_you_mean, unknown

Overrides = list[tuple[str, str]]
"""dotted flags as they were typed, with their values"""


def describe(
    preset: Annotated[str | None, "starting point: paper, release or best (default)"] = None,
    encoding: Annotated[str | None, "how views are encoded: shared, unshared, concat_views, model_per_view"] = None,
    aggregator: Annotated[
        str | None, "how words draw on views: hierarchical, concat_tokens, mean, max, sigmoid, tanh"
    ] = None,
    contrastive: Annotated[str | None, "train with the contrastive loss: true or false"] = None,
    config: Annotated[str | None, "a YAML file of settings on top of the preset"] = None,
    json: Annotated[bool, "print JSON"] = False,
    overrides: Overrides | None = None,
) -> int:
    """What a configuration is made of: parameters by part, views, FLOPs and how they grow."""
    from haav import terminal
    from haav.config import Given
    from haav.describe import describe
    from haav.presets import flags_from, load_config

    flags = flags_from(overrides or [])
    short = {
        ("model", "encoding"): ("--encoding", encoding),
        ("model", "aggregator"): ("--aggregator", aggregator),
        ("contrast", "enabled"): ("--contrastive", contrastive),
    }
    flags |= {path: Given(value, flag) for path, (flag, value) in short.items() if value is not None}
    description = describe(load_config(preset, config, flags))
    if json:
        _print_json(description.to_json())
    else:
        terminal.print_description(description)
    return 0


def convert(
    source: Annotated[str, "a checkpoint of the authors' released code: .safetensors or .pth"],
    out: Annotated[str, "model directory to write"],
    vocabulary: Annotated[str | None, "its words by id: a JSON list, or one a line"] = None,
    heads: Annotated[int, "attention heads: the file does not say"] = 8,
) -> int:
    """Turn a checkpoint of the authors' released code into a model directory of haav."""
    from haav.convert import convert, save

    converted = convert(source, vocabulary, heads)
    save(converted, out)
    model = converted.captioner.config.model
    print(f"{out}: {len(model.views)} views, width {model.d_model}, {model.vocabulary_size} words.")
    if not converted.named:
        print("No --vocabulary was given, so its words are numbers (word4, word5, …).", file=sys.stderr)
    return 0


VERBS: dict[str, Callable[..., int]] = {"describe": describe, "convert": convert}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a HaavError, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except HaavError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; nothing more to say
        return 1


def _run(arguments: list[str]) -> int:
    parser = _Parser(prog="haav", description="Photos to captions, and where each word came from.")
    parser.add_argument("--version", action="version", version=f"haav {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    for name, function in VERBS.items():
        doc = inspect.getdoc(function) or ""
        _add_flags(verbs.add_parser(name, help=doc.splitlines()[0], description=doc), function)
    if not arguments:
        parser.print_help()
        return 2
    if arguments[0] not in VERBS and not arguments[0].startswith("-"):
        parser.error(unknown("command", arguments[0], VERBS))
    plain, overrides = _split_overrides(arguments)
    given = vars(parser.parse_args(plain))
    function = VERBS[given.pop("verb")]
    if "overrides" in inspect.signature(function).parameters:
        given["overrides"] = overrides
    elif overrides:
        parser.error(f"'{arguments[0]}' takes no settings, but was given {overrides[0][0]}.")
    return function(**given)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extra = super().parse_known_args(args, namespace)
        flags = [word for word in extra if word.startswith("-")]
        if flags and "VERB" not in str(self._actions[-1].metavar):
            known = [option for action in self._actions for option in action.option_strings]
            self.error("\n".join(f"unknown flag '{flag}'.{did_you_mean(flag, known)}" for flag in flags))
        return found, extra

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\n  See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(2)


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], Overrides]:
    """Take `--a.b value` and `--a.b=value` out of the command line."""
    plain: list[str] = []
    overrides: Overrides = []
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or "." not in flag:
            plain.append(word)
        elif equals:
            overrides.append((flag, value))
        else:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise SystemExit(f"haav: {flag} needs a value.")
            overrides.append((flag, following))
    return plain, overrides


def _add_flags(parser: argparse.ArgumentParser, function: Callable[..., int]) -> None:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "overrides":
            parser.epilog = "Any setting can be given with its dotted name, e.g. --model.d_model 512."
            continue
        kind, doc = typing.get_args(hints[name])
        if typing.get_origin(kind) is types.UnionType:
            (kind,) = [option for option in typing.get_args(kind) if option is not type(None)]
        flag = f"--{name.replace('_', '-')}"
        if parameter.default is inspect.Parameter.empty:
            parser.add_argument(name, type=kind, help=doc)
        elif kind is bool:
            parser.add_argument(flag, action="store_true", help=doc, dest=name)
        else:
            parser.add_argument(flag, type=kind, default=parameter.default, help=doc, dest=name)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
