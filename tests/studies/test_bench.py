from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from haav.cli.main import main
from haav.studies.bench import convolution_gigaflops, seconds
from haav.views.embedded.folded_conv import FoldedConv
from helpers import save_model


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = FoldedConv(torch.zeros(8, 3, 3, 3), torch.zeros(8), 2, 1, "none", padding=1)
        self.depthwise = FoldedConv(torch.zeros(8, 1, 3, 3), torch.zeros(8), 1, 8, "relu6", padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.depthwise(self.first(pixels.float()))
        return found


def test_convolutions_are_counted_as_by_hand() -> None:
    whole = 2 * (8 * 4 * 4) * 27  # eight maps of 4 × 4, each number a sum over 3 × 3 × 3
    each = 2 * (8 * 4 * 4) * 9
    assert convolution_gigaflops(TwoLayers(), 8) == pytest.approx((whole + each) / 1e9)


def test_the_quickest_run_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0, 22.0, 30.0, 35.0])
    monkeypatch.setattr("haav.studies.bench.time.perf_counter", lambda: next(clock))
    calls: list[int] = []
    assert seconds(lambda: calls.append(1), 3) == 2.0
    assert len(calls) == 4


@pytest.mark.slow
def test_the_command_measures_everything_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model")
    assert main(["bench", "--model", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(value > 0 for value in found.values() if isinstance(value, float))
    assert {"a large matrix product in int8, GFLOP/s", "peak memory, GB"} <= found.keys()
