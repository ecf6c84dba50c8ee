"""`haav VERB …`: builds the command line from the functions in this folder.

The annotations of a function are its flags and their help. Parameters before the `*` are positional.

Flags with a dot, like `--model.d_model 512`, set any setting of the config. They are collected here and validated
together with the config, so that all problems are reported at once.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from haav import __version__
from haav.cli import captions, data, models, serving, studies, training, weights
from haav.cli.common import Overrides
from haav.errors import ConfigError, HaavError, did_you_mean, needs_package, printable, unknown

GROUPS: dict[str, dict[str, Callable[..., int]]] = {
    "captions": {"caption": captions.caption, "explain": captions.explain, "serve": serving.serve},
    "data": {
        "extract": data.extract,
        "views": data.views,
        "import": data.import_features,
        "store": data.store,
        "dataset": data.dataset,
        "textdb": data.textdb,
        "bridge": data.bridge,
    },
    "training": {
        "train": training.train,
        "predict": training.predict,
        "evaluate": training.evaluate,
        "calibrate": training.calibrate,
    },
    "studies": {
        "describe": studies.describe,
        "control": studies.control,
        "ablate": studies.ablate,
        "reproduce": studies.reproduce,
        "report": studies.report,
        "bench": studies.bench,
    },
    "models": {"pack": models.pack, "export": models.export, "convert": models.convert, "weights": weights.weights},
}
VERBS = {name: function for group in GROUPS.values() for name, function in group.items()}


EXIT_CODES = {
    0: "done",
    1: "nothing could be done, or what was checked is damaged; the message says why",
    2: "wrong usage: an unknown command, flag or setting, a value that it cannot have, or one that is missing",
    3: "some photos failed; the others are done",
    130: "interrupted",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        function, values = parse(arguments)
        return function(**values)
    except HaavError as error:
        print(f"{type(error).__name__}: {printable(str(error), lines=True)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if (error.name or "haav").partition(".")[0] == "haav":
            raise
        print(f"haav {arguments[0]} {needs_package(error.name or '')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has closed the pipe
        return 1
    except OSError as error:
        print(
            f"system error: {printable(str(error))}.\n"
            "  Finished work is saved. Check disk space, permissions and limits, then run the same command again.",
            file=sys.stderr,
        )
        return 1


def parse(arguments: Sequence[str]) -> tuple[Callable[..., int], dict[str, Any]]:
    """The function of a command and its arguments. Wrong usage is explained and exits with 2."""
    parser = _Parser(prog="haav", usage="haav COMMAND …", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.description = _overview()
    parser.add_argument("--version", action="version", version=f"haav {__version__}")
    verbs = parser.add_subparsers(
        dest="verb",
        prog="haav",
        metavar="VERB",
        parser_class=_Parser,
        required=True,
        help=argparse.SUPPRESS,
        title=argparse.SUPPRESS,
    )
    for name, function in VERBS.items():
        verb = verbs.add_parser(
            name, description=inspect.getdoc(function), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        _add_flags(verb, function)
        verb.notes = partial(_notes, name)
    if not arguments:
        parser.print_help()
        raise SystemExit(2)
    if arguments[0] not in VERBS and not arguments[0].startswith("-"):
        if Path(arguments[0]).exists():
            parser.error(f"'{arguments[0]}' is a file or folder. Did you mean: haav caption {arguments[0]}")
        parser.error(unknown("command", arguments[0], VERBS))
    plain, overrides = _split_overrides(arguments)
    values = vars(parser.parse_args(plain))
    function = VERBS[values.pop("verb")]
    if "overrides" in inspect.signature(function).parameters:
        values["overrides"] = overrides
    elif overrides:
        parser.error(f"'{arguments[0]}' takes no settings, but got {overrides[0][0]}.")
    return function, values


def _overview() -> str:
    """The commands by group, one line each"""
    lines = ["Caption photos, and explain each word."]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:"]
        for name, function in verbs.items():
            brief = (inspect.getdoc(function) or "").splitlines()[0].partition(". ")[0].partition("; ")[0]
            lines += textwrap.wrap(brief.rstrip("."), 88, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13)
    lines += ["", "exit codes:", *(f"  {code:<11}{meaning}" for code, meaning in EXIT_CODES.items())]
    return "\n".join([*lines, "", "Run haav COMMAND --help for the options of a command."])


def _notes(verb: str) -> str:
    """What a command takes beside its flags: recipes, presets, grids, settings"""
    from haav.config import DecodeConfig, load

    lines: list[str] = []
    named = {
        "train": ("recipes", load.recipe_names),
        "describe": ("presets", load.preset_names),
        "ablate": ("grids", load.grid_names),
        "reproduce": ("grids", load.table_names),
    }
    if verb in named:
        what, names = named[verb]
        lines += ["tables:" if verb == "reproduce" else f"{what}:"]
        for name in names():
            lines += _entry(name, load.summary(what, name))
    parameters = inspect.signature(VERBS[verb]).parameters
    if "overrides" in parameters and "model" in parameters and verb != "describe":
        lines += ["", "decode settings, with the defaults of haav; a model may bring its own:"]
        for field in fields(DecodeConfig):
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            lines += _entry(f"--decode.{field.name} {default}", field.metadata["doc"])
    elif "overrides" in parameters:
        lines += ["", "Every setting is a flag too, by its dotted name, e.g. --model.d_model 512."]
    return "\n".join(lines).strip()


def _entry(name: str, text: str) -> list[str]:
    """A name and what it is, in the columns of argparse's help"""
    first = f"  {name:<22}" if len(name) < 22 else f"  {name}\n{' ' * 24}"
    return (first + ("\n" + " " * 24).join(textwrap.wrap(text, 54, break_on_hyphens=False))).splitlines()


class _Parser(argparse.ArgumentParser):
    notes: Callable[[], str] | None = None
    """writes the end of the help, when it is asked for"""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def format_help(self) -> str:
        self.epilog = self.notes() if self.notes else None
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, extra = super().parse_known_args(args, namespace)
        flags = [word for word in extra if word.startswith("-")]
        if flags and "VERB" not in str(self._actions[-1].metavar):
            known = [option for action in self._actions for option in action.option_strings]
            self.error("\n".join(f"unknown flag '{flag}'.{did_you_mean(flag, known)}" for flag in flags))
        return parsed, extra

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {printable(message, lines=True)}\n  See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(2)


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], Overrides]:
    """Separate `--a.b value` and `--a.b=value` from the other arguments."""
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
                print(f"haav: {flag} needs a value.", file=sys.stderr)
                raise SystemExit(2)
            overrides.append((flag, following))
    return plain, overrides


def _add_flags(parser: argparse.ArgumentParser, function: Callable[..., int]) -> None:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "overrides":
            continue
        value_type, doc = typing.get_args(hints[name])
        if doc is type(None):  # Python 3.10 wraps the hint in Optional if the default is None
            value_type, doc = typing.get_args(value_type)
        doc = doc.replace("%", "%%")
        if typing.get_origin(value_type) is types.UnionType:
            (value_type,) = [option for option in typing.get_args(value_type) if option is not type(None)]
        flag = f"--{name.replace('_', '-')}"
        required = parameter.default is inspect.Parameter.empty
        if typing.get_origin(value_type) is list:
            parser.add_argument(name, type=str, help=doc, nargs="+" if required else "*")
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            parser.add_argument(name, type=value_type, help=doc, nargs=None if required else "?")
        elif value_type is bool:
            parser.add_argument(flag, action="store_true", help=doc, dest=name)
        else:
            default = None if required else parameter.default
            parser.add_argument(flag, type=value_type, default=default, required=required, help=doc, dest=name)
