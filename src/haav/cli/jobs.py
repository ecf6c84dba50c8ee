"""Captions and views in parts: from and to addresses, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from haav.cli.common import exit_code, fetch_weights_of
from haav.errors import ConfigError, printable, unknown
from haav.photos.remote import is_remote

if TYPE_CHECKING:
    from haav.inference.captioner import Captioner
    from haav.inference.options import CaptionOptions
    from haav.jobs.job import Job, Summary
    from haav.jobs.source import SourcePart
    from haav.provenance import MadeBy
    from haav.views import ExtractorOptions

ENGINES = ("ray",)


@dataclass(frozen=True)
class JobSettings:
    """Flags of a job, as typed"""

    paths: Sequence[str]
    out: str | None
    out_format: str | None
    engine: str | None
    address: str | None
    workers: int | None
    cores: int
    part: int
    batch: int | None
    device: str
    precision: str | None
    backend: str = "auto"


def is_job(paths: Sequence[str], out: str | None) -> bool:
    """Whether captions go to a folder, an address or Parquet, or to a file from photos at addresses"""
    return out is not None and (is_remote(out) or out.endswith(("/", ".parquet")) or any(map(is_remote, paths)))


def caption_in_parts(
    settings: JobSettings, models: Sequence[str], captioner: Captioner, options: CaptionOptions, quiet: bool
) -> int:
    from haav.inference.caption_file import MadeWith
    from haav.jobs.caption import CaptionJob
    from haav.jobs.shipped_files import ShippedFiles
    from haav.jobs.sinks import sinks
    from haav.jobs.source import find_parts

    if settings.out is None:
        raise ConfigError("captions in parts go to a file, a folder/ or an address: --out")
    _check(settings)
    joined = None if is_remote(settings.out) or settings.out.endswith("/") else Path(settings.out)
    form = settings.out_format or ("parquet" if joined and joined.suffix == ".parquet" else "jsonl")
    if form not in sinks:
        raise ConfigError(unknown("output format", form, sinks))
    if joined and form == "webdataset":
        raise ConfigError("WebDataset stays in parts. Give a folder: --out captions/")
    parts = find_parts(list(map(_whole, settings.paths)), settings.part)
    fetch_weights_of(captioner, options.views, quiet)
    job = CaptionJob(
        tuple(map(ShippedFiles.of_model, models)),
        captioner.config.decode,
        options,
        MadeWith.of(models, options, captioner.config, settings.precision),
        _whole(f"{joined}.parts" if joined else settings.out),
        form,
        settings.batch,
        settings.device,
        settings.precision,
        settings.backend,
    )
    summary = _run(job, parts, settings, quiet)
    if joined and not summary.broken:
        job.join(len(parts), joined)
    return _report(summary, len(parts), settings.out, "captions", quiet)


def extract_in_parts(
    settings: JobSettings, views: Sequence[str], options: ExtractorOptions, made_by: MadeBy, quiet: bool = False
) -> int:
    from haav.jobs.extract import job_of
    from haav.jobs.source import find_parts

    _check(settings)
    assert settings.out is not None
    parts = find_parts(list(map(_whole, settings.paths)), settings.part)
    job = job_of(views, options, made_by, _whole(settings.out), settings.batch)
    summary = _run(job, parts, settings, quiet)
    if not summary.broken:
        job.write_index(len(parts))
    return _report(summary, len(parts), settings.out, "photos extracted", quiet)


def _whole(path: str) -> str:
    """A path that means the same in every folder; addresses as they are"""
    if is_remote(path):
        return path
    return f"@{os.path.abspath(path[1:])}" if path.startswith("@") else os.path.abspath(path)


def _check(settings: JobSettings) -> None:
    if settings.engine not in (None, *ENGINES):
        raise ConfigError(unknown("engine", str(settings.engine), ENGINES))
    for name in ("part", "cores", "workers"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}.")


def _run(job: Job, parts: Sequence[SourcePart], settings: JobSettings, quiet: bool) -> Summary:
    from haav.cli import output
    from haav.jobs.job import in_process, run
    from haav.jobs.ray_engine import ray_engine

    engine = ray_engine(settings.address, settings.workers, settings.cores) if settings.engine else in_process
    with output.progress("parts", quiet) as progress:
        return run(job, parts, engine, progress)


def _report(summary: Summary, parts: int, out: str, what: str, quiet: bool) -> int:
    failed = sum(summary.failures.values())
    if not quiet:
        counts = f"{summary.done:,} {what} in {parts - len(summary.broken):,} parts"
        print(f"{printable(out)}: {counts}, {summary.kept:,} of them kept; {failed} failed.")
    for kind, count in summary.failures.most_common(10):
        print(f"  {count:,} × {printable(kind)}", file=sys.stderr)
    for record in summary.broken[:10]:
        print(f"  part {record.index} ({printable(record.source)}): {printable(record.error)}", file=sys.stderr)
    if summary.broken:
        print(f"  {len(summary.broken)} parts were not written. Run the same again to go on.", file=sys.stderr)
    return exit_code(summary.done, failed + len(summary.broken))
