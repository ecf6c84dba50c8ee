"""Commands that caption and explain photos: caption, explain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haav.cli.common import (
    Backend,
    Device,
    Model,
    Models,
    Overrides,
    Photos,
    Precision,
    Views,
    exit_code,
    fetch_weights_of,
    listed,
    load_captioner,
)
from haav.cli.jobs import JobSettings, caption_in_parts, is_job
from haav.errors import ConfigError, did_you_mean, printable, unknown

if TYPE_CHECKING:
    from haav.inference.captioner import Captioner
    from haav.inference.options import CaptionOptions
    from haav.text import Vocabulary


FORMATS = ("text", "csv", "json")


def caption(
    paths: Photos,
    *,
    model: Models = "best",
    format: Annotated[
        str | None, "output: text (name, tab, caption), csv or json lines (default: in colours, for people)"
    ] = None,
    json: Annotated[bool, "same as --format json"] = False,
    beam: Annotated[int | None, "beam width; wider is slower and slightly better (default: the model's)"] = None,
    n_best: Annotated[int, "number of captions per photo"] = 1,
    views: Views = "",
    must: Annotated[str, "words that captions must contain, comma-separated; a|b for either"] = "",
    never: Annotated[str, "words that captions must not contain, comma-separated"] = "",
    prefix: Annotated[str, "words that captions begin with; the model goes on from there"] = "",
    seed: Annotated[int | None, "random seed of --decode.method sample"] = None,
    out: Annotated[
        str | None,
        "file for the lines of JSON (or .parquet), or a folder/ or address for parts; resumed if interrupted",
    ] = None,
    out_format: Annotated[str | None, "format of the output: jsonl (default), parquet or webdataset"] = None,
    engine: Annotated[str | None, "ray: caption parts of the photos on a Ray cluster; needs --out"] = None,
    address: Annotated[str | None, "ray: of the cluster, or auto (default: a cluster of this machine)"] = None,
    workers: Annotated[int | None, "ray: worker processes (default: as many as fit)"] = None,
    cores: Annotated[int, "ray: cores of each worker"] = 1,
    part: Annotated[int, "photos of a part; a tar file or Parquet row group is one part"] = 256,
    overwrite: Annotated[bool, "replace the file --out instead of resuming it"] = False,
    no_recursive: Annotated[bool, "leave out folders inside of folders"] = False,
    quiet: Annotated[bool, "print captions and failures only: no progress, legend or summary"] = False,
    batch: Annotated[int | None, "photos per batch (default: 8, fewer where memory is short)"] = None,
    explain: Annotated[str | None, "folder for explanations, as written by `haav explain`"] = None,
    device: Device = "cpu",
    precision: Precision = None,
    backend: Backend = "auto",
    overrides: Overrides | None = None,
) -> int:
    """Caption photos. Each word has the colour of the view with the largest weight."""
    from haav.cli import output
    from haav.inference import stream
    from haav.inference.caption_file import CaptionFile, MadeWith
    from haav.views.batch_size import fitting_batch

    if batch is not None and batch < 1:
        raise ConfigError(f"a batch has at least 1 photo, not {batch}.")
    form = _form(format, json, out)
    if overwrite and out is None:
        raise ConfigError("--overwrite needs --out FILE.")
    captioner = load_captioner(model, overrides, device, precision, beam, backend)
    options = _options(captioner, views, n_best, must, never, seed, prefix, widen=beam is None)
    if explain:
        from haav.studies.explain import weighing

        weighing(captioner)
    note = output.note if not quiet else lambda text: None
    _note_unknown(options.never, captioner.vocabulary, note)
    if engine is not None or out_format is not None or is_job(paths, out):
        if explain or overwrite or no_recursive or format or json:
            raise ConfigError("captions in parts are written to --out as they are: leave the other outputs out.")
        settings = JobSettings(
            paths, out, out_format, engine, address, workers, cores, part, batch, device, precision, backend
        )
        return caption_in_parts(settings, listed(model), captioner, options, quiet)
    items = stream.find_items(paths, sys.stdin.buffer.read, not no_recursive, note)
    pages = None
    if explain:
        from haav.studies.explain_pages import Pages

        pages = Pages(Path(explain))
    made_with = MadeWith.of(listed(model), options, captioner.config, precision) if out else None
    with CaptionFile(out, made_with, overwrite) if out and made_with else nullcontext() as file:
        todo = [item for item in items if file is None or item.name not in file]
        fetch_weights_of(captioner, options.views, quiet)
        kept, failed, waiting, size = len(items) - len(todo), 0, [], batch or fitting_batch(device)
        with output.captions(len(items), kept, captioner.views, form, quiet) as show:
            for done, photo in enumerate(captioner.stream(todo, options, size), 1):
                if pages is not None and photo.caption is not None:
                    pages.add(captioner, photo, options)
                failed += photo.caption is None
                waiting.append(photo)
                if file is not None and (done % size == 0 or done == len(todo)):
                    file.add(waiting)
                if done % size == 0:
                    waiting = []
                show(photo)
    if file is not None and not quiet:
        print(f"{printable(str(out))}: {len(items) - failed:,} captions, {kept:,} of them kept; {failed} failed.")
    return exit_code(len(items) - failed, failed)


def _form(format: str | None, json: bool, out: str | None) -> str:
    """How captions are shown: a format, "colours" for people, or "file" if they are not shown"""
    if format is not None and format not in FORMATS:
        raise ConfigError(unknown("format", format, FORMATS))
    if json and format not in (None, "json"):
        raise ConfigError(f"give either --json or --format {format}.")
    if out is not None:
        if format in ("text", "csv"):
            raise ConfigError(
                f"--out writes lines of JSON. For {format}, redirect the output: --format {format} > FILE"
            )
        return "file"
    return "json" if json else format or "colours"


def _options(
    captioner: Captioner,
    views: str,
    n_best: int = 1,
    must: str = "",
    never: str = "",
    seed: int | None = None,
    prefix: str = "",
    widen: bool = True,
) -> CaptionOptions:
    """Options of a command. With `widen`, the beam is widened to `n_best` if necessary."""
    from haav.inference.options import CaptionOptions

    decode = captioner.config.decode
    if seed is not None and decode.method != "sample":
        raise ConfigError("--seed needs --decode.method sample: beam search draws nothing at random.")
    words = tuple(listed(must)), tuple(listed(never))
    options = CaptionOptions(n_best, tuple(listed(views)) or None, *words, seed, prefix)
    if widen and decode.method == "beam" and decode.beam < n_best:
        options = replace(options, beam=n_best)
    options.decode(captioner.config)  # reports what cannot work before the work begins
    return options


def _note_unknown(never: Sequence[str], vocabulary: Vocabulary, note: Callable[[str], object]) -> None:
    """A forbidden word that the model cannot say may be a slip of the pen."""
    for word in never:
        if word.strip().lower() not in vocabulary.ids:
            hint = did_you_mean(word, vocabulary.words)
            note(f"--never: the model does not know the word '{printable(word)}', so it never says it.{hint}")


def explain(
    paths: Photos,
    *,
    out: Annotated[str, "folder for a page (.html), a figure (.png) and data (.json) per photo"],
    model: Model = "best",
    views: Views = "",
    device: Device = "cpu",
    precision: Precision = None,
    overrides: Overrides | None = None,
) -> int:
    """Explain each word of a caption: view weights, attention, and captions without each view."""
    from haav.cli import output
    from haav.inference import stream
    from haav.studies.explain import weighing
    from haav.studies.explain_pages import Pages

    captioner = load_captioner(model, overrides, device, precision)
    weighing(captioner)
    options = _options(captioner, views)
    items = stream.find_items(paths, sys.stdin.buffer.read, note=output.note)
    pages, failed = Pages(Path(out)), 0
    fetch_weights_of(captioner, options.views)
    with output.progress("photos") as progress:
        for done, photo in enumerate(captioner.stream(items, options), 1):
            if photo.error is None:
                print(printable(str(pages.add(captioner, photo, options))))
            else:
                failed += 1
                print(output.failure(photo), file=sys.stderr)
            progress(done, len(items))
    return exit_code(len(items) - failed, failed)
