"""Captions on a Ray cluster of two one-core nodes on this machine, from shards on an S3 endpoint on loopback.

python -m benchmarks.cluster kill PHOTOS.tar --count 2000     # kill a node and the driver; compare with one process
python -m benchmarks.cluster speed PHOTOS.tar --count 400     # one worker, two workers, the plain command on one core
python -m benchmarks.cluster memory PHOTOS.tar --count 20000  # memory of the driver and the workers

Photos are repeated where there are fewer than COUNT.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
from moto.server import ThreadedMotoServer
from ray.cluster_utils import Cluster

from haav.photos.sources import find_photos

SHARD = 50
logging.getLogger("werkzeug").setLevel(logging.ERROR)
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=("kill", "speed", "memory"))
parser.add_argument("photos")
parser.add_argument("--count", type=int, default=2000)
parser.add_argument("--json", help="speed: file for the measured seconds, which benchmarks.simulate reads")
parser.add_argument("--flags", default="", help="further flags of haav caption")
options = parser.parse_args()


def serve() -> str:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
    )
    fsspec.filesystem("s3", use_listings_cache=False).mkdir("photos")
    return "s3://photos/shards"


def write_shards(folder: Path, count: int) -> None:
    """WebDataset shards in a local folder and in the bucket"""
    refs = list(itertools.islice(itertools.cycle(find_photos([options.photos])), count))
    for shard in range(-(-count // SHARD)):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for number, ref in enumerate(refs[SHARD * shard : SHARD * (shard + 1)], SHARD * shard):
                data = ref.read()
                info = tarfile.TarInfo(f"{number:08d}.jpg")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        name = f"{shard:06d}.tar"
        (folder / name).write_bytes(buffer.getvalue())
        fsspec.filesystem("s3", use_listings_cache=False).pipe_file(f"photos/shards/{name}", buffer.getvalue())


def start(source: str, out: str, *flags: str, **keywords: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "haav", "caption", source, "--out", out, *flags, *options.flags.split()]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True, **keywords)


def on_cluster(cluster: Any, out: str, *flags: str) -> subprocess.Popen[str]:
    return start(bucket, out, "--engine", "ray", "--address", cluster.address, *flags)


def wait_for_parts(out: str, parts: int) -> None:
    while len(done(out)) < parts:
        time.sleep(0.5)


def done(out: str) -> list[str]:
    system = fsspec.filesystem("s3", use_listings_cache=False)
    path = out.removeprefix("s3://")
    return [name for name in (system.ls(path, detail=False) if system.exists(path) else []) if name.endswith(".done")]


def captions(texts: Iterable[bytes]) -> list[tuple[str, str]]:
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    return [(Path(row["image"]).name, row["caption"]) for row in rows]


def kill(cluster: Any) -> None:
    parts = -(-options.count // SHARD)
    out = "s3://photos/captions"
    driver = on_cluster(cluster, out)
    wait_for_parts(out, parts // 5)
    cluster.list_all_nodes()[-1].kill_raylet()
    cluster.add_node(num_cpus=1)
    print(f"killed a node after {len(done(out))} of {parts} parts and replaced it")
    wait_for_parts(out, parts // 2)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    print(f"killed the driver after {len(done(out))} parts")
    assert on_cluster(cluster, out).wait() == 0
    system = fsspec.filesystem("s3", use_listings_cache=False)
    said = captions(system.cat(f"photos/captions/part-{part:06d}.jsonl") for part in range(parts))
    one = folder / "one.jsonl"
    assert start(str(folder), str(one)).wait() == 0
    expected = captions([one.read_bytes()])
    same = sum(here == there for here, there in zip(said, expected, strict=True))
    print(f"{len(said)} captions of {len(dict(said))} photos; {same} as one process has them")


def seconds_of(out: str) -> list[float]:
    """Of each part, as its worker measured it"""
    system = fsspec.filesystem("s3", use_listings_cache=False)
    return [json.loads(system.cat(name))["seconds"] for name in sorted(done(out))]


def speed(cluster: Any) -> None:
    count = options.count
    rates, runs = {}, {}
    for workers in (1, 2):
        out = f"s3://photos/speed-{workers}"
        started = time.monotonic()
        driver = on_cluster(cluster, out, "--workers", str(workers))
        wait_for_parts(out, 2)
        first, begun = time.monotonic(), len(done(out))
        assert driver.wait() == 0
        wait_for_parts(out, -(-count // SHARD))
        photos = count - SHARD * begun
        rates[workers] = photos / (time.monotonic() - first)
        runs[workers] = {
            "seconds": time.monotonic() - started,
            "parts": seconds_of(out),
            "begun": [begun, first - started],
        }
        in_parts = workers * count / sum(runs[workers]["parts"])
        print(
            f"{workers} worker(s): {rates[workers]:.2f} photos/s after {first - started:.0f} s; in parts {in_parts:.2f}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps({"photos": SHARD, "runs": runs}))
    print(f"two workers against one: {rates[2] / rates[1]:.2f} ×")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = folder / "plain.jsonl"
    driver = start(str(folder), str(plain), env=environment)
    while not plain.exists() or plain.read_bytes().count(b"\n") < 2 * SHARD:
        time.sleep(0.2)
    first, begun = time.monotonic(), plain.read_bytes().count(b"\n")
    assert driver.wait() == 0
    rate = (count - begun) / (time.monotonic() - first)
    print(f"plain command, one thread: {rate:.2f} photos/s; one worker of the engine has {rates[1] / rate:.2f} of it")


def resident(pid: int) -> float:
    """MB"""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) / 1000
    except (OSError, KeyError):
        return 0.0


def workers() -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "MapWorker" in (process / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def memory(cluster: Any) -> None:
    out = "s3://photos/memory"
    driver = on_cluster(cluster, out)
    parts = -(-options.count // SHARD)
    for share in range(1, 11):
        wait_for_parts(out, parts * share // 10)
        sizes = ", ".join(f"{resident(pid):.0f}" for pid in workers())
        print(
            f"{len(done(out)) * SHARD:,} photos: driver {resident(driver.pid):.0f} MB, workers {sizes} MB", flush=True
        )
    assert driver.wait() == 0


bucket = serve()
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_shards(folder, options.count)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    try:
        {"kill": kill, "speed": speed, "memory": memory}[options.what](nodes)
    finally:
        nodes.shutdown()
