"""How long the page of `haav serve` takes from the choice of a photo to its caption, in Chromium.

python -m benchmarks.page [PHOTOS] [--count 50]    # PHOTOS: a folder or tar; default: the sample photos
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import socket
import statistics
import threading
import time
from typing import Any

import uvicorn
from playwright.sync_api import sync_playwright

import haav
from haav.photos.sources import find_photos
from haav.web import service
from haav.web.server import build_app, server_settings

# The clock of the page is that of the server: both run on this machine.
WATCH = """() => {
  const now = () => performance.timeOrigin + performance.now();
  window.times = {};
  document.getElementById("file").addEventListener("change", () => (window.times = { chosen: now() }), true);
  new MutationObserver(() => {
    const { times } = window;
    if (!times.caption && document.querySelector("#result .word")) times.caption = now();
    if (!times.explanation && document.querySelector("#result .view-card")) times.explanation = now();
  }).observe(document.getElementById("result"), { subtree: true, childList: true });
}"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("photos", nargs="?", default=str(service.SAMPLES))
parser.add_argument("--count", type=int, default=50)
options = parser.parse_args()

decoded: list[float] = []
explain = service.explain


def noted(*arguments: Any) -> Any:
    """The explanation begins when the caption is decoded."""
    decoded.append(1000 * time.time())
    return explain(*arguments)


service.explain = noted
captioner = haav.load()
refs = list(itertools.islice(itertools.cycle(find_photos([options.photos])), options.count + 1))
bound = socket.socket()
bound.bind(("127.0.0.1", 0))
server = uvicorn.Server(server_settings(build_app(captioner)))
threading.Thread(target=server.run, args=([bound],), daemon=True).start()
rows = []
with sync_playwright() as running:
    browser = running.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    )
    page = browser.new_page()
    while not server.started:
        time.sleep(0.05)
    page.goto(f"http://127.0.0.1:{bound.getsockname()[1]}")
    page.wait_for_selector("#samples .stack", timeout=60_000)
    page.evaluate(WATCH)
    for ref in refs:
        page.set_input_files("#file", [{"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": ref.read()}])
        page.wait_for_function("() => window.times.explanation", timeout=60_000)
        times = page.evaluate("window.times")
        rows.append(
            {
                "chosen → caption on the page": times["caption"] - times["chosen"],
                "caption decoded → on the page": times["caption"] - decoded[-1],
                "chosen → explanation on the page": times["explanation"] - times["chosen"],
            }
        )
    browser.close()
server.should_exit = True
for name in rows[0]:
    values = [row[name] for row in rows[1:]]  # the first photo loads the networks
    centiles = statistics.quantiles(values, n=20, method="inclusive")
    print(f"{name}: p50 {statistics.median(values):.0f} ms, p95 {centiles[-1]:.0f} ms, most {max(values):.0f} ms")
print(f"{len(rows) - 1} photos")
