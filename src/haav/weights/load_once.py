"""Loads each network once per process, also if several threads ask for it at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def load_once(load: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for slow loads: concurrent threads wait for a single one."""
    lock, loaded = threading.Lock(), cache(load)

    @wraps(load)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return loaded(*args, **kwargs)  # type: ignore[arg-type]

    return locked
