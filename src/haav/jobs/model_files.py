"""A model that is sent to the workers of a job, which need not share a file system."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from haav.errors import DataError
from haav.pretrained import SHIPPED, find_model

MOST = 4_000_000_000
"""bytes of a model's files"""


@dataclass(frozen=True)
class ModelFiles:
    name: str
    """of a shipped model, which every worker has; else for people"""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """path in the model directory → content; empty for a shipped model"""

    @classmethod
    def of(cls, model: str) -> ModelFiles:
        home = find_model(model)
        if home.resolve().parent == SHIPPED.resolve():
            return cls(home.name)
        paths = [path for path in sorted(home.rglob("*")) if path.is_file()]
        size = sum(path.stat().st_size for path in paths)
        if size > MOST:
            raise DataError(f"{home} has {size:,} bytes; models of at most {MOST:,} are sent to workers.")
        return cls(home.name, {path.relative_to(home).as_posix(): path.read_bytes() for path in paths})

    def directory(self) -> str:
        """What `Captioner.from_pretrained` takes, on the machine where this is called"""
        if not self.files:
            return self.name
        home = Path(tempfile.mkdtemp(prefix="haav-model-")) / self.name
        for name, data in self.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return str(home)
