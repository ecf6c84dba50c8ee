"""One photo at a time, on a quiet and on a busy machine, from Python and from the command line.

Run it on a machine that does nothing else. On the busy one, other processes want every core all the time. Each
measurement is a process of its own, since OpenMP reads its variables once. `python -m benchmarks.busy choices` compares
how long OpenMP's threads spin and how many there are, which takes minutes.
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

CHOSEN = "as haav has it"
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
ROUNDS, STARTS = 3, 5
LOADS = {"quiet": 0, "busy": os.cpu_count() or 1}
"""other processes that want a core all the time"""


def busy() -> dict[str, Any]:
    """As a user has it"""
    results: dict[str, Any] = {"what": "a sample photo to its caption, medians"}
    times: dict[str, dict[str, float]] = {}
    for load, processes in LOADS.items():
        with _hogs(processes):
            python = median(json.loads(_run([sys.executable, "-m", "benchmarks.busy", CHOSEN])))
            command = median(_command() for _ in range(STARTS))
        times[load] = {"from Python, ms": 1000 * python, "from the command line, ms": 1000 * command}
        results |= {f"{load}, {way}": took for way, took in times[load].items()}
    for way, took in times["busy"].items():
        results[f"{way.removesuffix(', ms')}, busy / quiet"] = took / times["quiet"][way]
    return results


def choices() -> dict[str, Any]:
    """What else could be chosen: median and slowest in ms"""
    results: dict[str, Any] = {}
    for load, processes in LOADS.items():
        for spinning, variables in SPINNING.items():
            for threads in THREADS:
                with _hogs(processes):
                    results[f"{load}, {spinning}, {threads} threads"] = _measure(variables, threads)
    return results


def _command() -> float:
    """Seconds of `haav caption`"""
    started = time.perf_counter()
    _run([sys.executable, "-m", "haav", "caption", _samples()[0]])
    return time.perf_counter() - started


def _run(words: list[str], variables: dict[str, str] | None = None) -> bytes:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
    environment = plain | (variables or {})
    return subprocess.run(words, env=environment, capture_output=True, timeout=PATIENCE, check=True).stdout


def _measure(variables: dict[str, str], threads: str) -> str:
    try:
        times = json.loads(_run([sys.executable, "-m", "benchmarks.busy", threads], variables))
    except subprocess.TimeoutExpired:
        return f"– (not done after {PATIENCE:g} s)"
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
    if threads != CHOSEN:
        import torch  # noqa: F401  # before haav, which would set GOMP_SPINCOUNT

    import haav
    from haav.inference import parallel

    if threads in ("one", "all"):
        parallel.free_cores = lambda: 1 if threads == "one" else None
    photos = _samples()
    captioner = haav.load()
    captioner.prepare()
    captioner.caption(photos[0])
    times = []
    for photo in photos * ROUNDS:
        started = time.perf_counter()
        captioner.caption(photo)
        times.append(time.perf_counter() - started)
    return times


def _samples() -> list[str]:
    samples = resources.files("haav").joinpath("samples")
    return sorted(str(file) for file in samples.iterdir() if file.name.endswith(".jpg"))


if __name__ == "__main__":
    if sys.argv[1] == "choices":
        for name, value in choices().items():
            print(f"{name}: {value}")
    else:
        print(json.dumps(caption_times(sys.argv[1])))
