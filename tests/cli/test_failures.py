"""What is said about photos that failed."""

from __future__ import annotations

import pytest

from haav.cli import output
from haav.cli.main import main
from haav.errors import ImageError
from haav.inference.stream import CaptionedPhoto, PhotoItem
from helpers import SAMPLES


def failed(name: str, error: str = "it is empty.") -> CaptionedPhoto:
    return CaptionedPhoto(PhotoItem(name, lambda: b""), error=ImageError(error))


def test_reasons_are_bounded_and_failures_are_counted_and_named_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with output.captions(130, 0, ["cells"], "colours", quiet=False) as show:
        for number in range(120):
            show(failed(f"{number}.jpg"))
    *reasons, summary = capsys.readouterr().err.splitlines()
    assert reasons == [f"{number}.jpg: it is empty." for number in range(100)]
    names = ", ".join(f"{number}.jpg" for number in range(10))
    assert summary == f"120 of 130 failed: {names} and 110 more."


def test_a_single_photo_needs_no_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with output.captions(1, 0, ["cells"], "colours", quiet=False) as show:
        show(failed("a.jpg"))
    assert capsys.readouterr().err == "a.jpg: it is empty.\n"


@pytest.mark.parametrize("error", ["a.jpg is empty.", "cannot read a.jpg: Permission denied."])
def test_a_reason_that_names_the_photo_is_said_as_it_is(error: str) -> None:
    assert output.failure(failed("a.jpg", error)) == error
    assert output.failure(failed("b/a.jpg", error)) == f"b/a.jpg: {error}"


@pytest.mark.parametrize(
    "words",
    [
        ["--decode.bean", "3"],
        ["--format", "xml"],
        ["--beam", "100000"],
        ["--batch", "0"],
        ["--overwrite"],
        ["--device", "gpu"],
        ["--seed", "3"],
        ["--views", "nothing"],
    ],
    ids=lambda words: words[0],
)
def test_wrong_usage_has_a_code_of_its_own(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", str(SAMPLES / "cat.jpg"), *words]) == 2
    assert words[0].removeprefix("--decode.").strip("-s") in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("gpu", "cuda:99"):
        assert main(["caption", str(SAMPLES / "cat.jpg"), "--device", device]) == 2
        assert f"device '{device}' cannot be used on this machine. Available: cpu" in capsys.readouterr().err


def test_a_forbidden_word_that_the_model_does_not_know_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", str(SAMPLES / "cat.jpg"), "--never", "catt,dog"]) == 0
    assert "does not know the word 'catt', so it never says it. Did you mean 'cat'?" in capsys.readouterr().err
    assert main(["caption", str(SAMPLES / "cat.jpg"), "--never", "catt", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
