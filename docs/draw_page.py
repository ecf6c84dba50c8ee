"""Draw the page of `haav serve`: screenshots of every screen, and the animation of the README.

    haav serve --port 8000
    python docs/draw_page.py http://127.0.0.1:8000 OUT

docs/page.webp and docs/words.webp are OUT/page.webp and OUT/words.webp.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

SAMPLES = Path(__file__).parents[1] / "src" / "haav" / "samples"
ALBUM = ["cat.jpg", "city.jpg", "bird.jpg", "workers.jpg", "phone.jpg", "SOURCES.md"]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
HOVERED = 700
"""milliseconds that the animation shows each word"""


def main(address: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as running:
        program = shutil.which("chromium")
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])

        @contextmanager
        def page(scheme: str = "light", phone: bool = False) -> Iterator[Any]:
            settings: dict[str, Any] = {"viewport": PHONE if phone else DESKTOP, "color_scheme": scheme}
            settings |= {"device_scale_factor": 2, "is_mobile": phone, "has_touch": phone}
            context = browser.new_context(**settings)
            opened = context.new_page()
            opened.goto(address)
            opened.wait_for_selector("#samples .stack")
            yield opened
            context.close()

        for scheme in ("light", "dark"):
            for phone in (False, True):
                name = f"{'phone' if phone else 'desktop'}-{scheme}"
                with page(scheme, phone) as opened:
                    screens(opened, out, name)
        with page() as opened:
            animate(opened, out / "words.webp")
        browser.close()
    with Image.open(out / "desktop-light-home.png") as home:
        home.convert("RGB").resize((1280, 800), Image.Resampling.LANCZOS).save(out / "page.webp", quality=85, method=6)


def screens(page: Any, out: Path, name: str) -> None:
    def shot(screen: str) -> None:
        page.wait_for_timeout(400)
        page.screenshot(path=out / f"{name}-{screen}.png")

    shot("home")
    waiting: list[Any] = []
    page.route("**/v1/caption", lambda route: waiting.append(route))  # Playwright sets attributes on it
    page.set_input_files("#file", str(SAMPLES / "motorcycles.jpg"))
    page.wait_for_selector(".skeleton")
    shot("waiting")
    waiting[0].continue_()
    page.unroute("**/v1/caption")
    page.wait_for_selector(".view-card")
    shot("result")
    page.locator(".word", has_text="parked").click()
    shot("word")
    page.get_by_role("switch").first.click()
    page.wait_for_selector(".before")
    page.wait_for_selector(".view-card")
    shot("switched")
    page.get_by_text("Play with the caption").click()
    page.get_by_label("How many").fill("3")
    page.get_by_role("button", name="Caption again").click()
    page.wait_for_selector(".n-best li:nth-child(3)")
    page.wait_for_selector(".view-card")
    page.wait_for_timeout(400)
    page.screenshot(path=out / f"{name}-play.png", full_page=True)
    page.set_input_files("#file", [str(SAMPLES / file) for file in ALBUM])
    page.get_by_text("6 of 7 captioned, 1 failed").wait_for()
    shot("album")
    page.set_input_files("#file", str(SAMPLES / "SOURCES.md"))
    page.wait_for_selector("#result .problem")
    shot("error")


def animate(page: Any, file: Path) -> None:
    """Hover over the words of a caption, one after the other."""
    page.set_input_files("#file", str(SAMPLES / "motorcycles.jpg"))
    page.wait_for_selector(".view-card")
    page.emulate_media(reduced_motion="reduce")
    frames = []
    for word in page.locator(".word").all():
        word.hover()
        page.wait_for_timeout(150)
        clip = {"x": 0, "y": 0, "width": 1280, "height": 720}
        with Image.open(io.BytesIO(page.screenshot(clip=clip))) as frame:
            frames.append(frame.convert("RGB").resize((960, 540), Image.Resampling.LANCZOS))
    first, *others = frames
    first.save(file, save_all=True, append_images=others, duration=HOVERED, loop=0, quality=70, method=6)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
