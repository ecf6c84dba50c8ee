"""Names in messages."""

from __future__ import annotations

import os
import sys
import unicodedata

import pytest

from haav.errors import printable


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2J.jpg", r"\x1b[2J.jpg"),
        ("a\nb\r.jpg", r"a\x0ab\x0d.jpg"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\u2028", r"\u2028"),
        ("\x9b31m", r"\x9b31m"),
        ("\U000e0041", r"\U000e0041"),
        (os.fsdecode(b"caf\xe9.jpg"), r"caf\xe9.jpg"),
    ],
)
def test_characters_that_control_a_terminal_are_escaped(name: str, shown: str) -> None:
    assert printable(name) == shown


@pytest.mark.parametrize(
    "name",
    ["été à la plage.jpg", "写真 [1].jpg", "می‌خواهم.png", "👩‍👧.png", "Shot at 1.00\u202fPM.png"],
)
def test_names_as_people_write_them_are_left_alone(name: str) -> None:
    assert printable(name) == name


def test_lines_of_a_message_are_kept_where_asked_for() -> None:
    assert printable("a\x1b\n  b", lines=True) == "a\\x1b\n  b"


def test_nothing_printed_controls_a_terminal_or_fails_to_be_written() -> None:
    shown = printable("".join(map(chr, range(sys.maxunicode + 1))))
    shown.encode("utf-8")
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
