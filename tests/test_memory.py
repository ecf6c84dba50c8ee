"""Free memory of machines and containers, and the batches that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from haav import memory
from haav.views import batch_size
from haav.views.batch_size import MOST, PHOTO, fitting_batch


def set_memory(
    monkeypatch: pytest.MonkeyPatch, folder: Path, available: int, limit: str = "max", used: int = 0
) -> None:
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n", encoding="ascii")
    (folder / "max").write_text(f"{limit}\n", encoding="ascii")
    (folder / "current").write_text(f"{used}\n", encoding="ascii")
    monkeypatch.setattr(memory, "MEMINFO", folder / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", ((folder / "max", folder / "current"), (folder / "no", folder / "no")))


def test_this_machine_has_some_memory_left() -> None:
    free = memory.free_memory()
    assert free is not None
    assert 10_000_000 < free < 10**14


def test_a_machine_without_limits_has_what_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_memory(monkeypatch, tmp_path, 8 * 2**30)
    assert memory.free_memory() == 8 * 2**30


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_memory(monkeypatch, tmp_path, 8 * 2**30, limit=str(2**30), used=2**28)
    assert memory.free_memory() == 2**30 - 2**28
    set_memory(monkeypatch, tmp_path, 8 * 2**30, limit=str(2**30), used=2**31)
    assert memory.free_memory() == 0


def test_a_system_that_does_not_tell_gets_the_usual_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "no")
    monkeypatch.setattr(memory, "CGROUPS", ())
    assert memory.free_memory() is None
    assert fitting_batch() == MOST["cpu"]


@pytest.mark.parametrize(("photos", "batch"), [(0, 1), (1, 1), (3, 3), (8, 8), (1000, 8)])
def test_the_batches_of_all_threads_fit_into_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, photos: int, batch: int
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(batch_size.os, "cpu_count", lambda: threads)
    set_memory(monkeypatch, tmp_path, 2 * photos * 2 * threads * PHOTO + 4096)
    assert fitting_batch() == batch


def test_a_worker_with_a_part_of_the_cores_gets_that_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    set_memory(monkeypatch, tmp_path, 2 * 6 * 2 * threads * PHOTO + 4096)
    monkeypatch.setattr(batch_size.os, "cpu_count", lambda: threads)
    alone = fitting_batch()
    monkeypatch.setattr(batch_size.os, "cpu_count", lambda: 3 * threads)
    assert (alone, fitting_batch()) == (6, 2)
