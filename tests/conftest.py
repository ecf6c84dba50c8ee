from __future__ import annotations

import os
from collections.abc import Iterator

# Some virtual machines announce AMX and end a process that uses it (haav/machine.py). Read at torch's first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

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
