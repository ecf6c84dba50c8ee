"""Captions in parts on a Ray cluster of two nodes on this machine, which are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from haav.cli.main import main
from haav.store import open_store
from helpers import write_tar

pytestmark = pytest.mark.slow
SHARDS, PHOTOS = 24, 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a core each. `cluster.worker` is the one without the head."""
    pytest.importorskip("ray", reason="needs the ray extra")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.worker = cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for index in range(SHARDS):
        write_tar(folder / f"{index:03d}.tar", PHOTOS, PHOTOS * index)
    return folder


def start(cluster: Any, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "haav", "caption", *words, "--engine", "ray", "--address", cluster.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_parts(folder: Path, count: int, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while len(list(folder.glob("*.done"))) < count:
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def finish(job: subprocess.Popen[str]) -> str:
    out, errors = job.communicate(timeout=400)
    assert job.returncode == 0, errors
    return out


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_killed_nodes_and_drivers_lose_nothing_and_repeat_nothing(
    cluster: Any, photos: Path, model: Path, tmp_path: Path
) -> None:
    assert main(["caption", str(photos), "--model", str(model), "--out", f"{tmp_path}/one.jsonl", "--quiet"]) == 0
    expected = rows_of(tmp_path / "one.jsonl")
    out, parts = tmp_path / "captions.jsonl", tmp_path / "captions.jsonl.parts"
    command = (str(photos), "--model", str(model), "--out", str(out))

    first = start(cluster, *command)
    wait_for_parts(parts, 4, first)
    cluster.worker.kill_raylet()  # SIGKILL
    cluster.worker = cluster.add_node(num_cpus=1)
    wait_for_parts(parts, 9, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not out.exists()
    kept = len(list(parts.glob("*.done")))
    assert 9 <= kept < SHARDS

    assert f"{SHARDS * PHOTOS} captions in {SHARDS} parts, {kept} of them kept; 0 failed." in finish(
        start(cluster, *command)
    )
    assert rows_of(out) == expected, "each photo once, in the order of the source, token for token"


def test_workers_that_fit_no_node_are_refused_at_once(cluster: Any, photos: Path, model: Path, tmp_path: Path) -> None:
    job = start(cluster, str(photos), "--model", str(model), "--out", f"{tmp_path}/x/", "--cores", "2")
    _, errors = job.communicate(timeout=100)
    assert "no node has 2 cores; the largest has 1." in errors


def test_two_nodes_share_the_work_from_a_bucket(
    cluster: Any, photos: Path, model: Path, s3: str, tmp_path: Path
) -> None:
    import fsspec

    bucket = fsspec.filesystem("s3")
    for shard in sorted(photos.glob("*.tar"))[:6]:
        bucket.put_file(str(shard), f"photos/ray/{shard.name}")
    finish(start(cluster, f"{s3}/ray", "--model", str(model), "--out", f"{s3}/ray-captions"))
    texts = [bucket.cat(f"photos/ray-captions/part-{part:06d}.jsonl") for part in range(6)]
    assert (
        main(
            [
                "caption",
                *map(str, sorted(photos.glob("*.tar"))[:6]),
                "--model",
                str(model),
                "--out",
                f"{tmp_path}/one.jsonl",
                "--quiet",
            ]
        )
        == 0
    )
    images = ",".join(f"{s3}/ray/{part:03d}.tar" for part in range(6))
    words = ["extract", "--images", images, "--views", "cells", "--store", f"{s3}/ray-views", "--engine", "ray"]
    done = subprocess.run(
        [sys.executable, "-m", "haav", *words, "--address", cluster.address],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert len(open_store(f"{s3}/ray-views").ids("cells")) == 6 * PHOTOS
    said = [json.loads(line)["caption"] for text in texts for line in text.splitlines()]
    assert said == [row["caption"] for row in rows_of(tmp_path / "one.jsonl")]
