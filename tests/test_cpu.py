"""Precisions that the processor cannot compute in are refused, not died of."""

from __future__ import annotations

import pytest

from haav import cpu
from haav.errors import ConfigError


@pytest.fixture(autouse=True)
def _fresh() -> None:
    cpu._bfloat16_status.cache_clear()


def test_bfloat16_is_refused_where_a_product_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(ConfigError, match="illegal instruction on this machine"):
        cpu.check_bfloat16()


def test_bfloat16_is_accepted_where_a_product_is_right() -> None:
    cpu.check_bfloat16()  # without AMX: tests/conftest.py
    assert cpu._bfloat16_status() == 0
