"""Counts of requests and photos since the start, in the text format of Prometheus."""

from __future__ import annotations

import math
from collections import Counter

from haav.web.batcher import Batcher

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, math.inf)
"""upper bounds of durations in seconds"""


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.within: Counter[tuple[str, float]] = Counter()
        self.seconds: Counter[str] = Counter()

    def observe(self, path: str, status: int, seconds: float) -> None:
        """`path` is that of a route, so that clients cannot make up new ones"""
        self.requests[path, status] += 1
        self.seconds[path] += seconds  # type: ignore[assignment]  # a Counter adds floats too
        for bound in BUCKETS:
            self.within[path, bound] += seconds <= bound

    def text(self, batcher: Batcher) -> str:
        lines = ["# HELP haav_requests_total Requests answered.", "# TYPE haav_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'haav_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += ["# HELP haav_request_seconds Duration of requests.", "# TYPE haav_request_seconds histogram"]
        for path in sorted(self.seconds):
            for bound in BUCKETS:
                name = "+Inf" if bound == math.inf else f"{bound:g}"
                lines.append(f'haav_request_seconds_bucket{{path="{path}",le="{name}"}} {self.within[path, bound]}')
            lines.append(f'haav_request_seconds_sum{{path="{path}"}} {self.seconds[path]:.6f}')
            lines.append(f'haav_request_seconds_count{{path="{path}"}} {self.within[path, math.inf]}')
        for name, metric_type, meaning, value in (
            ("haav_photos_total", "counter", "Photos captioned.", batcher.done),
            ("haav_batches_total", "counter", "Batches of photos answered.", batcher.batches),
            ("haav_waiting", "gauge", "Photos that wait for their batch.", batcher.queue.qsize()),
            ("haav_waiting_limit", "gauge", "Photos that may wait.", batcher.queue.maxsize),
        ):
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {metric_type}", f"{name} {value}"]
        return "\n".join(lines) + "\n"
