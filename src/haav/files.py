"""Atomic writing and safe reading of files."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from haav.errors import DataError, HaavError

Writer = Callable[[Path], Any]


def write_atomically(path: Path, write: Writer) -> None:
    write_together({path: write})


def write_together(files: Mapping[Path, Writer]) -> None:
    """Write all files to temporary names, flush them to disk, and move them into place only if all succeeded."""
    for path in files:
        check_writable(path)
    staged: dict[Path, Path] = {}
    try:
        for path, write in files.items():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            os.close(handle)
            staged[path] = Path(name)
            write(staged[path])
            with open(name, "rb") as file:
                os.fsync(file.fileno())
            os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        for path, temporary in staged.items():
            os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write {path}: {error}.\n  What was there before is untouched. Make room, then run the same again."
        ) from None
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def read_text(path: Path, most: int, error: type[HaavError] = DataError) -> str:
    """Read a UTF-8 text file, optionally gzipped, of at most `most` bytes. Faults raise an `error` that names it."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise error(f"{path} is missing.") from None
    except (OSError, EOFError, zlib.error) as fault:
        raise error(f"cannot read {path}: {fault}.") from None
    if len(data) > most:
        raise error(f"{path} holds more than {most:,} bytes, the most that is read of such a file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(f"{path} is not text in UTF-8.") from None


def json_of(text: str | bytes) -> Any:
    """`json.loads` that raises ValueError for every fault, including too deep nesting"""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_writable(path: Path) -> None:
    """Check before long work that its result can be written."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file.")
    if not path.parent.is_dir():
        raise DataError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path.parent, os.W_OK):
        raise DataError(f"{path} cannot be written: the folder {path.parent} is read-only.")


def make_folder(path: str | Path) -> Path:
    """Create the folder if it does not exist, and return its path."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {path}: {error.strerror}.") from None
    return Path(path)


def require_files(directory: Path, names: Sequence[str], hint: str) -> None:
    for name in names:
        if not (directory / name).is_file():
            raise DataError(f"{directory / name} is missing.\n  {hint}")
