"""Batches side by side: the same results in the same order, and nothing left changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from haav.inference import parallel
from haav.inference.parallel import MOST, side_by_side

pytestmark = pytest.mark.usefixtures("two_threads")


def test_results_come_in_order_from_lanes_that_run_at_once() -> None:
    meeting = threading.Barrier(2, timeout=20)

    def work(part: int) -> tuple[int, int]:
        meeting.wait()  # nobody gets past it alone
        return part, torch.get_num_threads()

    assert list(side_by_side(work, range(8))) == [(part, 1) for part in range(8)]
    assert torch.get_num_threads() == 2


def test_an_endless_stream_is_taken_as_it_is_needed() -> None:
    taken: list[int] = []

    def stream() -> Iterator[int]:
        index = 0
        while True:
            taken.append(index)
            yield index
            index += 1

    results = side_by_side(lambda part: part, stream())
    assert [next(results) for _ in range(10)] == list(range(10))
    assert len(taken) <= 10 + 2 * 2
    results.close()
    assert torch.get_num_threads() == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane")]


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine of the tests is"""
    monkeypatch.setattr(parallel, "free_cores", lambda: 64)


@pytest.mark.usefixtures("_quiet")
def test_a_part_that_is_alone_has_all_threads() -> None:
    def work(part: int) -> tuple[str, int]:
        return threading.current_thread().name, torch.get_num_threads()

    assert list(side_by_side(work, [0])) == [(threading.current_thread().name, 2)]
    assert list(side_by_side(work, [])) == []
    torch.set_num_threads(1)
    assert list(side_by_side(work, [0, 1])) == [(threading.current_thread().name, 1)] * 2


def test_a_part_that_is_alone_leaves_busy_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(part: int) -> int:
        return torch.get_num_threads()

    for free, used in ((1, 1), (2, 2), (5, 2), (None, 2)):
        monkeypatch.setattr(parallel, "free_cores", lambda free=free: free)
        assert list(side_by_side(threads, [0])) == [used]
        assert torch.get_num_threads() == 2

    def fail(part: int) -> None:
        raise ValueError("part")

    monkeypatch.setattr(parallel, "free_cores", lambda: 1)
    with pytest.raises(ValueError, match="part"):
        list(side_by_side(fail, [0]))
    assert torch.get_num_threads() == 2


def test_an_error_comes_in_its_turn_and_ends_the_work() -> None:
    begun: list[int] = []

    def work(part: int) -> int:
        begun.append(part)
        if part == 2:
            raise ValueError("part 2")
        return part

    found: list[int] = []
    with pytest.raises(ValueError, match="part 2"):
        found.extend(side_by_side(work, range(1000)))
    assert found == [0, 1]
    assert len(begun) < 20
    assert torch.get_num_threads() == 2


def test_cores_that_do_not_divide_and_few_parts_leave_none_idle() -> None:
    def shares(threads: int, parts: int) -> list[int]:
        torch.set_num_threads(threads)
        meeting = threading.Barrier(min(threads, parts, MOST), timeout=20)

        def work(part: int) -> int:
            meeting.wait()
            return torch.get_num_threads()

        return sorted(side_by_side(work, range(parts)))

    assert shares(7, MOST) == [1, 2, 2, 2]
    assert shares(8, 2) == [4, 4]
    assert torch.get_num_threads() == 8


def test_calls_that_overlap_give_all_threads_back() -> None:
    torch.set_num_threads(4)
    one = side_by_side(lambda part: part, range(9))
    next(one)
    seen: list[int] = []

    def other() -> None:
        work = side_by_side(lambda part: torch.get_num_threads(), range(2))
        seen.extend(work)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [2, 2], "it shares out what there was before the first call's lanes"
    one.close()
    late: list[int] = []
    thread = threading.Thread(target=lambda: late.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert late == [4]
