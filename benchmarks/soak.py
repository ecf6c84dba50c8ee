"""Hours of work, memory and open files watched: python -m benchmarks.soak serve|train [--seconds 3600]

`serve`: a server and clients that send photos without pause. Of the requests, 5 % hang up during the upload, 5 % are
broken files, 5 % are uploaded slowly. `train`: toy runs, one after another in one process, as a user's notebook would
start them. Every 30 s a line; at the end, what the second half grew by. It fails when that is more than 2 % of memory,
or any open file; for `serve` also at any answer but 200, and 422 for broken files, and at a log of more than ten lines.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

EVERY = 30.0
SAMPLES = Path(__file__).parents[1] / "src/haav/samples"
KINDS = ["good"] * 5 + ["hang-up"] + ["good"] * 6 + ["broken"] + ["good"] * 6 + ["slow"]
"""of every 20 requests, one hangs up during the upload, one is a broken file, one is uploaded slowly"""
EXPECTED = {"good": 200, "hang-up": 0, "broken": 422, "slow": 200}
FORM = (
    b'--soak\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n',
    b"\r\n--soak--\r\n",
)
MOST_LINES = 10
"""lines in the log of the server"""
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


def watch(process: subprocess.Popen[bytes], seconds: float, done: Counter[tuple[str, int]]) -> int:
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
        print(f"{rows[-1][0]:6.0f} s  {megabytes:8.1f} MB  {files:4} files  {done.total():6} requests", flush=True)
    # The first half warms up: allocators, caches, threads. What grows after that would grow for ever.
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    more = max(row[1] for row in second) / max(row[1] for row in first) - 1
    files = max(row[2] for row in second) - max(row[2] for row in first)
    print(f"second half: memory {100 * more:+.1f} %, files {files:+}")
    return int(more > 0.02 or files > 0)


def serve(seconds: float, clients: int, model: str) -> int:
    """0 when every answer was as expected too, and the log of the server is short"""
    command = [sys.executable, "-m", "haav", "serve", "--model", model, "--port", "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        address = process.stdout.readline().decode().split()[0].removeprefix("http://")
        outcomes: Counter[tuple[str, int]] = Counter()
        ending = threading.Event()
        kinds = itertools.cycle(KINDS)
        arguments = ((address, number, kinds, outcomes, ending) for number in range(clients))
        threads = [threading.Thread(target=_client, args=each, daemon=True) for each in arguments]
        for thread in threads:
            thread.start()
        failed = watch(process, seconds, outcomes)
        ending.set()
        for thread in threads:
            thread.join(120)
        hung_up = [line for line in _metrics(address) if 'status="499"' in line]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log.seek(0)
        lines = log.read().splitlines()
    unexpected = {outcome: count for outcome, count in outcomes.items() if outcome[1] != EXPECTED[outcome[0]]}
    for (kind, status), count in sorted(outcomes.items()):
        print(f"{kind:>8}: {count:6} × {status or 'hung up'}")
    print(f"counted by the server: {' '.join(hung_up) or 'no hang-up'}")
    print(f"lines in the server's log: {len(lines)}")
    print(b"\n".join(lines[:20]).decode(errors="replace"))
    return failed or int(bool(unexpected) or len(lines) > MOST_LINES)


def _client(
    address: str, number: int, kinds: Iterator[str], outcomes: Counter[tuple[str, int]], ending: threading.Event
) -> None:
    draws = random.Random(number)
    photos = [file.read_bytes() for file in sorted(SAMPLES.glob("*.jpg"))]
    while not ending.is_set():
        kind, photo = next(kinds), draws.choice(photos)
        body = FORM[0] + (photo[: len(photo) // 3] if kind == "broken" else photo) + FORM[1]
        try:
            status = _post(address, body, kind, explain=draws.random() < 0.2)
        except OSError:
            status = -1  # the server broke the connection
        outcomes[kind, status] += 1


def _post(address: str, body: bytes, kind: str, explain: bool) -> int:
    """The status of the answer; 0 where the client hung up"""
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        connection.putrequest("POST", f"/v1/caption?explain={str(explain).lower()}")
        connection.putheader("Content-Type", "multipart/form-data; boundary=soak")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        if kind == "hang-up":
            connection.send(body[: len(body) // 2])
            return 0
        parts = 10 if kind == "slow" else 1
        size = -(-len(body) // parts)
        for start in range(0, len(body), size):
            connection.send(body[start : start + size])
            time.sleep(0.5 if kind == "slow" else 0)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _metrics(address: str) -> list[str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text.splitlines()


def train(seconds: float) -> int:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-c", TOY], stdout=log, stderr=log)
        failed = watch(process, seconds, Counter())
        process.kill()
        process.wait()
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("serve", "train"))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="best", help="of the server")
    options = parser.parse_args()
    if options.what == "train":
        raise SystemExit(train(options.seconds))
    raise SystemExit(serve(options.seconds, options.clients, options.model))
