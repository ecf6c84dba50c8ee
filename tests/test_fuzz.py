"""Some cases of every kind of damaged input; `make test-all`, or python tests/fuzz.py, runs many more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the web extra")
pytest.importorskip("onnxruntime", reason="needs the onnx extra")
from fuzz import KINDS, MANY, fuzz, mutate, mutate_pages

QUICK = ("pictures", "annotations", "models", "store_files", "requests")
"""the others run in the long run only"""


@pytest.mark.parametrize("kind", QUICK)
def test_damaged_input_is_taken_or_refused(kind: str) -> None:
    found = fuzz(kind, 120, first=1_000_000)
    assert found["failures"] == []
    assert found["taken"] + found["refused"] == 120
    assert found["taken"] > 0
    assert found["refused"] > 0 or kind == "requests"  # there, a refusal is an answer too


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cases"), MANY.items())
def test_much_damaged_input_is_taken_or_refused(kind: str, cases: int) -> None:
    assert fuzz(kind, cases)["failures"] == []


def test_every_kind_is_part_of_the_long_run() -> None:
    assert MANY.keys() == KINDS.keys()
    assert sum(MANY.values()) == 1_000_000


@pytest.mark.parametrize(("kind", "says"), [("raises", "ZeroDivisionError"), ("crashes", "died of signal 11")])
def test_what_goes_wrong_is_seen_case_by_case(
    kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzz.MEMORY_DISK", tmp_path)
    failures = fuzz(kind, 2, first=7)["failures"]
    assert [index for index, _ in failures] == [7, 8]
    assert all(says in text for _, text in failures)
    assert not list(tmp_path.iterdir())


def test_mutations_of_pages_keep_their_number_and_can_be_repeated() -> None:
    pages = bytes(range(256)) * 64
    changed = [mutate_pages(pages, random.Random(index)) for index in range(200)]
    assert {len(data) for data in changed} == {len(pages)}
    assert len(set(changed)) > 150
    assert changed == [mutate_pages(pages, random.Random(index)) for index in range(200)]


def test_mutations_change_what_they_are_given_and_can_be_repeated() -> None:
    changed = [mutate(b"0123456789" * 10, random.Random(index)) for index in range(200)]
    assert len(set(changed)) > 150
    assert changed == [mutate(b"0123456789" * 10, random.Random(index)) for index in range(200)]
