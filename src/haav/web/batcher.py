"""Batch concurrent requests: one worker thread, and a bounded queue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class Busy(Exception):
    """The queue is full. `seconds` is the suggested delay before a retry."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {seconds} s.")
        self.seconds = seconds


@dataclass(frozen=True)
class _Job:
    item: Any
    options: Hashable
    answer: Future[Any] = field(default_factory=Future)


class Batcher:
    """Runs `work(items, options)`, which returns one answer per item. Only items with equal options share a batch."""

    def __init__(self, work: Callable[[Sequence[Any], Any], Sequence[Any]], batch: int, waiting: int) -> None:
        """`batch` is the largest batch. `waiting` is the capacity of the queue."""
        self.work, self.batch = work, batch
        self.line: queue.Queue[_Job | None] = queue.Queue(waiting)
        self.took = 1.0
        """duration of the last batch in seconds"""
        self.thread = threading.Thread(target=self._run, daemon=True, name="captions")
        self.thread.start()

    def submit(self, item: Any, options: Hashable) -> Future[Any]:
        """Raises Busy if the queue is full. A job whose answer is cancelled is skipped."""
        job = _Job(item, options)
        try:
            self.line.put_nowait(job)
        except queue.Full:
            raise self._busy() from None
        return job.answer

    def check(self) -> None:
        """Raises Busy if the queue is full. Call it before costly work that precedes `submit`."""
        if self.line.full():
            raise self._busy()

    def _busy(self) -> Busy:
        batches = -(-self.line.maxsize // self.batch)
        return Busy(max(1, round(batches * self.took)))

    def close(self) -> None:
        """Finish the queued jobs, then stop the thread."""
        self.line.put(None)
        self.thread.join()

    def _run(self) -> None:
        kept: _Job | None = None  # has other options; it starts the next batch
        last = False
        while True:
            job = kept or self.line.get()
            kept = None
            if job is None:
                return
            jobs = [job]
            while len(jobs) < self.batch:
                try:
                    following = self.line.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                    break
                if following.options != job.options:
                    kept = following
                    break
                jobs.append(following)
            self._answer([pending for pending in jobs if pending.answer.set_running_or_notify_cancel()])
            if last:
                return

    def _answer(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        started = time.monotonic()
        try:
            answers = self.work([job.item for job in jobs], jobs[0].options)
            assert len(answers) == len(jobs)
        except Exception as error:  # any failure must reach the waiting callers
            for job in jobs:
                job.answer.set_exception(error)
        else:
            for job, answer in zip(jobs, answers, strict=True):
                job.answer.set_result(answer)
        self.took = time.monotonic() - started
