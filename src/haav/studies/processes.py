"""Trainings in processes of their own: started, some at once, timed over all their sessions, and stopped with the
command."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from haav.files import write_atomically

Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """The trainings that run now. Once they are stopped, no other begins."""

    def __init__(self, workers: int) -> None:
        self.workers = max(1, workers)
        self.environment = _environment(self.workers)
        self.stopped = False
        self._ids: set[int] = set()
        self._lock = threading.Lock()

    def work_through(
        self,
        items: Iterable[Item],
        work: Callable[[Item], Result],
        following: Callable[[Item, Result], Sequence[Item]],
    ) -> None:
        """Work on as many items at once as there are workers. What follows from an item comes before the other items.

        An error stops no other item. The first one is raised when all others are done.
        """
        waiting = deque(items)
        running: dict[Future[Result], Item] = {}
        errors: list[BaseException] = []
        with ThreadPoolExecutor(self.workers) as executor:
            try:
                while waiting or running:
                    while waiting and len(running) < self.workers:
                        item = waiting.popleft()
                        running[executor.submit(work, item)] = item
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        item, error = running.pop(future), future.exception()
                        if error is None:
                            waiting.extendleft(reversed(following(item, future.result())))
                        else:
                            errors.append(error)
            except KeyboardInterrupt:
                self.stop()  # else the executor would wait for trainings
                raise
        if errors:
            raise errors[0]

    def run(self, command: Sequence[str], log: IO[bytes]) -> tuple[int, float]:
        """The exit code of a command, and its peak memory in GB"""
        with self._lock:
            if self.stopped:
                return 130, 0.0
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
            self._ids.add(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        with self._lock:
            self._ids.remove(process.pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_maxrss / 2**20

    def stop(self) -> None:
        """Each saves a checkpoint and ends, so that the grid can resume it."""
        with self._lock:
            self.stopped = True
            for process in self._ids:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is like Ctrl-C. By default it would end this process only, and leave its trainings behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


class Clock:
    """Minutes of a run over all its sessions. One that was killed counts up to its last checkpoint."""

    def __init__(self, place: Path) -> None:
        self.file = place.with_suffix(".time")
        self.minutes = 0.0
        if self.file.exists():
            spent, started = float(self.file.read_text(encoding="utf-8")), self.file.stat().st_mtime
            checkpoints = [file.stat().st_mtime for file in place.rglob("checkpoint.safetensors")]
            self.minutes = spent + max(0.0, max(checkpoints, default=0.0) - started) / 60

    def __enter__(self) -> Clock:
        self.started, text = time.monotonic(), str(self.minutes)
        write_atomically(self.file, lambda file: file.write_text(text, encoding="utf-8"))
        return self

    def __exit__(self, *_: object) -> None:
        self.minutes += (time.monotonic() - self.started) / 60


def _environment(workers: int) -> dict[str, str]:
    """Environment of a run. Parallel runs divide the cores among themselves."""
    if workers == 1:
        return dict(os.environ)
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
