from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # tests run in two processes on two cores


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
