"""Feature files that people already have, read into a view store: one reader a layout.

Files are streamed and committed in batches; what is in the store is skipped, so running the same import
again does what is missing. A record that cannot be read is named in the summary and left out.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from haav.errors import ConfigError, DataError, HaavError, unknown
from haav.extract import Failure, Summary
from haav.store import Store, ViewManifest
from haav.types import PhotoView, Progress, ViewSpec, quiet

BATCH = 256
"""photos a transaction: about 100 MB of objects"""
PROBE = 32
"""records tried before a file is said to have another layout"""
MAX_ROW = 1 << 24
"""bytes of a .tsv row; 100 boxes of 2048 numbers take 1.1 MB"""
MAX_NUMBERS = 1 << 22
"""of one array of one photo; what claims more is damaged, and is not allocated"""
MAX_OBJECTS = 50
OBJECT_WIDTH = 2054
"""2048 features, then x1, y1, x2, y2, width, height as fractions of the photo"""
COLUMNS = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
TEXTS = {"text_whole": (1, 64), "text_five": (5, 16), "text_nine": (9, 8)}
"""crops and ranks: the release's files hold twice as many ranks, its models read the first of them"""


class Entry(NamedTuple):
    """A record that has been found, but not read yet."""

    id: str
    share: float  # of the source up to and with this record, in 0..1
    load: Callable[[str], PhotoView]  # one of the layout's views


Entries = Generator[Entry, None, None]


class Layout(NamedTuple):
    views: tuple[str, ...]
    holds: str
    entries: Callable[[Sequence[Path]], Entries]
    patterns: tuple[str, ...] = ()  # files of a folder that belong to it; none: the source must be a file


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
    entries: Entries,
    load: Callable[[Entry], PhotoView],
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


def _fitted(entry: Entry, role: str, first: PhotoView) -> PhotoView:
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


# Objects


def _objects(features: np.ndarray, boxes: np.ndarray | None, size: tuple[float, float] | None) -> PhotoView:
    """(N, 2048) and boxes (N, 4) → the 2054 numbers of the presets. Without boxes, features as they are."""
    if features.ndim != 2:
        raise DataError(f"features have the shape {features.shape} instead of (objects, width).")
    if len(features) == 2048 > features.shape[1]:
        features = features.T  # VQA toolboxes keep them so
    if features.shape[1] == OBJECT_WIDTH or boxes is None:
        return _real(features, _boxes_inside(features))
    if boxes.shape != (len(features), 4):
        raise DataError(f"boxes have the shape {boxes.shape} instead of ({len(features)}, 4).")
    if boxes.size and boxes.max() > 2:  # pixels: no detector sends all boxes of a photo into its corner
        if size is None or not all(0 < side < np.inf for side in size):
            raise DataError(f"boxes are in pixels, but the photo's size is {size or 'missing (image_w, image_h)'}.")
        boxes = boxes / np.array([*size, *size])
    numbers = np.concatenate([boxes, boxes[:, 2:] - boxes[:, :2]], axis=1)
    return _real(np.concatenate([features, numbers], axis=1, dtype=np.float32), boxes)


def _boxes_inside(features: np.ndarray) -> np.ndarray | None:
    """The boxes among 2054 numbers; None where the last six are something else, as in some files."""
    if features.shape[1] != OBJECT_WIDTH:
        return None
    low, high, sides = (features[:, at : at + 2].astype(np.float32) for at in (2048, 2050, 2052))
    sound = np.allclose(high - low, sides, atol=0.01) and high.max(initial=0) <= 2
    return np.concatenate([low, high], axis=1) if sound else None


def _real(tokens: np.ndarray, boxes: np.ndarray | None) -> PhotoView:
    """The one place where "a row of zeros is padding", true of these files, is turned into absence."""
    rows = np.flatnonzero(tokens.any(axis=1))[:MAX_OBJECTS]
    return PhotoView(_tensor(tokens[rows]), boxes=None if boxes is None else _tensor(boxes[rows]).clamp(0, 1))


def _tensor(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.float32, order="C"))


# Readers


def _tsv(files: Sequence[Path]) -> Entries:
    total, before = sum(path.stat().st_size for path in files), 0
    for path in files:
        with path.open("rb") as file:
            for number, (line, whole) in enumerate(_lines(file), 1):
                cells = line.rstrip(b"\r\n").split(b"\t")
                if cells[0] != b"image_id" and cells != [b""]:  # a header, an empty line
                    row = partial(_row, cells if whole else None, f"row {number} of {path.name}")
                    yield Entry(cells[0][:600].decode(errors="backslashreplace"), (before + file.tell()) / total, row)
        before += path.stat().st_size


def _lines(file: BinaryIO) -> Generator[tuple[bytes, bool], None, None]:
    """Lines and whether they are whole: of one that does not end, only so much is held in memory."""
    while line := file.readline(MAX_ROW):
        whole = len(line) < MAX_ROW or line.endswith(b"\n")
        rest = b"" if whole else file.readline(MAX_ROW)
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_ROW)
        yield line, whole


def _row(cells: Sequence[bytes] | None, where: str, role: str) -> PhotoView:
    if cells is None:
        raise DataError(f"{where} has more than {MAX_ROW:,} bytes.")
    if len(cells) < len(COLUMNS):
        raise DataError(f"{where} has {len(cells)} cells instead of {len(COLUMNS)}: {', '.join(COLUMNS)}.")
    count = int(cells[3])
    if count == 0:
        return PhotoView(torch.zeros(0, 0))
    boxes, features = (np.frombuffer(base64.b64decode(cell, validate=True), "<f4") for cell in cells[4:6])
    if count < 0 or len(boxes) != 4 * count or len(features) % count:
        raise DataError(f"{where} has {count} boxes, but {len(boxes)} box numbers and {len(features)} features.")
    return _objects(features.reshape(count, -1), boxes.reshape(count, 4), (float(cells[1]), float(cells[2])))


def _folder(files: Sequence[Path]) -> Entries:
    for number, path in enumerate(files, 1):
        yield Entry(path.stem, number / len(files), partial(_npz, path))


def _npz(path: Path, role: str) -> PhotoView:
    with path.open("rb") as file:
        if path.stat().st_size > 8 * MAX_NUMBERS:
            raise DataError(f"it has {path.stat().st_size:,} bytes.")
        arrays = np.load(file, allow_pickle=False)  # `info`, a pickle in many of these files, is never touched
        if isinstance(arrays, np.ndarray):
            return _objects(arrays, None, None)
        if sum(part.file_size for part in arrays.zip.infolist()) > 8 * MAX_NUMBERS:
            raise DataError("it unpacks to more than a photo can have.")
        features, boxes, width, height = (
            next((arrays[name] for name in names if name in arrays), None)
            for names in (("x", "feat", "features"), ("bbox", "boxes"), ("image_w", "img_w"), ("image_h", "img_h"))
        )
        if features is None:
            raise DataError(f"no x, feat or features in it; found: {', '.join(arrays)}.")
        size = None if width is None or height is None else (float(width), float(height))
        return _objects(features, boxes, size)


def _hdf5(files: Sequence[Path], read: Callable[[Any, str, str], PhotoView]) -> Entries:
    try:
        import h5py
    except ImportError:
        raise HaavError("HDF5 files are read with h5py, which is not installed.\n  pip install h5py") from None
    try:
        file = h5py.File(files[0], "r")
        keys = list(file)
    except (OSError, RuntimeError) as error:
        raise DataError(f"cannot read {files[0]} as HDF5: {error}.\n  Was it downloaded completely?") from None
    with file:
        for number, key in enumerate(keys, 1):
            yield Entry(key, number / len(keys), partial(read, file, key))


def _child(node: Any, *names: str) -> Any:
    """The first of `names` in an HDF5 group, or an error that says what is there instead"""
    if hasattr(node, "shape"):
        raise DataError(f"no {' or '.join(names)} in {node.name}; found: an array {node.shape}.")
    for name in names:
        if name in node:
            return node[name]
    found = [f"{name} {getattr(node[name], 'shape', '')}".strip() for name in islice(node, 8)]
    raise DataError(f"no {' or '.join(names)} in {node.name}; found: {', '.join(found) or 'nothing'}.")


def _array(dataset: Any) -> np.ndarray:
    size = getattr(dataset, "size", None)
    if size is None or size > MAX_NUMBERS:
        raise DataError(f"{dataset.name} is no array of at most {MAX_NUMBERS:,} elements.")
    return np.asarray(dataset[()])


def _oscar(file: Any, key: str, role: str) -> PhotoView:
    return _objects(_array(_child(file[key], "obj_features", "features")), None, None)


def _grid(file: Any, key: str, role: str) -> PhotoView:
    if getattr(file[key], "ndim", 0) == 1:
        raise DataError(f"it is one vector {file[key].shape}: a file of Xmodal-Ctx, which has no grid.")
    grid = _array(_child(file[key], "grid_features"))
    if grid.ndim != 2:
        raise DataError(f"grid features have the shape {grid.shape} instead of (tokens, width).")
    return PhotoView(_tensor(grid))


def _texts(file: Any, key: str, role: str) -> PhotoView:
    crops, ranks = TEXTS[role]
    group = _child(file[key], role.removeprefix("text_"))
    features = _array(_child(group, "features"))
    features = features[None] if crops == 1 and features.ndim == 2 else features
    if features.ndim != 3 or len(features) != crops:
        raise DataError(f"{group.name}/features has the shape {features.shape} instead of ({crops}, ranks, width).")
    kept, labels = features[:, :ranks], None
    crop, rank = np.indices(kept.shape[:2]).reshape(2, -1)
    if "texts" in group:
        texts = _array(group["texts"]).reshape(features.shape[:2])[:, :ranks]
        labels = tuple(text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in texts.flat)
    indices = {"crop": torch.from_numpy(crop), "rank": torch.from_numpy(rank)}
    return PhotoView(_tensor(kept.reshape(len(crop), -1)), indices, labels=labels)


LAYOUTS: dict[str, Layout] = {
    "bottom_up_tsv": Layout(
        ("objects",),
        f"bottom-up-attention .tsv files or a folder of them: {', '.join(COLUMNS)} (base64 float32)",
        _tsv,
        ("*.tsv", "*.tsv.[0-9]*"),
    ),
    "bottom_up_npz": Layout(
        ("objects",), "a folder of {id}.npz (x, feat or features; bbox) or {id}.npy", _folder, ("*.npz", "*.npy")
    ),
    "oscar_hdf5": Layout(("objects",), "HDF5 with {id}/obj_features (objects, 2054)", partial(_hdf5, read=_oscar)),
    "vis_ctx_hdf5": Layout(("grid",), "HDF5 with {id}/grid_features (tokens, width)", partial(_hdf5, read=_grid)),
    "txt_ctx_hdf5": Layout(
        tuple(TEXTS), "HDF5 with {id}/whole, five and nine, each features and texts", partial(_hdf5, read=_texts)
    ),
}
