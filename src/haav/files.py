"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from haav.errors import DataError


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside the place, flush to disk, then move there in one go."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_files(directory: Path, names: Sequence[str], hint: str) -> None:
    for name in names:
        if not (directory / name).is_file():
            raise DataError(f"{directory / name} is missing.\n  {hint}")
