"""The layouts of common feature files, with one reader per layout."""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from haav.errors import DataError, HaavError
from haav.types import PhotoView

MAX_ROW = 1 << 24
"""bytes per .tsv row; 100 boxes with 2048 features take 1.1 MB"""
MAX_NUMBERS = 1 << 22
"""elements per array of one photo; a larger array is taken as damaged and not allocated"""
MAX_OBJECTS = 50
OBJECT_WIDTH = 2054
"""2048 features, then x1, y1, x2, y2, width, height as fractions of the photo"""
COLUMNS = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
TEXTS = {"text_whole": (1, 64), "text_five": (5, 16), "text_nine": (9, 8)}
"""crops and ranks; the released files hold twice as many ranks, and the released models read the first half"""


class Record(NamedTuple):
    """A record that has been located but not read."""

    id: str
    share: float  # of the source up to and including this record, in 0..1
    load: Callable[[str], PhotoView]  # takes the name of one of the layout's views


Records = Generator[Record, None, None]


class Layout(NamedTuple):
    views: tuple[str, ...]
    holds: str
    entries: Callable[[Sequence[Path]], Records]
    patterns: tuple[str, ...] = ()  # file names in a folder; if empty, the source must be a file


# Objects


def _objects(features: np.ndarray, boxes: np.ndarray | None, size: tuple[float, float] | None) -> PhotoView:
    """(N, 2048) and boxes (N, 4) → the 2054 features of the presets. Without boxes, features stay as they are."""
    if features.ndim != 2:
        raise DataError(f"features have the shape {features.shape} instead of (objects, width).")
    if len(features) == 2048 > features.shape[1]:
        features = features.T  # VQA toolboxes store them transposed
    if features.shape[1] == OBJECT_WIDTH or boxes is None:
        return _real(features, _boxes_inside(features))
    if boxes.shape != (len(features), 4):
        raise DataError(f"boxes have the shape {boxes.shape} instead of ({len(features)}, 4).")
    if boxes.size and boxes.max() > 2:  # pixels: no detector puts all boxes of a photo into its corner
        if size is None or not all(0 < side < np.inf for side in size):
            raise DataError(f"boxes are in pixels, but the photo's size is {size or 'missing (image_w, image_h)'}.")
        boxes = boxes / np.array([*size, *size])
    geometry = np.concatenate([boxes, boxes[:, 2:] - boxes[:, :2]], axis=1)
    return _real(np.concatenate([features, geometry], axis=1, dtype=np.float32), boxes)


def _boxes_inside(features: np.ndarray) -> np.ndarray | None:
    """The boxes within 2054 features. None if the last six are something else, as in some files."""
    if features.shape[1] != OBJECT_WIDTH:
        return None
    low, high, sides = (features[:, start : start + 2].astype(np.float32) for start in (2048, 2050, 2052))
    sound = np.allclose(high - low, sides, atol=0.01) and high.max(initial=0) <= 2
    return np.concatenate([low, high], axis=1) if sound else None


def _real(tokens: np.ndarray, boxes: np.ndarray | None) -> PhotoView:
    """Removes padding. In these files, a row of zeros is padding."""
    rows = np.flatnonzero(tokens.any(axis=1))[:MAX_OBJECTS]
    return PhotoView(_tensor(tokens[rows]), boxes=None if boxes is None else _tensor(boxes[rows]).clamp(0, 1))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))


# Readers


def _tsv(files: Sequence[Path]) -> Records:
    total, before = sum(path.stat().st_size for path in files), 0
    for path in files:
        with path.open("rb") as file:
            for row_number, (line, whole) in enumerate(_lines(file), 1):
                cells = line.rstrip(b"\r\n").split(b"\t")
                if cells[0] != b"image_id" and cells != [b""]:  # a header, an empty line
                    load = partial(_row, cells if whole else None, f"row {row_number} of {path.name}")
                    yield Record(cells[0][:600].decode(errors="backslashreplace"), (before + file.tell()) / total, load)
        before += path.stat().st_size


def _lines(file: BinaryIO) -> Generator[tuple[bytes, bool], None, None]:
    """Lines, and whether each is whole. Of an overlong line, only the first MAX_ROW bytes are kept in memory."""
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


def _folder(files: Sequence[Path]) -> Records:
    for count, path in enumerate(files, 1):
        yield Record(path.stem, count / len(files), partial(_npz, path))


def _npz(path: Path, role: str) -> PhotoView:
    with path.open("rb") as file:
        if path.stat().st_size > 8 * MAX_NUMBERS:
            raise DataError(f"it has {path.stat().st_size:,} bytes.")
        arrays = np.load(file, allow_pickle=False)  # `info`, a pickle in many of these files, is never read
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


def _hdf5(files: Sequence[Path], read: Callable[[Any, str, str], PhotoView]) -> Records:
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
        for count, key in enumerate(keys, 1):
            yield Record(key, count / len(keys), partial(read, file, key))


def _child(node: Any, *names: str) -> Any:
    """The first of `names` in an HDF5 group. The error says what the group holds instead."""
    if hasattr(node, "shape"):
        raise DataError(f"no {' or '.join(names)} in {node.name}; found: an array {node.shape}.")
    for name in names:
        if name in node:
            return node[name]
    children = [f"{name} {getattr(node[name], 'shape', '')}".strip() for name in islice(node, 8)]
    raise DataError(f"no {' or '.join(names)} in {node.name}; found: {', '.join(children) or 'nothing'}.")


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
