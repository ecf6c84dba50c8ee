"""The page in Debian's Firefox: what could differ between browsers. test_page.py has the rest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from firefox import Firefox
from haav.inference.captioner import Captioner
from helpers import SAMPLES

pytestmark = pytest.mark.slow
WORDS = "[...document.querySelectorAll('.word')].map((word) => word.innerText.trim()).join(' ')"
EXPLAINED = "document.querySelectorAll('.view-card').length > 0"
CAT = SAMPLES / "cat.jpg"


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        pytest.skip("needs Debian's firefox-esr: make browser")
    browser = Firefox(program, tmp_path_factory.mktemp("firefox"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def site(start_server: Callable[..., str]) -> str:
    return start_server()


@pytest.fixture
def page(firefox: Firefox, site: str) -> Firefox:
    firefox.goto(site)
    firefox.run("sessionStorage.clear()")  # the photos of the test before belong to another tab
    firefox.goto("about:blank")
    firefox.goto(site)
    firefox.until("document.querySelectorAll('#samples .stack').length > 0")
    return firefox


def test_a_photo_its_words_and_a_switch(page: Firefox, captioner: Captioner) -> None:
    page.type("#file", str(CAT))
    page.until(EXPLAINED)
    assert page.run(WORDS) == captioner.caption(CAT).text
    page.click(".word:nth-child(2)")
    assert page.run("document.querySelector('.word:nth-child(2)').getAttribute('aria-pressed')") == "true"
    assert page.run("document.querySelectorAll('.heat').length") == 1
    page.click(".switch input")
    page.until("document.querySelectorAll('.view-card').length === 1")
    assert page.run(WORDS) == captioner.caption(CAT, views=["objects"]).text
    page.send("WebDriver:Refresh", {})
    page.until("document.querySelectorAll('.view-card').length === 1")
    assert page.run(WORDS) == captioner.caption(CAT, views=["objects"]).text, "a reload keeps it"
    page.send("WebDriver:Back", {})
    page.until("!document.getElementById('home').hidden")


def test_an_album_with_a_picture_that_firefox_cannot_show(page: Firefox, tmp_path: Path) -> None:
    with Image.open(CAT) as image:
        image.save(tmp_path / "cat.tiff")
    page.type("#file", f"{tmp_path / 'cat.tiff'}\n{SAMPLES / 'coffee.jpg'}")
    page.until("document.getElementById('progress').innerText === '2 of 2 captioned'")
    page.until("[...document.querySelectorAll('#cards img')].filter((each) => each.naturalWidth > 0).length === 2")
    page.click("#cards li:first-child .card")
    page.until(EXPLAINED)
    page.until("document.querySelector('.photo img').naturalWidth > 0")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_samples_play_and_a_broken_file(page: Firefox, captioner: Captioner, tmp_path: Path) -> None:
    page.click("#samples li:first-child .card")
    page.until(EXPLAINED)
    assert page.run("location.hash.startsWith('#sample-')")
    page.type("#file", str(CAT))
    page.until("document.querySelector('#result .file')?.innerText === 'cat.jpg'")
    page.until(EXPLAINED)
    page.click(".play summary")
    page.type("[name=prefix]", "w7 w9")
    page.click(".play .primary")
    page.until(f"{WORDS}.startsWith('w7 w9') && {EXPLAINED}")
    assert page.run(WORDS) == captioner.caption(CAT, prefix="w7 w9").text
    page.click(".word:nth-child(3)")
    page.click("button.alternative")
    page.until("document.querySelector('[name=prefix]').value.split(' ').length === 3")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no")
    page.type("#file", str(tmp_path / "broken.jpg"))
    page.until("document.querySelector('#result .failed .problem')?.innerText.includes('picture')")
    assert page.run("document.querySelectorAll('#result .word').length") == 0
