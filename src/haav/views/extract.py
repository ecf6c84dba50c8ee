"""Extracts views of photos into a store, in batches and in several processes. It can be resumed at any time.

Each worker computes and commits its own batches, with one transaction per view. The parent process distributes work,
counts photos and writes `failures.jsonl`. Running the same command again extracts what is missing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from haav.errors import HaavError, StoreError
from haav.files import write_atomically
from haav.photos.images import load_image
from haav.photos.sources import PhotoRef
from haav.provenance import MadeBy, check_made_by
from haav.store import Store, ViewManifest
from haav.types import PhotoView, Progress, quiet
from haav.views import Extractor, ExtractorOptions, PhotoBatch, build_extractor
from haav.views.batch_size import fitting_batch

FAILURES = "failures.jsonl"


@dataclass(frozen=True)
class Failure:
    image: str
    views: tuple[str, ...]
    error: str


@dataclass
class Summary:
    photos: int = 0
    """newly extracted"""
    skipped: int = 0
    """already in the store"""
    failures: list[Failure] = field(default_factory=list)


def extract(
    refs: Sequence[PhotoRef],
    store_path: str | Path,
    views: Sequence[str],
    options: ExtractorOptions | None = None,
    workers: int | None = None,
    batch: int | None = None,
    progress: Progress = quiet,
    made_by: MadeBy | None = None,
) -> Summary:
    """Puts the views of the photos into the store. Existing records are not changed.

    `made_by`: the extractors accepted by the model that will read the views
    """
    options = options or ExtractorOptions()
    with Store(store_path, write=True) as store:
        stored = {name: manifest.made_by for name, manifest in store.views.items()}
        for name in views:
            extractor = build_extractor(name, options)
            check_made_by(made_by or {}, {name: extractor.origin}, "the one to be extracted")
            known = {other: stored[other] for other in extractor.reads if other in stored}
            check_made_by(extractor.reads, known, f"that of {store_path}", "the bridge")
            origin = extractor.origin if extractor.origin != extractor.fingerprint else ""
            licence = extractor.licence
            store.add_view(name, ViewManifest(extractor.spec, extractor.fingerprint, licence, origin=origin))
        by_id = {ref.id: ref for ref in refs}
        missing = {name: set(store.missing(name, by_id)) for name in views}
    jobs = [
        (ref, tuple(name for name in views if ref.id in missing[name]))
        for ref in refs
        if any(ref.id in photos for photos in missing.values())
    ]
    summary = Summary(skipped=len(refs) - len(jobs))
    size = batch or fitting_batch(options.device)
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    count = min(workers or os.cpu_count() or 1, len(batches))
    progress(0, len(jobs))
    results = (
        _in_process(batches, store_path, options) if count <= 1 else _in_workers(batches, store_path, options, count)
    )
    processed = 0
    for done, failures in results:
        processed += done
        summary.failures += failures
        progress(processed, len(jobs))
    summary.photos = processed - len({failure.image for failure in summary.failures})
    _write_failures(Path(store_path) / FAILURES, summary.failures)
    return summary


Job = tuple[PhotoRef, tuple[str, ...]]
Result = tuple[int, list[Failure]]


def _in_process(batches: list[list[Job]], store_path: str | Path, options: ExtractorOptions) -> Iterator[Result]:
    with Store(store_path, write=True) as store:
        work = _Worker(store, options)
        for batch in batches:
            yield len(batch), work(batch)


def _in_workers(
    batches: list[list[Job]], store_path: str | Path, options: ExtractorOptions, count: int
) -> Iterator[Result]:
    """Distributes batches over `count` processes. A worker that dies is an error. Its commits are kept."""
    context = multiprocessing.get_context("spawn")
    jobs: Any = context.Queue(maxsize=4 * count)
    results: Any = context.Queue()
    workers = [
        context.Process(target=_worker_main, args=(jobs, results, str(store_path), options), daemon=True)
        for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    waiting, handed_out, returned = iter(batches), 0, 0
    try:
        while returned < len(batches):
            while handed_out < min(len(batches), returned + 3 * count):
                jobs.put(next(waiting))
                handed_out += 1
            try:
                result = results.get(timeout=1)
            except queue.Empty:
                _check_alive(workers)
                continue
            if isinstance(result, str):
                raise StoreError(result)
            returned += 1
            yield result
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        for channel in (jobs, results):
            channel.cancel_join_thread()
            channel.close()


def _check_alive(workers: Sequence[Any]) -> None:
    for worker in workers:
        if not worker.is_alive():
            raise StoreError(
                f"a worker ended with code {worker.exitcode}; out of memory?\n"
                "  What was committed is safe. Run the same command again, perhaps with fewer --workers."
            )


def _worker_main(jobs: Any, results: Any, store_path: str, options: ExtractorOptions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = os.getppid()
    torch.set_num_threads(1)
    with Store(store_path, write=True) as store:
        work = _Worker(store, options)
        while True:
            try:
                batch = jobs.get(timeout=5)
            except queue.Empty:
                if os.getppid() != parent:
                    return  # the parent was killed
                continue
            try:
                results.put((len(batch), work(batch)))
            except HaavError as error:
                results.put(str(error))
                return


class _Worker:
    def __init__(self, store: Store, options: ExtractorOptions) -> None:
        self.store = store
        self.options = options
        self.extractors: dict[str, Extractor] = {}

    def __call__(self, batch: list[Job]) -> list[Failure]:
        """Extracts and commits one batch. Returns the photos that failed; the others are committed."""
        failures: list[Failure] = []
        records: dict[str, dict[str, PhotoView]] = {}
        for views in sorted({views for _, views in batch}):
            refs = [ref for ref, wanted in batch if wanted == views]
            photos, failed = self._photos(refs, [self._extractor(view) for view in views])
            failures += [Failure(ref.id, views, error) for ref, error in failed]
            for view in views if len(photos) else ():
                extracted = records.setdefault(view, {})
                try:
                    extracted.update(self._extract(view, photos))
                except Exception:  # at least one photo of the batch fails: extract them one by one
                    for photo in photos.apart():
                        try:
                            extracted.update(self._extract(view, photo))
                        except Exception as error:
                            failures.append(Failure(photo.ids[0], (view,), f"{type(error).__name__}: {error}"))
        for view, extracted in records.items():
            self.store.put(view, extracted)
        return failures

    def _extract(self, view: str, photos: PhotoBatch) -> dict[str, PhotoView]:
        return dict(zip(photos.ids, photos.view(self._extractor(view)), strict=True))

    def _photos(
        self, refs: list[PhotoRef], extractors: Sequence[Extractor]
    ) -> tuple[PhotoBatch, list[tuple[PhotoRef, str]]]:
        """Reads stored views if all extractors can use them. Otherwise opens the pictures."""
        ids = [ref.id for ref in refs]
        if all(extractor.reads for extractor in extractors):
            wanted = dict.fromkeys(view for extractor in extractors for view in extractor.reads)
            with suppress(StoreError):
                return PhotoBatch(ids, None, **{view: self.store.get_many(view, ids) for view in wanted}), []
        images, failed = {}, []
        for ref in refs:
            try:
                images[ref.id] = load_image(ref.read())
            except HaavError as error:
                failed.append((ref, str(error)))
        return PhotoBatch(tuple(images), list(images.values())), failed

    def _extractor(self, view: str) -> Extractor:
        if view not in self.extractors:
            self.extractors[view] = build_extractor(view, self.options)
        return self.extractors[view]


def _write_failures(path: Path, failures: Sequence[Failure]) -> None:
    """Writes the failures of this run. Removes the file if there are none."""
    if not failures:
        path.unlink(missing_ok=True)
        return
    text = "".join(json.dumps(asdict(failure), ensure_ascii=False) + "\n" for failure in failures)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
