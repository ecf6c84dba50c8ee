"""Writes a data set as an Arrow file. Tables are read row by row, so they may be larger than memory."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from haav.data.annotations import checked_rows, load_dataset, parse_json, photo_of
from haav.data.dataset import Photo, ids_of
from haav.data.mapped import ARROW, MappedPhotos, write_photos
from haav.errors import ConfigError, DataError, printable
from haav.files import write_atomically
from haav.store.photo_index import RepeatedName, hash_names, refuse_repeated, repeated


def convert(path: str | Path, out: str | Path, split: str = "train") -> None:
    """Write any data set that `load_dataset` reads as an Arrow file, which it reads without holding it in memory.

    In a table, the rows of a photo must be adjacent. `split`: of photos in formats without splits
    """
    path, out = Path(path), Path(out)
    if out.suffix != ARROW:
        raise ConfigError(f"a data set is written as {ARROW}, and the file is called '{out.name}'.")
    name = path.name.removesuffix(".gz")
    table = name.endswith((".csv", ".jsonl")) and not path.is_dir()
    photos = _stream(path, split) if table else iter(load_dataset(path, split).photos)

    def write(file: Path) -> None:
        hashes = array("Q")
        write_photos(file, _counted(photos, hashes))
        if not hashes:
            raise DataError(f"{path} names no photo. Was it written completely?")
        _check_names(file, hashes, path)

    write_atomically(out, write)


def _counted(photos: Iterable[Photo], hashes: array[int]) -> Iterator[Photo]:
    for photo in photos:
        hashes.frombytes(hash_names([photo.id]).tobytes())
        yield photo


def _check_names(file: Path, hashes: array[int], path: Path) -> None:
    """Eight bytes per photo find names that may be there twice. These are compared."""
    twice = repeated(np.frombuffer(hashes, np.uint64))
    if not len(twice):
        return
    try:
        refuse_repeated(ids_of(MappedPhotos(file)), twice)
    except RepeatedName as error:
        raise DataError(
            f"{path}: the rows of '{printable(error.name)}' are not adjacent.\n  Sort the rows by photo."
        ) from None


def _stream(path: Path, split: str) -> Iterator[Photo]:
    """The photos of a table, one after the other"""
    for _, rows in groupby(checked_rows(_rows(path), path, split), key=lambda row: row.image):
        yield photo_of(list(rows), path)


def _rows(path: Path) -> Iterator[Any]:
    name = path.name.removesuffix(".gz")
    try:
        opened: Any = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
        with io.TextIOWrapper(opened, encoding="utf-8-sig", newline="\n") as lines:
            if name.endswith(".csv"):
                yield from csv.DictReader(lines)
            else:
                yield from (parse_json(line) for line in lines if line.strip())
    except FileNotFoundError:
        raise DataError(f"{path} is missing.") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text in UTF-8.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}.") from None
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{path} is not whole {name.rsplit('.')[-1].upper()}: {error}.") from None
