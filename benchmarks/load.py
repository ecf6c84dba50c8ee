"""16 clients against a running `haav serve` for a minute: answers, refusals, latency, memory.

python -m benchmarks.load http://127.0.0.1:8000 --clients 16 --seconds 60 [--pid PID]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

import haav

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("address", help="of the server; on this machine only")
parser.add_argument("--clients", type=int, default=16)
parser.add_argument("--seconds", type=float, default=60)
parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
options = parser.parse_args()
if not options.address.startswith(("http://127.0.0.1", "http://localhost")):
    parser.error("this loads a server: it is for your own, on this machine.")

photos = [file.read_bytes() for file in sorted((Path(haav.__file__).parent / "samples").glob("*.jpg"))]
codes: Counter[int | str] = Counter()
latencies: list[float] = []
memory: list[float] = []
end = time.monotonic() + options.seconds


def resident() -> float:
    """MB of the server"""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{options.pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1000


def client(first: int) -> None:
    with httpx.Client(timeout=120) as session:
        sent = first
        while time.monotonic() < end:
            started = time.monotonic()
            try:
                files = {"image": ("photo.jpg", photos[sent % len(photos)])}
                answer = session.post(f"{options.address}/v1/caption", files=files)
                codes[answer.status_code] += 1
                if answer.status_code == 200:
                    latencies.append(time.monotonic() - started)
                else:
                    time.sleep(float(answer.headers.get("retry-after", 1)))
            except httpx.HTTPError as error:
                codes[type(error).__name__] += 1
            sent += 1


threads = [threading.Thread(target=client, args=(first,)) for first in range(options.clients)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    time.sleep(5)
    if options.pid:
        memory.append(resident())
latencies.sort()
print(f"answers: {dict(codes)}")
if latencies:
    middle, late = latencies[len(latencies) // 2], latencies[int(0.99 * (len(latencies) - 1))]
    print(f"{len(latencies) / options.seconds:.1f} captions/s; latency p50 {middle:.2f} s, p99 {late:.2f} s")
if memory:
    print(f"memory of the server, MB: {' '.join(f'{value:.0f}' for value in memory)}")
