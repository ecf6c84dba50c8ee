"""Graphs are stored in fewer bytes and compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("onnxruntime", reason="needs the onnx extra")
pytest.importorskip("onnx", reason="needs the onnx extra")
import onnx
import onnxruntime

from haav.export.compress import in_rows
from haav.export.graph import write_graph


def on_a_grid(rows: int, columns: int, seed: int) -> np.ndarray:
    """8-bit steps, of which each row has its largest, times a scale per row"""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-127, 128, (rows, columns))
    steps[:, 0] = 127
    return steps.astype(np.float32) * rng.uniform(1e-4, 1, (rows, 1)).astype(np.float32)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(16, 40), st.floats(0.1, 10), st.integers(0, 1000))
def test_8_bit_weights_are_recognised_also_after_a_factor(rows: int, columns: int, factor: float, seed: int) -> None:
    weights = on_a_grid(rows, columns, seed) * np.float32(factor)
    stored = in_rows(weights)
    assert stored is not None
    steps, scales = stored
    assert steps.dtype == np.int8
    np.testing.assert_allclose(steps * scales, weights, rtol=4e-7)


def test_other_weights_are_not() -> None:
    weights = on_a_grid(8, 32, 0)
    weights[3, 5] *= 1.001
    assert in_rows(weights) is None
    assert in_rows(np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)) is None
    assert in_rows(np.ones((40, 2), np.float32)) is None, "a scale per row would take more than it saves"
    stored = in_rows(np.zeros((2, 32), np.float32))
    assert stored is not None
    assert not stored[0].any()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        grid, half, single = (
            torch.from_numpy(on_a_grid(64, 64, 1)),
            torch.randn(64, 64).half().float(),
            torch.randn(64, 64),
        )
        self.weights = [grid, half, single]
        self.bias = torch.randn(64)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.layer_norm(F.linear(x, weight, self.bias), (64,))
        return x


def test_a_graph_stores_each_tensor_in_the_smallest_type_that_holds_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers, x = Layers(), torch.randn(5, 64)
    write_graph(layers, (x,), ["x"], ["y"], {}, tmp_path / "layers.onnx")
    large = [t for t in onnx.load(tmp_path / "layers.onnx").graph.initializer if np.prod(t.dims) == 64 * 64]
    kinds = (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)
    assert sorted(tensor.data_type for tensor in large) == sorted(kinds)
    session = onnxruntime.InferenceSession(tmp_path / "layers.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], layers(x).numpy(), atol=1e-5)
