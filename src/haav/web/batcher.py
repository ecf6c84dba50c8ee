"""Batch concurrent requests: one worker thread, and a bounded queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Queue
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
    """Runs `work(items, options)`, which returns one answer per item. Only items with equal options share a batch.

    An item waits from `submit` until its batch begins. The items of the batch in work do not count as waiting.
    """

    def __init__(self, work: Callable[[Sequence[Any], Any], Sequence[Any]], batch: int, waiting: int) -> None:
        """`batch` is the largest batch. `waiting` is the capacity of the queue."""
        self.work, self.batch = work, batch
        self.queue: Queue[_Job | None] = Queue(waiting)
        self.last_seconds = 1.0
        """duration of the last batch"""
        self.started: float | None = None
        """when the batch in work was begun, on the monotonic clock"""
        self.done = self.batches = 0
        """items and batches that were answered since the start; an item whose answer is an exception is not counted"""
        self.thread = threading.Thread(target=self._run, daemon=True, name="captions")
        self.thread.start()

    def submit(self, items: Sequence[Any], options: Hashable, together: bool = True) -> list[Future[Any]]:
        """Raises Busy if they do not all fit into the queue. A job whose answer is cancelled is skipped.

        `together=False` gives each item a batch of its own. Call it from one thread only.
        """
        self.check(len(items))
        jobs = [_Job(item, options, together) for item in items]
        for job in jobs:
            self.queue.put_nowait(job)
        return [job.answer for job in jobs]

    def check(self, items: int = 1) -> None:
        """Raises Busy if they do not fit into the queue. Call it before costly work that precedes `submit`."""
        if self.queue.qsize() + items > self.queue.maxsize:
            batches = -(-self.queue.maxsize // self.batch)
            raise Busy(max(1, round(batches * self.last_seconds)))

    def fault(self, seconds: float) -> str:
        """Why no answers can be expected now, or an empty text. `seconds`: the longest that a batch may take"""
        if not self.thread.is_alive():
            return "the captioning thread has ended."
        started = self.started
        if started is not None and time.monotonic() - started > seconds:
            return f"a batch has been in work for more than {seconds:g} s."
        return "the queue is full." if self.queue.full() else ""

    def close(self) -> None:
        """Finish the queued jobs, then stop the thread."""
        self.queue.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (first := self.queue.get()) is not None:
            jobs = [first]
            while len(jobs) < self.batch and self._next_joins(first) and (job := self.queue.get()):
                jobs.append(job)
            self._answer([job for job in jobs if job.answer.set_running_or_notify_cancel()])

    def _next_joins(self, first: _Job) -> bool:
        """Whether the next job can share the batch of the first one. It stays in the queue, where it is counted."""
        with self.queue.mutex:
            job = self.queue.queue[0] if self.queue.queue else None
        return job is not None and first.together and job.together and job.options == first.options

    def _answer(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        started = self.started = time.monotonic()
        try:
            answers = self.work([job.item for job in jobs], jobs[0].options)
            assert len(answers) == len(jobs)
        except Exception as error:  # any failure must reach the waiting callers
            for job in jobs:
                job.answer.set_exception(error)
        else:
            self.done += sum(not isinstance(answer, Exception) for answer in answers)
            self.batches += 1
            for job, answer in zip(jobs, answers, strict=True):
                job.answer.set_result(answer)
        self.last_seconds, self.started = time.monotonic() - started, None
