"""Caption photos part by part. Each part is committed by itself, so that an interrupted job goes on where it was.

The folder of a job has `manifest.json` (model, settings, source), and for each part its captions and a record,
`part-000012.done`. A part counts when its record is there, which is written last. What a killed worker leaves behind is
written again, with the same content.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from haav.config import DecodeConfig
from haav.errors import DataError, HaavError, printable
from haav.files import json_of, write_atomically
from haav.inference.caption_file import MadeWith
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.jobs.folder import Folder
from haav.jobs.model_files import ModelFiles
from haav.jobs.sinks import sinks
from haav.jobs.source import SourcePart
from haav.types import Progress, quiet

MANIFEST, FORMAT = "manifest.json", "haav-captions-1"
ATTEMPTS = 3
"""of writing a part: a disk may have room again, a network may come back"""


@dataclass(frozen=True)
class CaptionJob:
    """What every part of a job is captioned with. It is sent to the workers."""

    models: tuple[ModelFiles, ...]
    decode: DecodeConfig
    options: CaptionOptions
    made_with: MadeWith
    out: str
    """folder or address"""
    format: str = "jsonl"
    batch: int = 8
    device: str = "cpu"
    precision: str | None = None

    def file(self, index: int) -> str:
        return f"{_stem(index)}.{sinks.get(self.format).ending}"


@dataclass(frozen=True)
class PartRecord:
    """What became of a part. It names its input."""

    index: int
    source: str
    photos: int = 0
    captions: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """kind of failure → photos"""
    seconds: float = 0.0
    error: str = ""
    """why the part was not committed; it is tried again by the next run"""


@dataclass
class Summary:
    photos: int = 0
    captions: int = 0
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
        self.captions += record.captions
        self.failures.update(record.failures)


Engine = Callable[[CaptionJob, Iterable[tuple[int, SourcePart]]], Iterator[PartRecord]]


def run(job: CaptionJob, parts: Sequence[SourcePart], engine: Engine, progress: Progress = quiet) -> Summary:
    """Caption the parts that are not committed yet. Raises DataError if the folder has another job's output."""
    folder = Folder(job.out)
    folder.create()
    _check_manifest(folder, job, parts)
    there = folder.names()
    summary = Summary()
    todo = []
    for index, part in enumerate(parts):
        if f"{_stem(index)}.done" in there:
            summary.kept += 1
            summary.add(_read_record(folder, index))
        else:
            todo.append((index, part))
    done = summary.kept
    progress(done, len(parts))
    for record in engine(job, todo) if todo else ():
        summary.add(record)
        done += 1
        progress(done, len(parts))
    return summary


def in_process(job: CaptionJob, parts: Iterable[tuple[int, SourcePart]]) -> Iterator[PartRecord]:
    """The engine that needs nothing: one part after the other, in this process"""
    worker = Worker(job)
    return (worker(index, part) for index, part in parts)


class Worker:
    """A captioner that captions parts. Engines have one for each worker process."""

    def __init__(self, job: CaptionJob, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.job, self.folder = job, Folder(job.out)
        models = [Captioner.from_pretrained(model.directory(), job.device, job.precision) for model in job.models]
        captioner = Captioner.ensemble(models)
        self.captioner = captioner.with_config(replace(captioner.config, decode=job.decode))

    def __call__(self, index: int, part: SourcePart) -> PartRecord:
        started = time.monotonic()
        try:
            record = self._caption(index, part)
        except (HaavError, OSError) as error:
            return PartRecord(index, part.name, seconds=time.monotonic() - started, error=str(error))
        return replace(record, seconds=time.monotonic() - started)

    def _caption(self, index: int, part: SourcePart) -> PartRecord:
        job, failures, captions, photos = self.job, Counter[str](), 0, 0
        with tempfile.NamedTemporaryFile(prefix="haav-part-") as file:
            sink = sinks.get(job.format)(file, asdict(job.made_with))  # type: ignore[arg-type]
            for photo in self.captioner.stream(part.items(), job.options, job.batch):
                sink.add(photo)
                photos += 1
                captions += photo.caption is not None
                if photo.error is not None:
                    failures[kind_of(str(photo.error), photo.name)] += 1
            sink.close()
            file.flush()
            record = PartRecord(index, part.name, photos, captions, dict(failures))
            self._commit(job.file(index), Path(file.name), record)
        return record

    def _commit(self, name: str, file: Path, record: PartRecord) -> None:
        text = json.dumps(asdict(record)).encode()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.folder.write(name, file)
                self.folder.write(f"{_stem(record.index)}.done", text)
                return
            except (DataError, OSError):
                if attempt == ATTEMPTS:
                    raise
                time.sleep(2**attempt)


def join(job: CaptionJob, parts: int, out: Path) -> None:
    """Put all parts together into one file, in the order of the source."""
    folder = Folder(job.out)
    names = [job.file(index) for index in range(parts)]
    write_atomically(out, lambda file: sinks.get(job.format).join(folder, names, file))


def kind_of(error: str, name: str) -> str:
    """The kind of a failure: its message without the name and the numbers of this photo"""
    text = error.replace(name, "it").partition("\n")[0]
    return re.sub(r"\d[\d,.]*", "N", text)[:100]


def _stem(index: int) -> str:
    return f"part-{index:06d}"


def _read_record(folder: Folder, index: int) -> PartRecord:
    name = f"{_stem(index)}.done"
    try:
        return PartRecord(**json_of(folder.read(name)))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{printable(folder.place)}/{name} is damaged: {error}. Delete it to repeat the part."
        ) from None


def _check_manifest(folder: Folder, job: CaptionJob, parts: Sequence[SourcePart]) -> None:
    """Write the manifest of a new job, or compare it with the one that is there."""
    digest = hashlib.sha256("\n".join(part.to_json() for part in parts).encode()).hexdigest()
    made_with = asdict(job.made_with)
    mine = {"format": FORMAT, "output": job.format, "made_with": made_with, "parts": len(parts), "source": digest}
    if MANIFEST not in folder.names():
        folder.write(MANIFEST, json.dumps(mine, indent=1).encode())
        return
    try:
        there = json_of(folder.read(MANIFEST))
        differ = [name for name in mine if there[name] != mine[name]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{printable(folder.place)}/{MANIFEST} is damaged: {error}.") from None
    if differ:
        names = {"made_with": "model or settings", "source": "photos", "output": "output format", "parts": "photos"}
        texts = dict.fromkeys(names.get(name, name) for name in differ)
        raise DataError(
            f"{printable(folder.place)} has the output of another job: other {', '.join(texts)}.\n"
            "  Name another folder with --out, or delete this one."
        )
