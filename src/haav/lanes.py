"""Batches side by side.

A caption takes hundreds of small operations. Split over the cores, each of them ends with cores that wait for one
another; a batch to a core waits for nobody, and twice as many captions are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")

MOST = 4
"""more threads than this would wait for Python instead of for each other; they share the cores"""


def side_by_side(work: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
    """`work` of each part, in order. A few parts are taken ahead, so they may be an endless stream.

    As many lanes as torch has threads. A part that is alone has them all.
    """
    threads = torch.get_num_threads()
    lanes = min(threads, MOST)
    waiting = iter(parts)
    first = list(islice(waiting, 2))
    if lanes == 1 or len(first) < 2:
        yield from map(work, chain(first, waiting))
        return
    waiting = chain(first, waiting)
    running: deque[Future[Result]] = deque()
    try:
        with ThreadPoolExecutor(lanes, "lane", torch.set_num_threads, (threads // lanes,)) as pool:
            try:
                running.extend(pool.submit(work, part) for part in islice(waiting, 2 * lanes))
                while running:
                    result = running.popleft().result()
                    running.extend(pool.submit(work, part) for part in islice(waiting, 1))
                    yield result
            finally:
                for future in running:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)  # threads that are born later take over what was said last
