"""Imports existing feature files into a view store, with one reader per layout.

Files are streamed and committed in batches. Photos in the store are skipped, so running the same import again adds what
is missing. A record that cannot be read is listed in the summary and left out.
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
"""photos per transaction: about 100 MB of objects"""
PROBE = 32
"""records to try before a file is rejected as another layout"""


def import_features(
    layout_name: str,
    source: str | Path,
    store_path: str | Path,
    view: str | None = None,
    id_template: str = "{id}",
    progress: Progress = quiet,
) -> Summary:
    """Puts the features of a file, or of a folder of files, into the store.

    `view` names the view in the store; for `txt_ctx_hdf5`, which holds three, it selects one.
    `id_template` turns the file's ids into photo names, e.g. "{id:012d}.jpg". Only the first record of
    a photo is imported.
    """
    if layout_name not in LAYOUTS:
        raise ConfigError(unknown("layout", layout_name, LAYOUTS))
    layout, name, source = LAYOUTS[layout_name], _namer(id_template), Path(source)
    targets, files = _targets(layout, view), _files(source, layout_name)
    firsts = {role: _probe(files, layout_name, role) for role in targets}
    fingerprint, summaries = _fingerprint(layout_name, files), []
    with Store(store_path, write=True) as store:
        for role, target in targets.items():
            provenance = {"source": f"imported: {source.name}", "notes": layout.holds}
            store.add_view(target, ViewManifest(_spec(role, firsts[role]), fingerprint, **provenance))
        for role, target in targets.items():
            load = partial(_fitted, role=role, first=firsts[role])
            with closing(layout.entries(files)) as entries:
                summaries.append(_copy(entries, load, name, store, target, progress))
    photos, skipped = max(summary.photos for summary in summaries), min(summary.skipped for summary in summaries)
    return Summary(photos, skipped, [failure for summary in summaries for failure in summary.failures])


def _copy(
    entries: Records,
    load: Callable[[Record], PhotoView],
    name: Callable[[str], str],
    store: Store,
    target: str,
    progress: Progress,
) -> Summary:
    summary, known, processed, before = Summary(), set(store.ids(target)), 0, -1
    while processed > before:
        before, pending = processed, {}
        for entry in islice(entries, BATCH):
            processed, photo = processed + 1, entry.id
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
        progress(processed, max(processed, round(processed / entry.share)))
    return summary


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, HaavError) else f"{type(error).__name__}: {error}"


def _fitted(entry: Record, role: str, first: PhotoView) -> PhotoView:
    """The record, if it fits the first one. All photos of a view have the same width, and all or none have boxes."""
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


# Arguments


def _targets(layout: Layout, view: str | None) -> dict[str, str]:
    """View of the layout → its name in the store."""
    if len(layout.views) == 1:
        return {layout.views[0]: view or layout.views[0]}
    if view is not None and view not in layout.views:
        raise ConfigError(unknown("view of this layout", view, layout.views))
    return {role: role for role in ([view] if view else layout.views)}


def _namer(template: str) -> Callable[[str], str]:
    """A function from ids to photo names. `{id:012d}` needs a number; `{id}` takes the id as it is."""

    def name(record_id: str) -> str:
        try:
            photo = template.format(id=int(record_id) if numeric else record_id)
            if record_id and len(photo.encode()) < 512:  # the longest key of a store
                return photo
        except ValueError:
            pass
        raise DataError(f"id '{record_id[:60]}' does not fit the id template '{template}'.")

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


def _files(source: Path, layout_name: str) -> list[Path]:
    patterns, holds = LAYOUTS[layout_name].patterns, f"'{layout_name}' reads {LAYOUTS[layout_name].holds}."
    if not source.exists():
        raise DataError(f"{source} does not exist. {holds}")
    if not source.is_dir():
        return [source]
    matches = sorted({file for pattern in patterns for file in source.glob(pattern)})
    # Some extractors write pickles called *_info next to the features.
    files = [file for file in matches if not file.stem.endswith("_info")]
    if not files:
        raise DataError(f"{source} is a folder, and no such file is in it. {holds}")
    return files


def _probe(files: Sequence[Path], layout_name: str, role: str) -> PhotoView:
    """The first readable record, which sets the spec. Raises if the file has another layout."""
    problems = []
    with closing(LAYOUTS[layout_name].entries(files)) as entries:
        for entry in islice(entries, PROBE):
            try:
                first = entry.load(role)
            except Exception as error:
                problems.append(f"record '{entry.id[:60]}': {_said(error)}")
            else:
                if len(first.tokens):
                    return first
    raise DataError(
        f"{files[0]} does not look like '{layout_name}': {(problems or ['it has no record with features.'])[0]}\n"
        f"  '{layout_name}' reads {LAYOUTS[layout_name].holds}. "
        f"Other layouts: {', '.join(sorted(set(LAYOUTS) - {layout_name}))}."
    )


def _spec(role: str, first: PhotoView) -> ViewSpec:
    """The spec as in the presets. `boxes` is False, since the features include the box coordinates."""
    count, width = first.tokens.shape
    if role in TEXTS:
        crops, ranks = TEXTS[role]
        return ViewSpec(width, crops * ranks, {"crop": crops, "rank": ranks})
    return ViewSpec(width, MAX_OBJECTS if role == "objects" else count)


def _fingerprint(layout_name: str, files: Sequence[Path]) -> str:
    """Hashes the names and sizes of all files and both ends of a few. Hashing 100 GB would take too long."""
    digest = hashlib.sha256(layout_name.encode())
    for path in files:
        digest.update(f"\n{path.name} {path.stat().st_size}".encode(errors="surrogateescape"))
    for path in files if len(files) <= 16 else (files[0], files[-1]):
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return f"{layout_name}-{digest.hexdigest()[:16]}"
