from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from haav.model.linear import Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (2, 3, 4, 24), (0, 24)])
def test_packed_weights_give_the_same_product(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = Linear(24, 40, bias=bias).eval().requires_grad_(False), torch.randn(shape)
    with torch.no_grad():
        assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)


def test_changed_weights_are_packed_anew() -> None:
    layer, x = Linear(8, 8).eval().requires_grad_(False), torch.randn(3, 8)

    def check() -> None:
        with torch.no_grad():
            assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)

    check()
    with torch.no_grad():
        layer.weight *= 3
    check()
    layer.state_dict()["weight"].lerp_(torch.randn(8, 8), 0.5)  # as a moving average does
    check()
    layer.load_state_dict({"weight": torch.randn(8, 8), "bias": torch.randn(8)})
    check()
    layer.weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)
    check()
    layer.double().float()
    check()


@pytest.mark.parametrize("fused", [True, False])
def test_weights_in_training_are_never_stale(fused: bool) -> None:
    """A fused optimizer changes weights without a trace."""
    layer, x = Linear(8, 8).eval(), torch.randn(3, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        with torch.no_grad():
            assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
        layer(x).sum().backward()
        optimizer.step()


def test_packing_leaves_copies_pickles_and_gradients_alone() -> None:
    layer, x = Linear(8, 8).eval().requires_grad_(False), torch.randn(3, 8)
    with torch.no_grad():
        packed = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        with torch.no_grad():
            assert_close(other(x), packed)
    assert set(layer.state_dict()) == {"weight", "bias"}
    layer.requires_grad_(True)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
