"""A job on many workers, simulated from what two workers measured: reader, workers, stragglers, failures, driver.

python -m benchmarks.cluster speed PHOTOS.tar --count 1000 --json speed.json
python -m benchmarks.simulate speed.json

The simulation is checked against the measured runs, then extrapolated. What is assumed stands in `Assumed`.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Costs:
    part: Sequence[float]
    """seconds of parts, measured; each part draws one of them"""
    start: float
    """seconds from the command to the first part in work, measured"""
    driver: float
    """seconds of the driver per part, which handles one after the other, measured"""


@dataclass(frozen=True)
class Assumed:
    slow: float = 0.0
    """share of workers that are slow"""
    slower: float = 3.0
    """how many times as long a slow worker takes"""
    hours_to_failure: float = 0.0
    """mean of a worker; 0: none fails"""
    replace: float = 60.0
    """seconds until a failed worker is replaced and has loaded its model"""


def simulate(costs: Costs, assumed: Assumed, workers: int, parts: int, seed: int = 0) -> float:
    """Seconds of a job. A worker takes the next part when the driver has heard of its last one."""
    draw = random.Random(seed)
    pace = [assumed.slower if draw.random() < assumed.slow else 1.0 for _ in range(workers)]
    fails = [_life(assumed, draw) for _ in range(workers)]
    events = [(costs.start, "free", worker) for worker in range(workers)]
    idle: list[int] = []
    waiting, left, driver = parts, parts, 0.0
    while left:
        now, event, worker = heapq.heappop(events)
        if event == "free" and not waiting:
            idle.append(worker)
        elif event == "free":
            waiting -= 1
            finish = now + pace[worker] * draw.choice(costs.part)
            lost = finish > fails[worker]
            heapq.heappush(events, (max(now, fails[worker]) if lost else finish, "lost" if lost else "done", worker))
        elif event == "done":
            driver = max(driver, now) + costs.driver
            left -= 1
            heapq.heappush(events, (driver, "free", worker))
        else:  # another worker, or the replacement of this one, repeats the part
            waiting += 1
            if idle:
                heapq.heappush(events, (now, "free", idle.pop()))
            fails[worker] = now + assumed.replace + _life(assumed, draw)
            heapq.heappush(events, (now + assumed.replace, "free", worker))
    return driver


def _life(assumed: Assumed, draw: random.Random) -> float:
    return draw.expovariate(1 / (3600 * assumed.hours_to_failure)) if assumed.hours_to_failure else float("inf")


def driver_seconds(rows: int = 1000) -> float:
    """Of Ray Data per part that costs nothing, on a cluster of this machine"""
    import ray

    class Nothing:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"index": batch["index"]}

    ray.init(num_cpus=2, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    items = ray.data.from_items([{"index": index} for index in range(rows)], override_num_blocks=rows)
    done = items.map_batches(Nothing, batch_size=1, compute=ray.data.ActorPoolStrategy(size=2), num_cpus=1)
    times = [time.monotonic() for _ in done.iter_rows()]
    ray.shutdown()
    middle = times[rows // 5 : -rows // 5]
    return (middle[-1] - middle[0]) / (len(middle) - 1)


def main(file: str) -> None:
    measured = json.loads(Path(file).read_text())
    runs = {int(workers): run for workers, run in measured["runs"].items()}
    driver = driver_seconds()
    print(f"driver: {1000 * driver:.1f} ms per part")
    photos, one = measured["photos"], runs[1]
    begun, seconds = one["begun"]  # so many parts were done after so many seconds
    costs = Costs(one["parts"], seconds - begun * sum(one["parts"]) / len(one["parts"]), driver)
    print(f"start: {costs.start:.1f} s")
    for workers, run in runs.items():
        guess = simulate(costs, Assumed(), workers, len(run["parts"]))
        error = guess / run["seconds"] - 1
        print(f"{workers} worker(s): measured {run['seconds']:.0f} s, simulated {guess:.0f} s ({100 * error:+.1f} %)")
    rough = Assumed(slow=0.02, hours_to_failure=100)
    per_part = sum(costs.part) / len(costs.part)
    print(f"a part: {photos} photos, {per_part:.1f} s; assumed: {rough}")
    for size in (photos, 20 * photos):
        scaled = replace(costs, part=[seconds * size / photos for seconds in costs.part])
        for workers in (10, 100, 1_000, 10_000):
            parts = 20 * workers
            seconds = simulate(scaled, rough, workers, parts)
            ideal = parts * per_part * size / photos / workers
            share = 100 * ideal / seconds
            print(
                f"parts of {size}, {workers:,} workers: {parts * size / seconds:,.0f} photos/s, {share:.0f} % of ideal"
            )


if __name__ == "__main__":
    main(sys.argv[1])
