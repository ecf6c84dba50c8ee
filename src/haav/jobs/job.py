"""Work on photos part by part. Each part is committed by itself, so that an interrupted job goes on where it was.

The folder of a job has `manifest.json` (what the job is), and for each part its output and a record, such as
`part-000012.done`. A part counts when its record is there, which is written last. What a killed worker leaves behind is
written again, with the same content.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from haav.errors import DataError, HaavError, printable
from haav.files import json_of
from haav.jobs.folder import Folder
from haav.jobs.source import SourcePart
from haav.types import Progress, quiet

MANIFEST, FORMAT = "manifest.json", "haav-job-1"
ATTEMPTS = 3
"""of writing a part: a disk may have room again, a network may come back"""


@dataclass(frozen=True)
class PartRecord:
    """What became of a part. It names its input."""

    index: int
    source: str
    photos: int = 0
    done: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """kind of failure → photos"""
    ids: tuple[str, ...] = ()
    """photos of the output, where an index needs them"""
    seconds: float = 0.0
    error: str = ""
    """why the part was not committed; it is tried again by the next run"""


class Output:
    """What a worker reports while it writes a part."""

    def __init__(self) -> None:
        self.photos = self.done = 0
        self.failures: Counter[str] = Counter()
        self.ids: list[str] = []

    def add(self, name: str, error: str | None) -> None:
        self.photos += 1
        if error is None:
            self.done += 1
        else:
            self.failures[kind_of(error, name)] += 1


Writer = Callable[[SourcePart, BinaryIO], Output]
"""Writes the output of a part to a file"""


class Job(ABC):
    """What is done with every part. It is sent to the workers."""

    out: str
    """folder or address"""
    ending: str
    """of the files of parts"""
    device: str

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a run that goes on with the job must share with it, as JSON"""

    @abstractmethod
    def writer(self) -> Writer:
        """Load what is needed. It is called once in each worker process."""

    def file(self, index: int) -> str:
        return f"{_stem(index)}.{self.ending}"


@dataclass
class Summary:
    photos: int = 0
    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    """parts that were committed before"""
    broken: list[PartRecord] = field(default_factory=list)
    """parts that could not be committed"""

    def add(self, record: PartRecord) -> None:
        if record.error:
            self.broken.append(record)
            return
        self.photos += record.photos
        self.done += record.done
        self.failures.update(record.failures)


Engine = Callable[[Job, Iterable[tuple[int, SourcePart]]], Iterator[PartRecord]]


def run(job: Job, parts: Sequence[SourcePart], engine: Engine, progress: Progress = quiet) -> Summary:
    """Work on the parts that are not committed yet. Raises DataError if the folder has another job's output."""
    folder = Folder(job.out)
    folder.create()
    _check_manifest(folder, job, parts)
    there = folder.names()
    summary = Summary()
    todo = []
    for index, part in enumerate(parts):
        if record_name(index) in there:
            summary.kept += 1
            summary.add(read_record(folder, index))
        else:
            todo.append((index, part))
    done = summary.kept
    progress(done, len(parts))
    for record in engine(job, todo) if todo else ():
        summary.add(record)
        done += 1
        progress(done, len(parts))
    return summary


def in_process(job: Job, parts: Iterable[tuple[int, SourcePart]]) -> Iterator[PartRecord]:
    """The engine that needs nothing: one part after the other, in this process"""
    worker = Worker(job)
    return (worker(index, part) for index, part in parts)


class Worker:
    """Works on parts and commits them. Engines have one in each worker process."""

    def __init__(self, job: Job, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.job, self.folder, self.write = job, Folder(job.out), job.writer()

    def __call__(self, index: int, part: SourcePart) -> PartRecord:
        try:
            return self._work(index, part)
        except (HaavError, OSError) as error:
            return PartRecord(index, part.name, error=str(error))

    def _work(self, index: int, part: SourcePart) -> PartRecord:
        started = time.monotonic()
        with tempfile.NamedTemporaryFile(prefix="haav-part-") as file:
            output = self.write(part, file)  # type: ignore[arg-type]
            file.flush()
            counts = (output.photos, output.done, dict(output.failures), tuple(output.ids))
            record = PartRecord(index, part.name, *counts, seconds=time.monotonic() - started)
            self._commit(Path(file.name), record)
        return record

    def _commit(self, file: Path, record: PartRecord) -> None:
        text = json.dumps(asdict(record)).encode()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.folder.write(self.job.file(record.index), file)
                self.folder.write(record_name(record.index), text)
                return
            except (DataError, OSError):
                if attempt == ATTEMPTS:
                    raise
                time.sleep(2**attempt)


def kind_of(error: str, name: str) -> str:
    """The kind of a failure: its message without the name and the numbers of this photo"""
    text = error.replace(name, "it").partition("\n")[0]
    return re.sub(r"\d[\d,.]*", "N", text)[:100]


def _stem(index: int) -> str:
    return f"part-{index:06d}"


def record_name(index: int) -> str:
    return f"{_stem(index)}.done"


def read_record(folder: Folder, index: int) -> PartRecord:
    name = record_name(index)
    try:
        fields = json_of(folder.read(name))
        return PartRecord(**{**fields, "ids": tuple(fields["ids"])})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{printable(folder.place)}/{name} is damaged: {error}. Delete it to repeat the part."
        ) from None


def _check_manifest(folder: Folder, job: Job, parts: Sequence[SourcePart]) -> None:
    """Write the manifest of a new job, or compare it with the one that is there."""
    digest = hashlib.sha256("\n".join(part.to_json() for part in parts).encode()).hexdigest()
    mine = {"format": FORMAT, "job": job.identity(), "parts": len(parts), "source": digest}
    if MANIFEST not in folder.names():
        folder.write(MANIFEST, json.dumps(mine, indent=1).encode())
        return
    try:
        there = json_of(folder.read(MANIFEST))
        differ = [name for name in mine if there[name] != mine[name]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{printable(folder.place)}/{MANIFEST} is damaged: {error}.") from None
    if differ:
        names = {"job": "model, settings or output format", "source": "photos", "parts": "photos"}
        texts = dict.fromkeys(names.get(name, name) for name in differ)
        raise DataError(
            f"{printable(folder.place)} has the output of another job: other {', '.join(texts)}.\n"
            "  Name another folder with --out, or delete this one."
        )
