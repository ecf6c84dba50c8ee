"""Batches side by side.

A caption takes hundreds of small operations. Split over the cores, each of them ends with cores that wait for one
another; a batch to a core waits for nobody (docs/explanation/performance.md).
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

Part = TypeVar("Part")
Result = TypeVar("Result")

MOST = 4
"""more lanes than this would wait for Python instead of for each other; they share the cores"""


def side_by_side(work: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
    """`work` of each part, in order. A few parts are taken ahead, so they may be an endless stream.

    As many lanes as torch has threads, or as there are parts. A part that is alone has all threads.
    """
    waiting = iter(parts)
    first = list(islice(waiting, min(_threads(), MOST)))
    waiting = chain(first, waiting)
    lanes = len(first)
    if lanes < 2:
        yield from map(work, waiting)
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
"""the threads that torch had before lanes took their shares, once for each call that is at work"""


def _threads() -> int:
    with _lock:
        return _before[0] if _before else torch.get_num_threads()


@contextmanager
def _shared_out(lanes: int) -> Iterator[Callable[[], None]]:
    """What each lane calls first. The last call to end gives back: new threads inherit what any thread said last."""
    with _lock:
        _before.append(_before[0] if _before else torch.get_num_threads())
        each, over = divmod(_before[0], lanes)
    shares = iter([each + (lane < over) for lane in range(lanes)])

    def take() -> None:
        torch.get_num_threads()  # a thread's first question sets its number to what was said last, so it comes first
        torch.set_num_threads(next(shares))

    try:
        yield take
    finally:
        with _lock:
            threads = _before.pop()
            if not _before:
                torch.set_num_threads(threads)
