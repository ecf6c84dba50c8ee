"""Commands that caption and explain photos: caption, explain, serve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haav.cli.common import (
    Device,
    Model,
    Models,
    Overrides,
    Photos,
    Precision,
    Views,
    fetch_weights_of,
    listed,
    load_captioner,
)
from haav.errors import ConfigError

if TYPE_CHECKING:
    from haav.inference.captioner import Captioner
    from haav.inference.options import CaptionOptions


def caption(
    paths: Photos,
    *,
    model: Models = "best",
    json: Annotated[bool, "print one line of JSON per photo"] = False,
    beam: Annotated[int | None, "beam width; wider is slower and slightly better (default: the model's)"] = None,
    n_best: Annotated[int, "number of captions per photo"] = 1,
    views: Views = "",
    must: Annotated[str, "words that captions must contain, comma-separated; a|b for either"] = "",
    never: Annotated[str, "words that captions must not contain, comma-separated"] = "",
    out: Annotated[str | None, "file for the lines of JSON; an interrupted run is resumed"] = None,
    batch: Annotated[int, "photos per batch"] = 8,
    explain: Annotated[str | None, "folder for explanations, as written by `haav explain`"] = None,
    device: Device = "cpu",
    precision: Precision = None,
    overrides: Overrides | None = None,
) -> int:
    """Caption photos. Each word has the colour of the view with the largest weight."""
    from haav.cli import output
    from haav.inference import stream
    from haav.studies.explain import Pages, weighing

    if batch < 1:
        raise ConfigError(f"a batch has at least 1 photo, not {batch}.")
    captioner = load_captioner(model, overrides, device, precision)
    options = _options(captioner, views, beam, n_best, must, never)
    if explain:
        weighing(captioner)
    items = stream.find_items(paths, sys.stdin.buffer.read)
    file = stream.CaptionFile(out) if out else None
    fetch_weights_of(captioner, options.views)
    pages = Pages(Path(explain)) if explain else None
    todo = [item for item in items if file is None or item.name not in file.done]
    mode = "file" if file is not None else "json" if json else "text"
    there, failed, waiting = len(items) - len(todo), 0, []
    with output.captions(len(items), captioner.views, mode) as show:
        for done, photo in enumerate(captioner.stream(todo, options, batch), 1):
            if pages is not None and photo.caption is not None:
                pages.add(captioner, photo, options)
            failed += photo.caption is None
            waiting.append(photo)
            if file is not None and (done % batch == 0 or done == len(todo)):
                file.add(waiting)
            if done % batch == 0:
                waiting = []
            show(there + done, photo)
    if file is not None:
        print(f"{out}: {len(items) - failed:,} captions, {there:,} of them kept; {failed} failed.")
    return 1 if failed else 0


def _options(
    captioner: Captioner, views: str, beam: int | None = None, n_best: int = 1, must: str = "", never: str = ""
) -> CaptionOptions:
    """Options of a command. The default beam is widened to `n_best` if necessary."""
    from haav.inference.options import CaptionOptions

    decode = captioner.config.decode
    if beam is None and decode.method == "beam":
        beam = max(n_best, decode.beam)
    return CaptionOptions(n_best, tuple(listed(views)) or None, tuple(listed(must)), tuple(listed(never)), beam=beam)


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
    from haav.studies.explain import Pages, weighing

    captioner = load_captioner(model, overrides, device, precision)
    weighing(captioner)
    options = _options(captioner, views)
    items = stream.find_items(paths, sys.stdin.buffer.read)
    pages, failed = Pages(Path(out)), 0
    fetch_weights_of(captioner, options.views)
    with output.progress("photos") as progress:
        for done, photo in enumerate(captioner.stream(items, options), 1):
            if photo.error is None:
                print(pages.add(captioner, photo, options))
            else:
                failed += 1
                print(f"{output.printable(photo.name)}: {photo.error}", file=sys.stderr)
            progress(done, len(items))
    return 1 if failed else 0


def serve(
    *,
    host: Annotated[str, "address to listen on; 0.0.0.0 accepts other machines"] = "127.0.0.1",
    port: Annotated[int, "port to listen on"] = 8000,
    model: Model = "best",
    device: Device = "cpu",
    precision: Precision = None,
    overrides: Overrides | None = None,
) -> int:
    """Serve a web page and an HTTP API (POST /v1/caption). Ctrl-C stops it."""
    try:
        from haav.web import server
    except ImportError:
        raise ConfigError('haav serve needs fastapi and uvicorn.\n  pip install "haav[web]"') from None

    with server.bind(host, port) as bound:
        captioner = load_captioner(model, overrides, device, precision)
        fetch_weights_of(captioner)
        server.run(captioner, bound, name=Path(model).name)
    return 0
