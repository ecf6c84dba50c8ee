"""Hours of work, memory and open files watched: python -m benchmarks.soak serve|train [--seconds 3600]

`serve`: a server with the shipped model, four clients that send good and broken photos without pause. `train`: toy
runs, one after another in one process, as a user's notebook would start them. Every 30 s a line; at the end, what the
second half grew by. It fails when that is more than 2 % of memory, or any open file.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

EVERY = 30.0
TOY = """
import sys, tempfile
from pathlib import Path
from haav.cli.main import main
number = 0
while True:
    with tempfile.TemporaryDirectory() as folder:
        assert main(["train", "toy", "--out", f"{folder}/run", "--train.epochs", "2", "--train.seed", str(number)]) == 0
    number += 1
"""


def watch(process: subprocess.Popen[bytes], seconds: float, done: list[int]) -> int:
    """0 when memory and files stay flat"""
    rows: list[tuple[float, float, int]] = []
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        time.sleep(min(EVERY, seconds / 10))
        if process.poll() is not None:
            print(f"it ended by itself with code {process.returncode}")
            return 1
        folder = Path(f"/proc/{process.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        files = len(os.listdir(folder / "fd"))
        rows.append((time.monotonic() - started, megabytes, files))
        print(f"{rows[-1][0]:6.0f} s  {megabytes:8.1f} MB  {files:4} files  {len(done):6} answers", flush=True)
    # The first half warms up: allocators, caches, threads. What grows after that would grow for ever.
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    more = max(row[1] for row in second) / max(row[1] for row in first) - 1
    files = max(row[2] for row in second) - max(row[2] for row in first)
    print(f"second half: memory {100 * more:+.1f} %, files {files:+}")
    return int(more > 0.02 or files > 0)


def serve(seconds: float) -> int:
    import httpx

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "haav", "serve", "--port", str(port)], stdout=subprocess.DEVNULL)
    samples = Path(__file__).parents[1] / "src/haav/samples"
    photos = [file.read_bytes() for file in sorted(samples.glob("*.jpg"))]
    photos.append(photos[0][: len(photos[0]) // 3])
    done: list[int] = []
    ending = threading.Event()

    def client(first: int) -> None:
        request = first
        while not ending.is_set():
            request += 1
            files = {"image": ("a.jpg", photos[request % len(photos)], "image/jpeg")}
            fields = {"explain": "true"} if request % 5 == 0 else {}
            try:
                done.append(
                    httpx.post(f"http://127.0.0.1:{port}/v1/caption", files=files, data=fields, timeout=90).status_code
                )
            except httpx.TransportError:
                time.sleep(1)

    clients = [threading.Thread(target=client, args=(index,), daemon=True) for index in range(4)]
    for one in clients:
        one.init_cache()
    failed = watch(process, seconds, done)
    ending.set()
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    statuses = {status: done.count(status) for status in sorted(set(done))}
    print(f"answers by status: {statuses}")
    return failed or int(not set(statuses) <= {200, 422, 429})


def train(seconds: float) -> int:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-c", TOY], stdout=log, stderr=log)
        failed = watch(process, seconds, [])
        process.kill()
        process.wait()
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("serve", "train"))
    parser.add_argument("--seconds", type=float, default=3600)
    options = parser.parse_args()
    raise SystemExit({"serve": serve, "train": train}[options.what](options.seconds))
