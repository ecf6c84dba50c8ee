from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # tests run in two processes on two cores


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As on a user's machine: batches run side by side"""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
