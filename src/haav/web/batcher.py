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
    together: bool
    answer: Future[Any] = field(default_factory=Future)


class Batcher:
    """Runs `work(items, options)`, which returns one answer per item. Only items with equal options share a batch."""

    def __init__(self, work: Callable[[Sequence[Any], Any], Sequence[Any]], batch: int, waiting: int) -> None:
        """`batch` is the largest batch. `waiting` is the capacity of the queue."""
        self.work, self.batch = work, batch
        self.line: queue.Queue[_Job | None] = queue.Queue(waiting)
        self.took = 1.0
        """duration of the last batch in seconds"""
        self.since: float | None = None
        """when the batch in work was begun, on the monotonic clock"""
        self.done = self.batches = 0
        """items and batches with an answer since the start"""
        self.thread = threading.Thread(target=self._run, daemon=True, name="captions")
        self.thread.start()

    def submit(self, items: Sequence[Any], options: Hashable, together: bool = True) -> list[Future[Any]]:
        """Raises Busy if they do not all fit into the queue. A job whose answer is cancelled is skipped.

        `together=False` gives each item a batch of its own. Call it from one thread only.
        """
        self.check(len(items))
        jobs = [_Job(item, options, together) for item in items]
        for job in jobs:
            self.line.put_nowait(job)
        return [job.answer for job in jobs]

    def check(self, items: int = 1) -> None:
        """Raises Busy if they do not fit into the queue. Call it before costly work that precedes `submit`."""
        if self.line.qsize() + items > self.line.maxsize:
            raise self._busy()

    def fault(self, seconds: float) -> str:
        """Why no answers can be expected now, or an empty text. `seconds`: the longest that a batch may take"""
        if not self.thread.is_alive():
            return "the captioning thread has ended."
        since = self.since
        if since is not None and time.monotonic() - since > seconds:
            return f"a batch has been in work for more than {seconds:g} s."
        return "the queue is full." if self.line.full() else ""

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
            while job.together and len(jobs) < self.batch:
                try:
                    following = self.line.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                    break
                if not following.together or following.options != job.options:
                    kept = following
                    break
                jobs.append(following)
            self._answer([pending for pending in jobs if pending.answer.set_running_or_notify_cancel()])
            if last:
                return

    def _answer(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        started = self.since = time.monotonic()
        try:
            answers = self.work([job.item for job in jobs], jobs[0].options)
            assert len(answers) == len(jobs)
        except Exception as error:  # any failure must reach the waiting callers
            for job in jobs:
                job.answer.set_exception(error)
        else:
            self.done, self.batches = self.done + len(jobs), self.batches + 1
            for job, answer in zip(jobs, answers, strict=True):
                job.answer.set_result(answer)
        self.took, self.since = time.monotonic() - started, None
