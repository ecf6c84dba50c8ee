"""Photos in an Arrow file that is mapped, not read: processes of a machine share its pages.

Columns: id, split, captions (by people), machine_captions, coco_id. `haav dataset FILE --out photos.arrow` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from haav.data.dataset import SPLITS, Columns, Photo, PhotoSequence, Rows
from haav.errors import ConfigError, DataError

ARROW = ".arrow"
FORMAT = {b"haav": b"photos-1"}
"""metadata of a file whose photos all have names of their own"""
BATCH = 1 << 16
"""photos of a record batch; the texts of one have at most 2 GB"""


class MappedPhotos(PhotoSequence):
    """The photos of an Arrow file. A record batch is checked when it is first read."""

    def __init__(self, path: str | Path) -> None:
        self.path = os.path.abspath(path)
        self._state = self._open()

    def _open(self) -> tuple[int, int]:
        arrow = _arrow()
        try:
            status = os.stat(self.path)
            self._reader = arrow.ipc.open_file(arrow.memory_map(self.path))
            metadata = self._reader.schema.metadata or {}
            if not self._reader.schema.equals(_schema(arrow)) or not FORMAT.items() <= metadata.items():
                raise DataError(
                    f"{self.path} is an Arrow file, but not one of photos. Make one with: haav dataset FILE --out "
                    "photos.arrow"
                )
            sizes = [self._batch_size(number) for number in range(self._reader.num_record_batches)]
        except FileNotFoundError:
            raise DataError(f"{self.path} is missing.") from None
        except (OSError, arrow.ArrowException) as error:
            raise self._damaged(error) from None
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self._checked = np.zeros(len(sizes), bool)
        return status.st_size, status.st_mtime_ns

    def _batch_size(self, number: int) -> int:
        return int(self._reader.get_batch(number).num_rows)

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the file itself."""
        return {"path": self.path, "state": self._state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._state = self._open()
        if self._state != state["state"]:
            raise DataError(f"{self.path} was replaced while it was in use.")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: Rows) -> list[Photo]:
        photos: dict[int, Photo] = {}
        for places, part in self._parts(rows):
            lists = (part.column(name).to_pylist() for name in part.schema.names)
            for place, name, split, captions, machine, coco_id in zip(places.tolist(), *lists, strict=True):
                photos[place] = Photo(name, split, tuple(captions), coco_id, tuple(machine))
        return [photos[place] for place in range(len(rows))]

    def ids(self, rows: Rows) -> list[str]:
        names: dict[int, str] = {}
        for places, part in self._parts(rows, ["id"]):
            names |= zip(places.tolist(), part.column("id").to_pylist(), strict=True)
        return [names[place] for place in range(len(rows))]

    def columns(self) -> Columns:
        arrow = _arrow()
        splits = np.zeros(len(self), np.uint8)
        captions, machine = np.zeros(len(self), np.uint32), np.zeros(len(self), np.uint32)
        for number, start in enumerate(self._starts[:-1].tolist()):
            batch = self._batch(number)
            own = slice(start, start + batch.num_rows)
            splits[own] = arrow.compute.index_in(batch.column("split"), arrow.array(SPLITS)).to_numpy(
                zero_copy_only=False
            )
            captions[own] = arrow.compute.list_value_length(batch.column("captions")).to_numpy()
            machine[own] = arrow.compute.list_value_length(batch.column("machine_captions")).to_numpy()
        return Columns(splits, captions, machine)

    def _parts(self, rows: Rows, names: list[str] | None = None) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """For each record batch that has any: the places in `rows`, and these photos"""
        arrow = _arrow()
        rows = rows.astype(np.int64)
        batches = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(batches).tolist():
            places = np.flatnonzero(batches == number)
            batch = self._batch(number)
            if names is not None:
                batch = batch.select(names)
            yield places, batch.take(arrow.array(rows[places] - self._starts[number]))

    def _batch(self, number: int) -> Any:
        arrow = _arrow()
        try:
            batch = self._reader.get_batch(number)
            if not self._checked[number]:
                _check(batch, arrow)
                self._checked[number] = True
            return batch
        except (OSError, ValueError, arrow.ArrowException) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is not a whole file of photos: {error}.\n  Write it again: haav dataset --out")


def write_photos(path: Path, photos: Iterable[Photo]) -> None:
    """Write an Arrow file. The names of the photos must differ."""
    arrow = _arrow()
    schema = _schema(arrow).with_metadata(FORMAT)
    waiting = iter(photos)
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, schema) as writer:
        while part := list(islice(waiting, BATCH)):
            values = zip(*((p.id, p.split, p.captions, p.machine_captions, p.coco_id) for p in part), strict=True)
            try:
                arrays = [arrow.array(list(own), field.type) for own, field in zip(values, schema, strict=True)]
            except (arrow.ArrowException, UnicodeError, OverflowError, TypeError) as error:
                raise DataError(f"a photo among '{part[0].id}' … '{part[-1].id}' cannot be written: {error}.") from None
            writer.write_batch(arrow.record_batch(arrays, schema=schema))


def _check(batch: Any, arrow: Any) -> None:
    """Raise an ArrowException or ValueError if offsets lead nowhere, or texts are none."""
    batch.validate(full=True)
    texts = [batch.column("id"), batch.column("split")]
    texts += [child for name in ("captions", "machine_captions") for child in _list(batch.column(name))]
    if any(text.null_count for text in texts):
        raise ValueError("a text is missing")
    if not arrow.compute.all(arrow.compute.is_in(batch.column("split"), arrow.array(SPLITS))).as_py():
        raise ValueError("a photo has an unknown split")


def _list(column: Any) -> tuple[Any, Any]:
    return column, column.flatten()


def _schema(arrow: Any) -> Any:
    text = arrow.string()
    texts = arrow.list_(arrow.field("item", text))
    columns = {"id": text, "split": text, "captions": texts, "machine_captions": texts, "coco_id": arrow.int64()}
    return arrow.schema(list(columns.items()))


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
    except ImportError:
        raise ConfigError(f'photos in an {ARROW} file need pyarrow.\n  pip install "haav[remote]"') from None
    return pyarrow
