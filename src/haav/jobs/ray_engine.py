"""Work on the parts of a job on a Ray cluster. Ray Data hands parts to workers, and again if a worker or node dies."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from haav.errors import ConfigError
from haav.jobs.job import Engine, Job, PartRecord, Worker
from haav.jobs.source import SourcePart

PASSED_ON = ("AWS_", "FSSPEC_", "GOOGLE_", "HF_", "HAAV_")
"""beginnings of the environment variables that workers get from the driver: where photos are, and keys to them"""


def ray_engine(address: str | None = None, workers: int | None = None, cores: int = 1) -> Engine:
    """`address`: of a running cluster, or "auto"; None starts one on this machine. `workers`: default as many as fit.
    `cores`: of each worker"""

    def run(job: Job, parts: Iterable[tuple[int, SourcePart]]) -> Iterator[PartRecord]:
        ray = _ray()
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        started = not ray.is_initialized()
        if started:
            settings = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
            ray.init(address, log_to_driver=False, logging_level="error", runtime_env={"env_vars": settings})
        try:
            yield from _run(ray, job, list(parts), workers, cores)
        finally:
            if started:
                ray.shutdown()

    return run


def _run(
    ray: Any, job: Job, parts: list[tuple[int, SourcePart]], workers: int | None, cores: int
) -> Iterator[PartRecord]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.enable_operator_progress_bars = False
    gpus = 1 if job.device.startswith("cuda") else 0
    sizes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    fit = sum(size // cores for size in sizes)
    if fit < 1:  # Ray would wait for ever
        raise ConfigError(f"no node has {cores} cores; the largest has {max(sizes)}. Give fewer with --cores.")
    count = min(workers or fit, fit, len(parts))
    # The rows are in the object store when the workers start, so that no reading task needs a core of its own.
    rows = ray.data.from_items(
        [{"index": index, "part": part.to_json()} for index, part in parts], override_num_blocks=len(parts)
    )
    done = rows.map_batches(
        _RayWorker,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=count),
        num_cpus=cores,
        num_gpus=gpus,
        fn_constructor_args=(job, cores),
    )
    for row in done.iter_rows():
        yield PartRecord(**json.loads(row["record"]))


class _RayWorker:
    """A worker in a process of Ray. A batch is one part."""

    def __init__(self, job: Job, cores: int) -> None:
        self.worker = Worker(job, cores)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        part = SourcePart.from_json(str(batch["part"][0]))
        record = asdict(self.worker(int(batch["index"][0]), part))
        return {"record": [json.dumps({**record, "ids": ()})]}  # ids stay in the record of the part, on disk


def _ray() -> Any:
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it is read when Ray is imported
    try:
        import ray
        import ray.data
    except ImportError:
        raise ConfigError('--engine ray needs Ray.\n  pip install "haav[ray]"') from None
    return ray
