"""Precisions that the processor cannot compute in are refused, not died of. Busy cores are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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


def test_processes_that_want_a_core_leave_fewer_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        time.sleep(0.5)  # until they have started
        assert min(cpu.free_cores() or 0 for _ in range(20)) == 1
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    monkeypatch.setattr(cpu, "LOAD", tmp_path / "loadavg")
    assert cpu.free_cores() is None, "a system without such a file"
    (tmp_path / "loadavg").write_text("0.00 0.00 0.00 1/120 7\n")
    assert cpu.free_cores() == cores
    (tmp_path / "loadavg").write_text("0.00 0.00 0.00 0/0 0\n")
    assert cpu.free_cores() == cores, "a sandbox that counts nothing"
    (tmp_path / "loadavg").write_text("")
    assert cpu.free_cores() is None


@pytest.mark.parametrize(
    ("lines", "capability", "slow"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "AVX512", True),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "AVX2", False),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_mkl_is_slow_with_avx512_that_is_not_intels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, capability: str, slow: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(lines)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert cpu.mkl_is_slow.__wrapped__() is slow
