"""Directories that are sent to the workers of a job, which need not share a file system: models, bridges, databases."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from haav.errors import DataError
from haav.pretrained import SHIPPED, find_model

MOST = 4_000_000_000
"""bytes of a directory"""


@dataclass(frozen=True)
class ShippedFiles:
    name: str
    """of a shipped model, which every worker has; else of the directory, for people"""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """path in the directory → content; empty for a shipped model"""

    @classmethod
    def of_model(cls, model: str) -> ShippedFiles:
        home = find_model(model)
        return cls(home.name) if home.resolve().parent == SHIPPED.resolve() else cls.of(home)

    @classmethod
    def of(cls, home: str | Path) -> ShippedFiles:
        root = Path(home)
        paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
        size = sum(path.stat().st_size for path in paths)
        if not paths or size > MOST:
            raise DataError(
                f"{root} has {size:,} bytes in {len(paths)} files; 1 to {MOST:,} bytes are sent to workers."
            )
        return cls(root.resolve().name, {path.relative_to(root).as_posix(): path.read_bytes() for path in paths})

    def place(self) -> str:
        """The name of a shipped model, or the path of a copy on the machine where this is called"""
        if not self.files:
            return self.name
        folder = tempfile.mkdtemp(prefix="haav-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        home = Path(folder) / self.name
        for name, data in self.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return str(home)
