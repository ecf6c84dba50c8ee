"""Feature files that people already have, read into a view store: one reader a layout.

Files are streamed and committed in batches; what is in the store is skipped, so running the same import
again does what is missing. A record that cannot be read is named in the summary and left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from string import Formatter

import torch

from haav.errors import ConfigError, DataError, HaavError, unknown
from haav.store import Store, ViewManifest
from haav.types import PhotoView, Progress, ViewSpec, quiet
from haav.views.extract import Failure, Summary
from haav.views.feature_files import LAYOUTS, MAX_OBJECTS, TEXTS, Layout, Record, Records

BATCH = 256
"""photos a transaction: about 100 MB of objects"""
PROBE = 32
"""records tried before a file is said to have another layout"""


def import_features(
    kind: str,
    source: str | Path,
    store_path: str | Path,
    view: str | None = None,
    id_template: str = "{id}",
    progress: Progress = quiet,
) -> Summary:
    """Put the features of a file, or of a folder of files, into the store.

    `view` names the view in the store; for `txt_ctx_hdf5`, which makes three, it picks one of them.
    `id_template` turns the file's ids into photo names, e.g. "{id:012d}.jpg". A photo's first record counts.
    """
    if kind not in LAYOUTS:
        raise ConfigError(unknown("kind of feature file", kind, LAYOUTS))
    layout, name, source = LAYOUTS[kind], _namer(id_template), Path(source)
    targets, files = _targets(layout, view), _files(source, kind)
    firsts = {role: _probe(files, kind, role) for role in targets}
    fingerprint, found = _fingerprint(kind, files), []
    with Store(store_path, write=True) as store:
        for role, target in targets.items():
            made = {"source": f"imported: {source.name}", "notes": layout.holds}
            store.add_view(target, ViewManifest(_spec(role, firsts[role]), fingerprint, **made))
        for role, target in targets.items():
            load = partial(_fitted, role=role, first=firsts[role])
            with closing(layout.entries(files)) as entries:
                found.append(_copy(entries, load, name, store, target, progress))
    photos, skipped = max(part.photos for part in found), min(part.skipped for part in found)
    return Summary(photos, skipped, [failure for part in found for failure in part.failures])


def _copy(
    entries: Records,
    load: Callable[[Record], PhotoView],
    name: Callable[[str], str],
    store: Store,
    target: str,
    progress: Progress,
) -> Summary:
    summary, known, seen, before = Summary(), set(store.ids(target)), 0, -1
    while seen > before:
        before, pending = seen, {}
        for entry in islice(entries, BATCH):
            seen, photo = seen + 1, entry.id
            try:
                photo = name(entry.id)
                if photo in known:
                    summary.skipped += 1
                else:
                    pending[photo] = load(entry)
                    known.add(photo)
            except Exception as error:  # damaged files fail in as many ways as there are libraries below
                summary.failures.append(Failure(photo, (target,), _said(error)))
        store.put(target, pending)
        summary.photos += len(pending)
        progress(seen, max(seen, round(seen / entry.share)))
    return summary


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, HaavError) else f"{type(error).__name__}: {error}"


def _fitted(entry: Record, role: str, first: PhotoView) -> PhotoView:
    """The record, if it is like the first: all photos of a view have its width, and boxes, or none has."""
    photo, spec = entry.load(role), _spec(role, first)
    count, width = photo.tokens.shape
    boxes = None if first.boxes is None else photo.boxes
    if not count:  # nothing was detected: the photo lacks the view
        boxes = None if first.boxes is None else torch.zeros(0, 4)
        return PhotoView(torch.zeros(0, spec.dim), {name: torch.zeros(0).long() for name in spec.indices}, boxes)
    if width != spec.dim or count > spec.max_tokens:
        raise DataError(f"it is {count} × {width} where the first record allows {spec.max_tokens} × {spec.dim}.")
    if not torch.isfinite(photo.tokens).all():
        raise DataError("it has numbers that are not finite.")
    if first.boxes is not None and boxes is None:
        raise DataError("its last six numbers are no box, unlike those of the first record.")
    return replace(photo, boxes=boxes)


# What is asked for


def _targets(layout: Layout, view: str | None) -> dict[str, str]:
    """The layout's views → their names in the store"""
    if len(layout.views) == 1:
        return {layout.views[0]: view or layout.views[0]}
    if view is not None and view not in layout.views:
        raise ConfigError(unknown("view of this kind", view, layout.views))
    return {role: role for role in ([view] if view else layout.views)}


def _namer(template: str) -> Callable[[str], str]:
    """Ids → photo names; `{id:012d}` wants a number, `{id}` takes the id as it stands."""

    def name(given: str) -> str:
        try:
            photo = template.format(id=int(given) if numeric else given)
            if given and len(photo.encode()) < 512:  # the longest key of a store
                return photo
        except ValueError:
            pass
        raise DataError(f"id '{given[:60]}' does not fit the id template '{template}'.")

    try:
        fields = [(field, spec or "") for _, field, spec, _ in Formatter().parse(template) if field is not None]
        numeric = any(spec.endswith("d") or (spec.startswith("0") and spec.isdigit()) for _, spec in fields)
        if {field for field, _ in fields} == {"id"} and name("1"):
            return name
    except (DataError, ValueError, KeyError, IndexError):
        pass
    raise ConfigError(
        f"id template '{template}' cannot be used.\n  Write {{id}} for the id as it stands, "
        "or a number format: {id:012d}.jpg makes 000000391895.jpg of 391895."
    )


def _files(source: Path, kind: str) -> list[Path]:
    patterns, holds = LAYOUTS[kind].patterns, f"'{kind}' reads {LAYOUTS[kind].holds}."
    if not source.exists():
        raise DataError(f"{source} does not exist. {holds}")
    if not source.is_dir():
        return [source]
    found = sorted({file for pattern in patterns for file in source.glob(pattern)})
    files = [file for file in found if not file.stem.endswith("_info")]  # pickles that some extractors write beside
    if not files:
        raise DataError(f"{source} is a folder, and no such file is in it. {holds}")
    return files


def _probe(files: Sequence[Path], kind: str, role: str) -> PhotoView:
    """The first readable record, which speaks for all; an error when the file has another layout."""
    problems = []
    with closing(LAYOUTS[kind].entries(files)) as entries:
        for entry in islice(entries, PROBE):
            try:
                first = entry.load(role)
            except Exception as error:
                problems.append(f"record '{entry.id[:60]}': {_said(error)}")
            else:
                if len(first.tokens):
                    return first
    raise DataError(
        f"{files[0]} does not look like '{kind}': {(problems or ['it has no record with features.'])[0]}\n"
        f"  '{kind}' reads {LAYOUTS[kind].holds}. Other kinds: {', '.join(sorted(set(LAYOUTS) - {kind}))}."
    )


def _spec(role: str, first: PhotoView) -> ViewSpec:
    """As the presets have it; their `boxes` is off, since the box numbers are among the features."""
    count, width = first.tokens.shape
    if role in TEXTS:
        crops, ranks = TEXTS[role]
        return ViewSpec(width, crops * ranks, {"crop": crops, "rank": ranks})
    return ViewSpec(width, MAX_OBJECTS if role == "objects" else count)


def _fingerprint(kind: str, files: Sequence[Path]) -> str:
    """Names and sizes of all files, and both ends of a few: nobody waits for a hash of 100 GB."""
    digest = hashlib.sha256(kind.encode())
    for path in files:
        digest.update(f"\n{path.name} {path.stat().st_size}".encode(errors="surrogateescape"))
    for path in files if len(files) <= 16 else (files[0], files[-1]):
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return f"{kind}-{digest.hexdigest()[:16]}"
