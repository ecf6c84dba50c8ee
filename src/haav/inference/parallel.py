"""Run batches in parallel lanes.

A caption takes hundreds of small operations. If each operation is split over the cores, the cores wait for each other
after every operation. With one batch per core they do not wait (docs/explanation/performance.md).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeVar

import torch

from haav.cpu import free_cores

Part = TypeVar("Part")
Result = TypeVar("Result")

MOST = 4
"""maximum number of lanes, which share the cores; more would wait for the Python interpreter"""


def side_by_side(work: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
    """Yield `work(part)` for each part, in order. Only a few parts are read ahead, so `parts` may be endless.

    There are as many lanes as torch has threads, but at most `MOST` and at most one per part. A single part uses as
    many threads as there are free cores.
    """
    waiting = iter(parts)
    first = list(islice(waiting, min(_threads(), MOST)))
    waiting = chain(first, waiting)
    lanes = len(first)
    if lanes < 2:
        for part in waiting:
            with _free_threads():
                result = work(part)
            yield result
        return
    running: deque[Future[Result]] = deque()
    with _shared_out(lanes) as take_share, ThreadPoolExecutor(lanes, "lane", take_share) as pool:
        try:
            running.extend(pool.submit(work, part) for part in islice(waiting, 2 * lanes))
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(work, part) for part in islice(waiting, 1))
        finally:
            for future in running:
                future.cancel()


_lock = threading.Lock()
_before: list[int] = []
"""number of torch threads before lanes took their shares, one entry per active call"""


def _threads() -> int:
    with _lock:
        return _before[0] if _before else torch.get_num_threads()


@contextmanager
def _free_threads() -> Iterator[None]:
    """Use no more threads than there are free cores.

    Threads wait for each other after each operation. One without a core makes all of them wait for its turn.
    """
    with _lock:
        threads = _before[0] if _before else torch.get_num_threads()
        _before.append(threads)
    try:
        torch.set_num_threads(min(threads, free_cores() or threads))
        yield
    finally:
        torch.set_num_threads(threads)
        with _lock:
            _before.pop()


@contextmanager
def _shared_out(lanes: int) -> Iterator[Callable[[], None]]:
    """A function that each lane calls first. The last active call restores the number of threads.

    New threads inherit the number that any thread set last.
    """
    with _lock:
        _before.append(_before[0] if _before else torch.get_num_threads())
        per_lane, over = divmod(_before[0], lanes)
    shares = iter([per_lane + (lane < over) for lane in range(lanes)])

    def take() -> None:
        torch.get_num_threads()  # the first query in a thread resets its number, so query before setting
        torch.set_num_threads(next(shares))

    try:
        yield take
    finally:
        with _lock:
            threads = _before.pop()
            if not _before:
                torch.set_num_threads(threads)
