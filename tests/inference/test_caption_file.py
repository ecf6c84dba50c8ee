"""Files of captions: what they record, when they are continued, and when not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from haav.cli.main import main
from haav.errors import DataError, ImageError
from haav.inference.caption_file import CaptionFile, MadeWith
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import CaptionedPhoto, PhotoItem
from haav.types import Caption
from helpers import SAMPLES, save_model

MADE_WITH = MadeWith("model", "0123456789ab", {"beam": 3})


def captioned(name: str, text: str = "a dog") -> CaptionedPhoto:
    return CaptionedPhoto(PhotoItem(name, lambda: b""), caption=Caption(text, (), 0.0, 0.5))


def failed(name: str) -> CaptionedPhoto:
    return CaptionedPhoto(PhotoItem(name, lambda: b""), error=ImageError("broken"))


def names_in(path: Path) -> list[str]:
    return [json.loads(line)["image"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "text",
    [
        "my diary\n",
        "my diary",
        '[{"image_id": 1}]',
        '{"a": 1}\n',
        '{"image": "a.jpg", "label": "dog"}\n{"image": "b.jpg", "label": "cat"}\n',
        '{"image": "a", "caption": "b"}',
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, text: str) -> None:
    out = tmp_path / "captions.jsonl"
    out.write_text(text)
    if not text.endswith("\n") and text.startswith('{"image": '):
        with CaptionFile(out, MADE_WITH):  # a line of ours that was cut off before its end
            assert out.read_text() == ""
        return
    with pytest.raises(DataError, match="Name another file with --out"):
        CaptionFile(out, MADE_WITH)
    assert out.read_text() == text


def test_standard_input_is_another_photo_each_time(tmp_path: Path) -> None:
    with CaptionFile(tmp_path / "c.jsonl", MADE_WITH) as file:
        file.add([captioned("-"), captioned("/b.jpg")])
    with CaptionFile(tmp_path / "c.jsonl", MADE_WITH) as file:
        assert file.done == {"/b.jpg"}


def test_a_photo_is_known_by_any_path_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with CaptionFile("c.jsonl", MADE_WITH) as file:
        file.add([captioned("photos/a.jpg")])
    assert names_in(tmp_path / "c.jsonl") == [str(tmp_path / "photos" / "a.jpg")]
    monkeypatch.chdir(tmp_path / "photos")
    with CaptionFile("../c.jsonl", MADE_WITH) as file:
        assert "a.jpg" in file
        assert str(tmp_path / "photos" / "a.jpg") in file
        assert "photos/a.jpg" not in file


def test_captions_of_another_origin_are_refused_or_replaced(tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    with CaptionFile(out, MADE_WITH) as file:
        file.add([captioned("/a.jpg")])
    before = out.read_bytes()
    for other, shown in (
        (MadeWith("new", "ba9876543210", {"beam": 3}), "model new (ba9876543210), beam 3"),
        (MadeWith("model", "0123456789ab", {"beam": 5, "n_best": 2}), "model model (0123456789ab), beam 5, n_best 2"),
        (MadeWith("model", "0123456789ab", {}), "model model (0123456789ab), default settings"),
    ):
        with pytest.raises(DataError) as error:
            CaptionFile(out, other)
        assert f"  there     model model (0123456789ab), beam 3\n  this run  {shown}\n" in str(error.value)
        assert "Replace them with --overwrite, or name another file with --out." in str(error.value)
        assert out.read_bytes() == before
    with CaptionFile(out, MadeWith("moved", "0123456789ab", {"beam": 3})) as file:
        assert "/a.jpg" in file, "the same model in another folder"
    with CaptionFile(out, MadeWith("new", "ba9876543210", {}), overwrite=True) as file:
        assert not file.done
        assert out.read_bytes() == before, "until there is something new"
        file.add([failed("/c.jpg")])
        assert out.read_bytes() == before, "a failure does not replace captions"
        file.add([captioned("/b.jpg")])
    assert names_in(out) == ["/c.jpg", "/b.jpg"]
    out.write_text('{"image": "a.jpg", "caption": "of version 0.2.0"}\n')
    with pytest.raises(DataError, match="there     not recorded: an earlier version of haav wrote it"):
        CaptionFile(out, MADE_WITH)


def test_only_captions_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8 a photo")
    with pytest.raises(DataError, match="does not hold captions of haav"):
        CaptionFile(tmp_path / "photo.jpg", MADE_WITH, overwrite=True)
    assert (tmp_path / "photo.jpg").read_bytes() == b"\xff\xd8 a photo"
    (tmp_path / "empty").write_bytes(b"")
    with CaptionFile(tmp_path / "empty", MADE_WITH, overwrite=True) as file:
        file.add([captioned("/a.jpg")])
    assert names_in(tmp_path / "empty") == ["/a.jpg"]


OTHER_RUN = """
import sys
from haav.inference.caption_file import CaptionFile, MadeWith
try:
    CaptionFile(sys.argv[1], MadeWith("model", "0123456789ab", {"beam": 3}))
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("failed", [False, True])
def test_two_runs_do_not_write_to_one_file(tmp_path: Path, failed: bool) -> None:
    out = tmp_path / "c.jsonl"
    if failed:  # then the file is replaced by one without the line, and the lock must be on the new one
        out.write_text('{"image": "/b.jpg", "error": "broken"}\n')

    def other_run() -> str:
        words = [sys.executable, "-c", OTHER_RUN, str(out)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    with CaptionFile(out, MADE_WITH) as file:
        assert f"another run writes to {out}" in other_run()
        with pytest.raises(DataError, match="another run writes to"):
            CaptionFile(out, MADE_WITH)
        file.add([captioned("/a.jpg")])
    assert other_run() == ""
    assert names_in(out) == ["/a.jpg"]


def test_a_run_records_its_model_and_settings_and_refuses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "c.jsonl"
    words = ["caption", str(SAMPLES / "cat.jpg"), "--model", str(model), "--out", str(out)]
    assert main([*words, "--beam", "2"]) == 0
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["image"] == str(SAMPLES / "cat.jpg")
    assert row["made_with"]["model"] == "model"
    assert row["made_with"]["settings"] == {"beam": 2, "max_words": 8}, "of the model, and of the command"
    assert main([*words, "--decode.beam", "2"]) == 0, "the same in other words"
    assert "1 captions, 1 of them kept" in capsys.readouterr().out
    for flags in ([], ["--beam", "2", "--views", "cells"], ["--beam", "2", "--never", "w9"]):
        assert main([*words, *flags]) == 1
        assert "captions of another model or of other settings" in capsys.readouterr().err
    assert main([*words, "--views", "cells", "--overwrite"]) == 0
    assert "1 captions, 0 of them kept" in capsys.readouterr().out
    assert main([*words, "--views", "cells", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_model_is_told_by_its_files(tmp_path: Path) -> None:
    from haav.inference.captioner import Captioner
    from haav.inference.options import CaptionOptions

    home = save_model(tmp_path / "model")
    captioner = Captioner.from_pretrained(home)

    def made_with() -> dict[str, object]:
        return asdict(MadeWith.of([str(home)], CaptionOptions(), captioner.config, None))

    before = made_with()
    assert made_with() == before
    with open(home / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert made_with()["fingerprint"] != before["fingerprint"]


def test_other_files_beside_a_model_do_not_make_it_another_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    config = Captioner.from_pretrained(model).config

    def fingerprint() -> str:
        return MadeWith.of([str(model)], CaptionOptions(), config, None).fingerprint

    before = fingerprint()
    (model / "scores.json").write_text("{}")
    assert fingerprint() == before
    (model / "vocabulary.json").write_text((model / "vocabulary.json").read_text() + " ")
    assert fingerprint() != before


def test_a_linked_file_stays_a_link_and_keeps_its_rights(tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    with CaptionFile(target, MADE_WITH) as file:
        file.add([captioned("/a.jpg"), failed("/b.jpg")])
    target.chmod(0o600)
    link.symlink_to(target)
    with CaptionFile(link, MADE_WITH) as file:  # rewritten without the failure
        file.add([captioned("/b.jpg")])
    assert link.is_symlink()
    assert names_in(target) == ["/a.jpg", "/b.jpg"]
    assert target.stat().st_mode & 0o777 == 0o600
