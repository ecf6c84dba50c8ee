"""A file of captions, one line of JSON per photo, that an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from haav.config import Config, changed_settings
from haav.errors import DataError
from haav.files import json_of, write_atomically
from haav.inference.novelty import FILE as NOVELTY
from haav.inference.options import CaptionOptions
from haav.inference.stream import STANDARD_INPUT, CaptionedPhoto, whole_path
from haav.locks import try_lock
from haav.photos.remote import is_remote
from haav.pretrained import CONFIG, VOCABULARY, WEIGHTS, find_model

BEGINNING = b'{"image": '
MAX_LINE = 10_000_000


@dataclass(frozen=True)
class MadeWith:
    """What a caption was made with. Each line of a file records it, and all lines of a file share it."""

    model: str
    """name of the model's folder, for people"""
    fingerprint: str
    """of its files"""
    settings: Mapping[str, Any]
    """those that differ from the defaults of haav"""

    @classmethod
    def of(cls, models: Sequence[str], options: CaptionOptions, config: Config, precision: str | None) -> MadeWith:
        """`config`: that of the captioner; `precision`: as the user gave it"""
        settings: dict[str, Any] = {
            "n_best": options.n_best if options.n_best > 1 else None,
            "views": sorted(options.views) if options.views else None,
            "must": sorted(options.must),
            "never": sorted(options.never),
            "prefix": options.prefix or None,
            "seed": options.seed,
            "precision": precision,
        }
        decode = options.decode(config)
        settings = {name: value for name, value in settings.items() if value not in (None, [])}
        settings |= changed_settings(decode)
        homes = [find_model(model) for model in models]
        return cls("+".join(home.resolve().name for home in homes), "+".join(map(_fingerprint, homes)), settings)


class CaptionFile:
    """Appended to in batches. Photos that have a caption in it are skipped, photos that failed are tried again.

    No other process can write to the file until it is closed.
    """

    def __init__(self, path: str | Path, made_with: MadeWith, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.made_with = asdict(made_with)
        self.done: set[str] = set()
        """photos with a caption in the file; standard input never counts, as its photo may differ"""
        self._stale = overwrite
        """whether what is in the file is to be replaced, as soon as there is a new caption"""
        self._failed: list[bytes] = []
        """lines of photos that failed before the first new caption"""
        self._file = self._open()
        try:
            if overwrite:
                self._check_beginning()
            else:
                self._take_over()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CaptionFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return whole_path(name) in self.done

    def add(self, photos: Sequence[CaptionedPhoto]) -> None:
        try:
            lines = list(map(self._line, photos))
            if self._stale:
                # Failures alone do not replace captions: they wait for the first new one.
                self._failed += lines
                if all(photo.caption is None for photo in photos):
                    return
                self._file.truncate(0)
                self._stale, lines = False, self._failed
            data = memoryview(b"".join(lines))
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}.") from None

    def _line(self, photo: CaptionedPhoto) -> bytes:
        return caption_line(photo, self.made_with)

    def _open(self) -> FileIO:
        """The file, open for appending, and locked"""
        if self.path.exists() and not self.path.is_file():
            raise DataError(f"{self.path} is not a regular file. Print lines of JSON with --json instead.")
        while True:
            try:
                file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # closed by __exit__
            except OSError as error:
                raise DataError(f"cannot write {self.path}: {error.strerror}.") from None
            if not try_lock(file):
                file.close()
                raise DataError(
                    f"another run writes to {self.path}. Wait until it has ended, or name another file with --out."
                )
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                return file
            file.close()  # another run has replaced it in between

    def _take_over(self) -> None:
        """Check every line. Rewrite the file if photos failed or if its last line is incomplete."""
        spoilt = False
        try:
            with open(self.path, "rb") as file:
                for line_number, line in enumerate(_lines(file), 1):
                    row = self._row(line, line_number)
                    if row is None or "error" in row:
                        spoilt = True
                        continue
                    self._check_origin(row.get("made_with"))
                    if row["image"] != STANDARD_INPUT:
                        self.done.add(str(row["image"]))
            if spoilt:
                write_atomically(self.path.resolve(), self._copy_captions)
                replaced, self._file = self._file, self._open()
                replaced.close()
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}.") from None

    def _check_beginning(self) -> None:
        """Only captions are replaced: what begins in another way is somebody's file."""
        with open(self.path, "rb") as file:
            head = file.read(len(BEGINNING))
        if head != BEGINNING[: len(head)]:
            raise DataError(f"{self.path} does not hold captions of haav. Name another file with --out.")

    def _check_origin(self, made_with: Any) -> None:
        known = made_with if isinstance(made_with, dict) else {}
        if any(known.get(key) != self.made_with[key] for key in ("fingerprint", "settings")):
            raise DataError(
                f"{self.path} has captions of another model or of other settings.\n"
                f"  there     {_described(known)}\n  this run  {_described(self.made_with)}\n"
                "  Replace them with --overwrite, or name another file with --out."
            )

    def _copy_captions(self, copy: Path) -> None:
        with open(self.path, "rb") as old, open(copy, "wb") as new:
            for line_number, line in enumerate(_lines(old), 1):
                row = self._row(line, line_number)
                if row is not None and "error" not in row:
                    new.write(line)

    def _row(self, line: bytes, line_number: int) -> dict[str, Any] | None:
        """The row of a line, or None for an incomplete last line of an interrupted run"""
        begun = line.startswith(BEGINNING) or BEGINNING.startswith(line)
        if not line.endswith(b"\n") and begun:
            return None
        try:
            row: dict[str, Any] = json_of(line)
            if "image" not in row or not {"caption", "error"} & row.keys():
                raise ValueError
        except (ValueError, TypeError, AttributeError):
            raise DataError(
                f"{self.path}: line {line_number} is not a caption of haav. Name another file with --out."
            ) from None
        if not line.endswith(b"\n"):
            raise DataError(f"{self.path} does not end as a file of captions does. Name another file with --out.")
        return row


def caption_line(photo: CaptionedPhoto, made_with: Mapping[str, Any]) -> bytes:
    """The line of a photo"""
    name = photo.name if is_remote(photo.name) else whole_path(photo.name)
    # File names need not be valid UTF-8. ASCII escapes preserve all of them.
    return json.dumps(photo.to_json() | {"image": name, "made_with": made_with}).encode() + b"\n"


def _fingerprint(directory: Path) -> str:
    """Of the files of a model directory, but not of its retrieval, whose fingerprint is in its config"""
    digest = hashlib.sha256()
    for name in (CONFIG, VOCABULARY, WEIGHTS, NOVELTY):
        file = directory / name
        digest.update(hashlib.sha256(file.read_bytes() if file.exists() else b"").digest())
    return digest.hexdigest()[:12]


def _described(made_with: Mapping[str, Any]) -> str:
    if "fingerprint" not in made_with:
        return "not recorded: an earlier version of haav wrote it"
    settings = made_with.get("settings")
    texts = [f"{name} {value}" for name, value in settings.items()] if isinstance(settings, dict) else []
    return f"model {made_with.get('model')} ({made_with['fingerprint']}), {', '.join(texts) or 'default settings'}"


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of bounded length, so that a wrong file, with any content, fits into memory"""
    return iter(lambda: file.readline(MAX_LINE), b"")
