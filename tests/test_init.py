"""`import haav`: what it names, and what it does to the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import haav


def test_public_names_are_listed_before_they_are_used() -> None:
    script = "import haav; assert set(haav.__all__) <= set(dir(haav)), dir(haav)"
    subprocess.run([sys.executable, "-c", script], check=True)
    for name in haav.__all__:
        assert getattr(haav, name) is not None


@pytest.mark.parametrize(
    ("before", "own", "spins"),
    [
        ("", {}, "10000"),
        ("", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("", {"OMP_WAIT_POLICY": "passive"}, "None"),
        ("import torch", {}, "None"),
    ],
)
def test_threads_do_not_spin_for_long_unless_the_user_says_so_or_it_is_too_late(
    before: str, own: dict[str, str], spins: str
) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = f"{before}\nimport haav, os\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", script], env=plain | own, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spins
