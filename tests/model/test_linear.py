from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from haav.model.linear import Linear, linear


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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(24, 40), (40, 24)])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4), (3, 1), (2, 0)])
def test_products_in_training_and_their_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], sizes: tuple[int, int], bias: bool
) -> None:
    monkeypatch.setattr("haav.model.linear.mkl_is_slow", lambda: True)
    layer, x = Linear(*sizes, bias=bias), torch.randn(*shape, sizes[0], requires_grad=True)
    further = torch.randn(*shape, sizes[1])
    inputs = [x, *layer.parameters()]
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    product = linear(x, layer.weight, layer.bias)
    assert_close(product, expected, atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad((expected.relu() * further).sum(), inputs)
    # In place, as the feed-forward layer goes on
    found = torch.autograd.grad((product.relu_() * further).sum(), inputs)
    assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_products_of_frozen_weights_have_the_gradient_of_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haav.model.linear.mkl_is_slow", lambda: True)
    layer, x = Linear(8, 6).requires_grad_(False), torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert_close(x.grad, layer.weight.sum(dim=0).expand(3, 8))


def test_products_follow_autocast_and_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haav.model.linear.mkl_is_slow", lambda: True)
    layer, x = Linear(8, 6), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    assert layer.double()(x.double()).dtype is torch.float64
