"""One photo at a time, on a quiet and on a busy machine, by how long OpenMP's threads spin and how many there are.

Run it on a machine that does nothing else. On the busy one, other processes want every core all the time. Each
measurement is a process of its own, since OpenMP reads its variables once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from statistics import median
from typing import Any

SPINNING: dict[str, dict[str, str]] = {
    "as torch has it": {},
    "GOMP_SPINCOUNT 10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT 2000": {"GOMP_SPINCOUNT": "2000"},
    "OMP_WAIT_POLICY passive": {"OMP_WAIT_POLICY": "passive"},
}
THREADS = ("all", "one", "free")
"""of a single photo; free: one per core that is free, as haav chooses"""
PATIENCE = 120.0
"""seconds for one measurement"""
ROUNDS = 3


def busy() -> dict[str, Any]:
    found: dict[str, Any] = {"what": "a sample photo to its caption, median and slowest in ms"}
    for load, processes in (("quiet", 0), ("busy", os.cpu_count() or 1)):
        for spinning, variables in SPINNING.items():
            for threads in THREADS:
                with _hogs(processes):
                    found[f"{load}, {spinning}, {threads} threads"] = _measure(variables, threads)
    return found


def _measure(variables: dict[str, str], threads: str) -> str:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
    words = [sys.executable, "-m", "benchmarks.busy", threads]
    try:
        done = subprocess.run(words, env=plain | variables, capture_output=True, timeout=PATIENCE, check=True)
    except subprocess.TimeoutExpired:
        return f"– (not done after {PATIENCE:g} s)"
    times = json.loads(done.stdout)
    return f"{1000 * median(times):.0f}, {1000 * max(times):.0f}"


@contextmanager
def _hogs(count: int) -> Iterator[None]:
    """Processes that want a core all the time"""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def caption_times(threads: str) -> list[float]:
    """Seconds per caption of the sample photos, after a first one"""
    import torch  # noqa: F401  # before haav, which would set GOMP_SPINCOUNT

    import haav
    from haav.inference import parallel

    if threads != "free":
        parallel.free_cores = lambda: 1 if threads == "one" else None
    samples = resources.files("haav").joinpath("samples")
    photos = [str(file) for file in samples.iterdir() if file.name.endswith(".jpg")]
    captioner = haav.load()
    captioner.caption(photos[0])
    times = []
    for photo in photos * ROUNDS:
        started = time.perf_counter()
        captioner.caption(photo)
        times.append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    print(json.dumps(caption_times(sys.argv[1])))
