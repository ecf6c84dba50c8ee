"""Captions and explanations of photos: caption, explain, serve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from haav.cli.common import Overrides, fetch_weights_of, listed, load_captioner
from haav.errors import ConfigError, ImageError


def caption(
    paths: Annotated[list[str], "photos, folders, tar files, patterns; - is standard input"],
    *,
    model: Annotated[str, "a model that is shipped, or a model directory; several with commas"] = "best",
    json: Annotated[bool, "a line of JSON for each photo"] = False,
    beam: Annotated[int | None, "captions searched at once: more is slower and a little better"] = None,
    n_best: Annotated[int, "captions shown for each photo"] = 1,
    views: Annotated[str, "use only these views of the model, with commas"] = "",
    must: Annotated[str, "words that captions say, with commas; a|b: one of them"] = "",
    never: Annotated[str, "words that captions do not say, with commas"] = "",
    out: Annotated[str | None, "file for the lines of JSON; run again, it goes on where it stopped"] = None,
    batch: Annotated[int, "photos captioned together"] = 8,
    explain: Annotated[str | None, "folder for a page about each caption, as `haav explain` makes them"] = None,
    overrides: Overrides | None = None,
) -> int:
    """Caption photos; the words of a caption are coloured by the view that each trusts most."""
    from haav.cli import output
    from haav.inference import stream
    from haav.studies.explain import Pages, weighing

    if batch < 1:
        raise ConfigError(f"a batch has at least 1 photo, not {batch}.")
    captioner = load_captioner(model, overrides)
    options: dict[str, Any] = {"n_best": n_best, "must": listed(must), "never": listed(never)}
    if captioner.config.decode.method == "beam":
        options["beam"] = max(n_best, captioner.config.decode.beam) if beam is None else beam
    only = listed(views) or None
    if explain:
        weighing(captioner)
    items = stream.find_items(paths, sys.stdin.buffer.read)
    file = stream.CaptionFile(out) if out else None
    fetch_weights_of(captioner, only)
    pages = Pages(Path(explain)) if explain else None
    todo = [item for item in items if file is None or item.name not in file.done]
    mode = "file" if file is not None else "json" if json else "text"
    there, failed, waiting = len(items) - len(todo), 0, []
    with output.captions(len(items), captioner.views, mode) as show:
        for number, found in enumerate(stream.caption_all(captioner, todo, batch, only, **options), 1):
            if pages is not None and found.caption is not None:
                try:
                    pages.add(captioner, found.name, todo[number - 1].read(), only, **options)
                except ImageError as error:  # it was there a moment ago
                    found = stream.Captioned(found.name, None, str(error))
            failed += found.caption is None
            waiting.append(found)
            if file is not None and (number % batch == 0 or number == len(todo)):
                file.add(waiting)
                waiting = []
            show(there + number, found)
    if file is not None:
        print(f"{out}: {len(items) - failed:,} captions, {there:,} of them were there; {failed} failed.")
    return 1 if failed else 0


def explain(
    paths: Annotated[list[str], "photos, folders, tar files, patterns; - is standard input"],
    *,
    out: Annotated[str, "folder for a page (.html), a figure (.png) and data (.json) of each photo"],
    model: Annotated[str, "a model that is shipped, or a model directory"] = "best",
    views: Annotated[str, "use only these views of the model, with commas"] = "",
    overrides: Overrides | None = None,
) -> int:
    """Show why each word of a caption is there: views, places, sentences, and what would be said without them."""
    from haav.cli import output
    from haav.inference import stream
    from haav.studies import explain

    captioner = load_captioner(model, overrides)
    items = stream.find_items(paths, sys.stdin.buffer.read)
    pages, failed = explain.Pages(Path(out)), 0
    fetch_weights_of(captioner, listed(views))
    with output.progress("photos") as progress:
        for number, item in enumerate(items, 1):
            try:
                page = pages.add(captioner, item.name, item.read(), listed(views) or None)
                print(page)
            except ImageError as error:
                failed += 1
                print(f"{output.printable(item.name)}: {error}", file=sys.stderr)
            progress(number, len(items))
    return 1 if failed else 0


def serve(
    *,
    host: Annotated[str, "address to listen on; 0.0.0.0 lets other machines in"] = "127.0.0.1",
    port: Annotated[int, "port to listen on"] = 8000,
    model: Annotated[str, "a model that is shipped, or a model directory"] = "best",
    overrides: Overrides | None = None,
) -> int:
    """A page to drop photos on, and an API (POST /v1/caption). Ctrl-C ends it."""
    try:
        from haav.web import server
    except ImportError:
        raise ConfigError('the page needs fastapi and uvicorn.\n  pip install "haav[web]"') from None

    captioner = load_captioner(model, overrides)
    fetch_weights_of(captioner)
    print(f"http://{host}:{port} – Ctrl-C ends it.", flush=True)
    server.run(captioner, host, port, name=Path(model).name)
    return 0
