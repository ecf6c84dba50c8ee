"""The page of `haav serve`, in a real browser."""

from __future__ import annotations

import csv
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from haav.inference.captioner import Captioner
from haav.studies.html import render_explanation
from helpers import SAMPLES

pytest.importorskip("fastapi", reason="needs the web extra")
pytest.importorskip("axe_playwright_python", reason="needs the dev extra")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from haav.web import service

CAT, COFFEE = str(SAMPLES / "cat.jpg"), str(SAMPLES / "coffee.jpg")
BUDGET = 150_000
"""bytes of the page besides photos"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Debian's chromium: make browser")
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as running:
        context = running.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("browser")),
            executable_path=chromium,
            headless=True,
            args=[*flags, "--disable-component-update", "--disable-sync"],
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(20_000)
        yield context
        context.close()


@pytest.fixture(scope="module")
def site(start_server: Callable[..., str]) -> str:
    return start_server()


@pytest.fixture
def page(browser: Any, site: str) -> Iterator[Any]:
    """The page, with its samples captioned. `page.trouble` has what the console said."""
    page = browser.new_page()
    page.trouble = []
    page.on("console", lambda message: page.trouble.append(message.text))
    page.on("pageerror", lambda error: page.trouble.append(str(error)))
    page.goto(site)
    page.wait_for_selector("#samples .stack")
    yield page
    page.close()


def words(page: Any) -> str:
    return " ".join(page.locator(".word").all_inner_texts())


def choose(page: Any, *files: str | Path) -> None:
    page.set_input_files("#file", [str(file) for file in files])


def explained(page: Any) -> None:
    page.wait_for_selector(".view-card")


# The first screen


def test_the_first_screen_shows_results_within_the_budget_and_asks_no_other_host(browser: Any, site: str) -> None:
    page = browser.new_page()
    sizes: dict[str, int] = {}
    page.on("response", lambda answer: sizes.update({answer.url: len(answer.body())}))
    page.goto(site)
    page.wait_for_selector("#samples .stack")
    assert page.locator("#samples .card").count() == len(service.sample_names())
    assert all(url.startswith(site) for url in sizes if not url.startswith("data:"))
    besides_photos = sum(size for url, size in sizes.items() if url.startswith(site) and "/samples/" not in url)
    assert 10_000 < besides_photos < BUDGET
    page.close()


def test_the_captions_of_samples_are_those_of_the_captioner(page: Any, captioner: Captioner) -> None:
    shown = {card.locator("img").get_attribute("src"): card for card in page.locator("#samples .card").all()}
    card = shown["/samples/cat.jpg"]
    said = " ".join(word.strip() for word in card.locator(".plain-word").all_inner_texts())
    assert said == captioner.caption(CAT).text


def test_photos_can_be_dropped_and_pasted(page: Any, captioner: Captioner) -> None:
    load = """async (kind) => {
      const blob = await (await fetch("/samples/cat.jpg")).blob();
      const data = new DataTransfer();
      data.items.add(new File([blob], `${kind}.jpg`, { type: "image/jpeg" }));
      const options = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
      const event = kind === "drop" ? new DragEvent(kind, options) : new ClipboardEvent(kind, options);
      document.body.dispatchEvent(event);
    }"""
    for kind in ("drop", "paste"):
        page.evaluate(load, kind)
        expect(page.locator("#result .file")).to_have_text(f"{kind}.jpg")
        explained(page)
        assert words(page) == captioner.caption(CAT).text
    assert page.trouble == []


# One photo


def test_the_caption_is_there_before_its_explanation(
    page: Any, captioner: Captioner, explanation_gate: threading.Event
) -> None:
    choose(page, CAT)
    page.wait_for_selector(".word")
    assert words(page) == captioner.caption(CAT).text
    assert page.locator(".view-card").count() == 0
    expect(page.locator(".waiting")).to_be_visible()
    assert page.locator(".word .stack").count() == page.locator(".word").count(), "weights are there with the caption"
    explanation_gate.set()
    explained(page)
    assert page.trouble == []


def test_the_word_that_views_disagree_on_most_is_selected_first(page: Any, captioner: Captioner) -> None:
    with page.expect_response("**/v1/caption") as response:
        choose(page, CAT)
    explained(page)
    events = [json.loads(line[6:]) for line in response.value.text().split("\n") if line.startswith("data: ")]
    answer = events[-1]
    content = [word for word in answer["words"] if word["content"]] or answer["words"]
    best = max(content, key=lambda word: word["disagreement"])
    assert page.locator('.word[aria-pressed="true"]').inner_text() == best["word"]


def test_a_word_lights_up_the_photo_and_says_what_each_view_did(page: Any, captioner: Captioner) -> None:
    choose(page, CAT)
    explained(page)
    page.locator(".word").nth(1).hover()
    expect(page.locator(".word").nth(1)).to_have_attribute("aria-pressed", "true")
    assert page.locator(".heat").count() == 1
    assert page.locator(".looked").inner_text() == f"Bright: where “{page.locator('.word').nth(1).inner_text()}” looked"
    labels = page.locator(".overlay .box").all_inner_texts()
    assert labels
    assert all(re.fullmatch(r"[a-z ]+ \d+\s%", label) for label in labels), labels
    cards = page.locator(".view-card")
    assert cards.count() == len(captioner.views)
    assert cards.first.locator("h3").inner_text() == "what the image encoder saw"
    assert cards.first.locator("h3").get_attribute("title") == "view cells"
    assert re.fullmatch(r"trusted\s+\d+\s%\s+without it\s+.+", cards.first.locator(".bars").inner_text(), re.DOTALL)
    page.locator(".view-card").first.hover()
    page.wait_for_timeout(200)
    assert page.locator(".word").nth(1).get_attribute("aria-pressed") == "true", "it can be read"
    page.locator(".word").nth(1).press("Escape")
    assert page.locator(".heat").count() == 0, "the photo itself"
    assert page.trouble == []


def test_words_are_reached_with_the_keyboard(page: Any) -> None:
    choose(page, CAT)
    explained(page)
    page.locator(".word").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".word").nth(1).get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.activeElement.classList.contains('word')")
    assert page.locator('.word[tabindex="0"]').count() == 1, "the tab key stops once"
    label = page.locator(".word").nth(1).get_attribute("aria-label")
    assert re.fullmatch(r"w\d+: what the image encoder saw \d+\s%, objects found \d+\s%", label)


def test_switches_keep_the_focus_and_the_place_on_the_page(page: Any) -> None:
    choose(page, CAT)
    explained(page)
    switch = page.get_by_role("switch", name="what the image encoder saw")
    page.set_viewport_size({"width": 800, "height": 500})
    switch.focus()
    page.evaluate("scrollTo(0, 150)")
    page.keyboard.press("Space")
    expect(page.locator(".view-card")).to_have_count(1)
    assert switch.evaluate("element => element === document.activeElement")
    assert page.evaluate("scrollY") == 150


def test_switching_a_view_off_shows_both_captions_and_keeps_the_colours(page: Any, captioner: Captioner) -> None:
    choose(page, CAT)
    explained(page)
    before = words(page)
    page.get_by_role("switch", name="what the image encoder saw").click()
    expect(page.locator(".view-card")).to_have_count(1)
    after = captioner.caption(CAT, views=["objects"]).text
    assert words(page) == after
    shown = page.locator(".before").inner_text().removeprefix("Before: ").removesuffix("(the same)").strip()
    assert shown == before
    kept = longest_common(before.split(), after.split())
    assert page.locator(".word.changed").count() == len(after.split()) - kept
    assert page.locator(".before del").count() == len(before.split()) - kept
    colours = "elements => elements.map((each) => getComputedStyle(each).backgroundColor)"
    bars = page.locator(".word .stack span:nth-child(1)").evaluate_all(colours)
    assert len(set(bars)) == 1, "words that changed have the same colours of views"
    assert page.locator(".sure").inner_text() == "No score, since you chose words or views"
    assert "--v1" in page.locator(".view-card").get_attribute("style"), "the second view keeps its colour"
    assert page.get_by_role("switch", name="objects found").is_disabled(), "a caption needs a view"
    page.get_by_role("switch", name="what the image encoder saw").click()
    expect(page.locator(".view-card")).to_have_count(2)
    assert words(page) == before
    assert page.trouble == []


def longest_common(one: list[str], other: list[str]) -> int:
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + longest_common(one[1:], other[1:])
    return max(longest_common(one[1:], other), longest_common(one, other[1:]))


# Play


def test_a_word_can_be_banned_and_another_be_taken_instead(page: Any, captioner: Captioner) -> None:
    choose(page, CAT)
    explained(page)
    page.locator(".word").nth(1).click()
    banned = page.locator(".word").nth(1).inner_text()
    page.get_by_role("button", name=f"Never say “{banned}”").click()
    expect(page.locator(".before")).to_be_visible()
    explained(page)
    assert words(page) == captioner.caption(CAT, never=[banned]).text
    assert page.locator("[name=never]").input_value() == banned
    page.locator(".word").nth(2).click()
    begin = page.locator(".word").all_inner_texts()[:2]
    other = page.locator("button.alternative .text").first.inner_text()
    page.locator("button.alternative").first.click()
    page.wait_for_function("text => document.querySelectorAll('.word')[2]?.innerText === text", arg=other)
    assert words(page) == captioner.caption(CAT, never=[banned], prefix=" ".join([*begin, other])).text
    assert page.trouble == []


def test_first_words_demanded_words_and_n_best(page: Any, captioner: Captioner) -> None:
    choose(page, CAT)
    explained(page)
    page.get_by_text("Play with the caption").click()
    page.get_by_label("Begin with these words").fill("w7 w9")
    page.get_by_label("Must say").fill("w5")
    page.get_by_label("How many").fill("3")
    page.get_by_role("button", name="Caption again").click()
    page.wait_for_selector(".n-best li:nth-child(3)")
    explained(page)
    expected = captioner.caption(CAT, prefix="w7 w9", must=["w5"], n_best=3)
    texts = [expected.text, *(other.text for other in expected.n_best)]
    assert words(page) == texts[0]
    listed = page.locator(".n-best li")
    assert [re.sub(r"\s*\d+\s%$", "", text) for text in listed.all_inner_texts()] == texts
    assert page.evaluate("getComputedStyle(document.querySelector('.n-best')).listStyleType") == "decimal"
    listed.nth(1).locator("button").click()
    assert words(page) == texts[1], "the second is shown, with its explanation"
    assert page.locator(".view-card").count() == len(captioner.views)
    page.get_by_role("button", name="Copy caption").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == texts[1]
    assert page.trouble == []


def test_captions_can_be_drawn_by_chance(page: Any) -> None:
    choose(page, CAT)
    explained(page)
    page.get_by_text("Play with the caption").click()
    assert page.get_by_label("Temperature").is_hidden()
    page.get_by_label("Pick words by").select_option("sample")
    assert page.get_by_label("Beam width").is_hidden()
    page.get_by_label("Temperature").fill("1.2")
    page.evaluate("""() => {
      const fetched = window.fetch;
      window.fetch = (path, options) => {
        window.sent = Object.fromEntries([...options.body].filter(([, value]) => typeof value === "string"));
        return fetched(path, options);
      };
    }""")
    page.get_by_role("button", name="Caption again").click()
    sent = page.evaluate("window.sent")
    assert (sent["method"], sent["temperature"], sent["samples"]) == ("sample", "1.2", "1")
    assert int(sent["seed"]) >= 0
    explained(page)
    page.get_by_role("button", name="Reset").click()
    expect(page.get_by_label("Pick words by")).to_have_value("beam")
    explained(page)
    assert page.trouble == []


# Several photos


def test_an_album_fills_opens_and_is_saved(page: Any, captioner: Captioner, tmp_path: Path) -> None:
    broken = tmp_path / 'a, "b".jpg'
    broken.write_bytes(b"\xff\xd8 no")
    choose(page, CAT, COFFEE, broken)
    expect(page.locator("#progress")).to_have_text("2 of 3 captioned, 1 failed")
    expected = [captioner.caption(CAT).text, captioner.caption(COFFEE).text]
    cards = page.locator("#cards .card")
    assert cards.count() == 3
    assert "picture" in cards.nth(2).inner_text(), "the failure is readable"
    page.get_by_role("button", name="Copy captions").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == f'cat.jpg\t{expected[0]}\ncoffee.jpg\t{expected[1]}\na, "b".jpg\t\n'

    rows = list(csv.DictReader(saved(page, "CSV", tmp_path).read_text().splitlines()))
    assert [row["image"] for row in rows] == ["cat.jpg", "coffee.jpg", 'a, "b".jpg']
    assert [row["caption"] for row in rows] == [*expected, ""]
    assert "picture" in rows[2]["error"]
    lines = [json.loads(line) for line in saved(page, "JSONL", tmp_path).read_text().splitlines()]
    assert [line.get("caption") for line in lines] == [*expected, None]

    cards.nth(1).click()
    explained(page)
    expect(page.locator("#result .file")).to_have_text("coffee.jpg")
    page.get_by_role("link", name="All 3 photos").click()
    expect(page.locator("#album")).to_be_visible()
    file = saved(page, "HTML with explanations", tmp_path)
    page.trouble = [text for text in page.trouble if "422" not in text]  # Chromium's own line about the broken photo
    page.context.set_offline(True)
    page.goto(file.as_uri())
    articles = page.locator("article")
    expect(articles).to_have_count(2)
    assert [words(article) for article in articles.all()] == expected
    assert articles.nth(1).locator(".view-card").count() == len(captioner.views)
    page.context.set_offline(False)
    assert page.trouble == []


def saved(page: Any, button: str, folder: Path) -> Path:
    with page.expect_download() as download:
        page.get_by_role("button", name=button, exact=True).click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file


# State


def test_a_broken_photo_leaves_nothing_of_the_one_before(page: Any, tmp_path: Path) -> None:
    choose(page, CAT)
    explained(page)
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no")
    choose(page, tmp_path / "broken.jpg")
    expect(page.locator("#result .problem")).to_contain_text("picture")
    assert page.locator("#result .file").inner_text() == "broken.jpg"
    assert page.locator("#result .word").count() == 0
    assert page.get_by_role("button", name="Copy caption").count() == 0
    assert "broken.jpg" in page.title()
    choose(page, COFFEE)
    explained(page)
    expect(page.locator("#result .problem")).to_be_hidden()


def test_words_that_cannot_be_said_are_explained_and_can_be_taken_back(page: Any, captioner: Captioner) -> None:
    choose(page, CAT)
    explained(page)
    page.get_by_text("Play with the caption").click()
    page.get_by_label("Must say").fill("xylophone")
    page.get_by_role("button", name="Caption again").click()
    expect(page.locator("#result .problem")).to_contain_text("xylophone")
    assert words(page) == captioner.caption(CAT).text, "nothing was changed"
    assert page.get_by_label("Must say").input_value() == "xylophone", "to be mended"
    page.get_by_label("Must say").fill("w5")
    page.get_by_role("button", name="Caption again").click()
    expect(page.locator("#result .problem")).to_be_hidden()
    expect(page.locator(".before")).to_be_visible()
    assert words(page) == captioner.caption(CAT, must=["w5"]).text
    page.get_by_role("button", name="Reset").click()
    expect(page.locator(".before")).to_have_count(0)
    assert words(page) == captioner.caption(CAT).text
    assert page.get_by_role("switch").count() == len(captioner.views)


@pytest.mark.parametrize("ending", ["tiff", "jp2"])
def test_what_the_browser_cannot_show_has_a_preview(page: Any, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"photo.{ending}"
    with Image.open(CAT) as image:
        image.save(file)
    choose(page, file)
    explained(page)
    page.wait_for_function("() => document.querySelector('.photo img').naturalWidth > 0")
    assert page.evaluate("document.querySelector('.photo img').naturalWidth") <= 1024
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as HTML").click()
    assert download.value.suggested_filename == "photo.html"
    assert page.trouble == []


def test_back_forward_and_reload_keep_what_was_shown(page: Any, captioner: Captioner) -> None:
    choose(page, CAT, COFFEE)
    expect(page.locator("#progress")).to_have_text("2 of 2 captioned")
    page.locator("#cards .card").first.click()
    explained(page)
    page.go_back()
    expect(page.locator("#album")).to_be_visible()
    page.go_forward()
    expect(page.locator("#result .file")).to_have_text("cat.jpg")
    explained(page)
    page.wait_for_timeout(300)  # it is saved when it is explained
    page.reload()
    explained(page)
    assert words(page) == captioner.caption(CAT).text
    expect(page.locator("#result .file")).to_have_text("cat.jpg")
    page.wait_for_function("() => document.querySelector('.photo img').naturalWidth > 0")
    page.get_by_role("link", name="All 2 photos").click()
    expect(page.locator("#cards .card")).to_have_count(2)
    page.get_by_role("link", name="haav").click()
    expect(page.locator("#home")).to_be_visible()
    assert page.trouble == []


def test_photos_that_are_added_join_those_that_are_there(page: Any) -> None:
    choose(page, CAT, COFFEE)
    expect(page.locator("#progress")).to_have_text("2 of 2 captioned")
    choose(page, SAMPLES / "bird.jpg")
    explained(page)
    expect(page.locator("#result .file")).to_have_text("bird.jpg")
    page.get_by_role("button", name="Previous").click()
    expect(page.locator("#result .file")).to_have_text("coffee.jpg")
    page.go_back()
    expect(page.locator("#result .file")).to_have_text("bird.jpg")
    page.go_back()
    expect(page.locator("#cards .card")).to_have_count(3)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#home")).to_be_visible()
    page.reload()
    page.wait_for_selector("#samples .stack")
    assert page.get_by_role("link", name="All 3 photos").count() == 0


def test_a_sample_has_an_address_for_others_and_a_photo_of_another_browser_is_explained(
    page: Any, site: str, captioner: Captioner
) -> None:
    page.locator("#samples .card").first.click()
    explained(page)
    address = page.url
    assert "#sample-" in address
    name = page.locator("#result .file").inner_text()
    other = page.context.new_page()
    other.goto(address)
    explained(other)
    assert words(other) == captioner.caption(SAMPLES / name).text
    other.goto(f"{site}/#photo-99")
    expect(other.locator("#status")).to_contain_text("only in the browser that opened it")
    assert other.url.rstrip("#/") == site
    other.close()


def test_a_download_opens_with_the_network_cut(page: Any, tmp_path: Path) -> None:
    choose(page, CAT)
    explained(page)
    said = words(page)
    file = saved(page, "Save as HTML", tmp_path)
    page.context.set_offline(True)
    page.goto(file.as_uri())
    explained(page)
    assert words(page) == said
    assert page.locator(".heat").count() == 1
    page.context.set_offline(False)
    assert page.trouble == []


def test_the_server_going_away_is_said(page: Any) -> None:
    page.context.set_offline(True)
    choose(page, CAT)
    expect(page.locator("#result .problem")).to_contain_text("The server cannot be reached")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    explained(page)


def test_the_page_asks_for_the_key_of_a_server_that_has_one(browser: Any, start_server: Callable[..., str]) -> None:
    page = browser.new_page()
    page.goto(start_server(api_key="a-key"))
    page.get_by_label("API key of this server").fill("another")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#problem")).to_have_text("This is not the key of this server.")
    page.get_by_label("API key of this server").fill("a-key")
    page.get_by_role("button", name="Use it").click()
    page.locator("#samples .card").first.click()
    explained(page)
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#problem")).to_be_hidden()
    page.close()


# Sentences: the model of these tests retrieves none


def sentence_page(tmp_path: Path, image: str) -> Path:
    left, right = (0.0, 0.0, 0.6, 0.6), (0.4, 0.4, 1.0, 1.0)
    places = [
        {"label": "A cat on a sofa.", "box": left},
        {"label": "A cat on a sofa.", "box": right},
        {"label": "two dogs", "box": right},
    ]
    look = {"weight": 1.0, "heads": [], "places": [[0, 0.4], [1, 0.3], [2, 0.2]], "lost": 0.2, "instead": "dog"}
    word = {"word": "cat", "probability": 0.6, "confidence": 0.7, "looks": {"text": look, "more": look}}
    view = {"title": "captions of similar photos", "shows": "sentences", "position": 0, "places": places}
    data = {
        "caption": "cat",
        "confidence": 0.7,
        "words": [word | {"alternatives": [["dog", 0.2]], "content": True, "disagreement": 0}],
        "views": {"text": view, "more": view | {"position": 1}},
        "without": {"text": "a dog", "more": "a cow"},
        "alone": {"text": "a cat", "more": "a pig"},
    }
    with Image.open(image) as photo:
        page = render_explanation("קובץ.jpg", photo.convert("RGB"), data)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    return tmp_path / "page.html"


def test_sentences_are_listed_once_with_the_crops_that_found_them(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(sentence_page(tmp_path, CAT).as_uri())
    first = page.locator(".view-card").first
    assert first.locator(".sentences .text").all_inner_texts() == ["A cat on a sofa.", "two dogs"]
    assert first.locator(".sentences .share").all_inner_texts() == ["70\u00a0%", "20\u00a0%"]
    assert [item.locator(".crop").count() for item in first.locator("li").all()] == [2, 1]
    assert first.locator("mark").all_inner_texts() == ["cat"]
    crop = first.locator(".crop").nth(1)
    assert crop.evaluate("element => getComputedStyle(element).backgroundPosition") == "100% 100%"
    assert "dog instead" in first.locator(".bars").inner_text()
    assert "“cat” less likely: 60\u00a0% → 40\u00a0%" in first.locator(".bars").inner_text()
    assert page.locator(".counterfactuals td").all_inner_texts() == ["a cat", "a pig"]
    assert page.locator(".file").get_attribute("dir") == "auto", "names may run from right to left"
    page.close()


# Everybody


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_has_the_caption_in_sight_and_needs_no_sideways_scrolling(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    choose(page, CAT)
    explained(page)
    page.wait_for_function("() => document.querySelector('.photo img').naturalWidth > 0")
    box = page.locator(".caption").bounding_box()
    assert box["y"] + box["height"] < 740, "on the first screen, under the photo"
    assert page.locator(".photo").bounding_box()["y"] < box["y"]
    page.get_by_text("Play with the caption").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("link", name="API").click()
    page.wait_for_load_state()  # with its style sheet
    page.wait_for_selector("table")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_can_be_read_at_twice_the_size(page: Any) -> None:
    page.set_viewport_size({"width": 640, "height": 400})  # what a window of 1280 × 800 has at 200 %
    choose(page, CAT, COFFEE)
    page.wait_for_selector("#cards .stack")
    assert page.evaluate("document.documentElement.scrollWidth") <= 640
    page.locator("#cards .card").first.click()
    explained(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 640


def test_nothing_moves_for_those_who_ask_for_it(page: Any) -> None:
    page.emulate_media(reduced_motion="reduce")
    choose(page, CAT)
    explained(page)
    page.locator(".word").nth(1).hover()
    moving = "document.getAnimations().filter((each) => each.playState === 'running').length"
    assert page.evaluate(moving) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Any, scheme: str, tmp_path: Path) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    assert serious_faults(page) == []
    choose(page, CAT)
    explained(page)
    page.get_by_text("Play with the caption").click()
    assert serious_faults(page) == []
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no")
    choose(page, CAT, tmp_path / "broken.jpg")
    expect(page.locator("#progress")).to_have_text("2 of 3 captioned, 1 failed")
    assert serious_faults(page) == []
    page.locator("#cards .card").nth(2).click()
    expect(page.locator("#result .problem")).to_be_visible()
    assert serious_faults(page) == []
    page.get_by_role("link", name="API").click()
    page.wait_for_load_state()  # with its style sheet
    page.wait_for_selector("table")
    assert serious_faults(page) == []


def serious_faults(page: Any) -> list[tuple[str, str]]:
    faults = Axe().run(page).response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in faults if fault["impact"] in ("serious", "critical")]
