"""Activations equal PyTorch's, in value, gradient and what they do to their input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from minerva_torchrl.modules import ELU, Tanh

PAIRS = [
    pytest.param(Tanh, torch.tanh, id="Tanh"),
    pytest.param(ELU, nn.functional.elu, id="ELU"),
]
SIZES = [7, 2**13, 2**18]  # plain, faster without gradients, faster with gradients as well

Activation = type[Tanh] | type[ELU]
Function = Callable[[Tensor], Tensor]


def inputs(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """From far below to far above zero, with zero, infinities and tiny numbers among them."""
    special = [0.0, -0.0, 1e-7, -1e-7, torch.inf, -torch.inf, 100.0]
    return torch.cat([torch.tensor(special), torch.linspace(-12, 12, size - 7)]).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("activation", "function"), PAIRS)
class TestValues:
    @pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
    def test_without_gradients(
        self,
        activation: Activation,
        function: Function,
        inplace: bool,
        size: int,
        dtype: torch.dtype,
        atol: float,
    ) -> None:
        x = inputs(size, dtype)
        expected, before = function(x), x.clone()
        with torch.no_grad():
            actual = activation(inplace=inplace)(x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
        if not inplace:
            torch.testing.assert_close(x, before, rtol=0, atol=0)

    def test_gradients(
        self, activation: Activation, function: Function, inplace: bool, size: int
    ) -> None:
        upstream = torch.linspace(-1, 1, size)
        gradients = []
        for f in (activation(inplace=inplace), function):
            leaf = inputs(size).requires_grad_()
            y = f(leaf * 1.0)
            (gradient,) = torch.autograd.grad(y, leaf, upstream)
            gradients.append(gradient)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)

    def test_missing_numbers_stay_missing(
        self, activation: Activation, function: Function, inplace: bool, size: int
    ) -> None:
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                assert activation(inplace=inplace)(torch.full((size,), torch.nan)).isnan().all()


def test_second_derivative() -> None:
    x = torch.linspace(-2, 2, 2**17, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(Tanh()(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    y = x.detach().tanh()
    torch.testing.assert_close(second, -2 * y * (1 - y.square()))


def test_under_vmap() -> None:
    """As in ensembles of critics, whose parameters are stacked."""
    x = torch.randn(2, 2**17)
    torch.testing.assert_close(torch.vmap(Tanh())(x), x.tanh(), rtol=0, atol=3e-7)
    gradient = torch.vmap(torch.func.grad(lambda row: Tanh()(row).sum()))(x)
    torch.testing.assert_close(gradient, 1 - x.tanh().square(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("activation", "function"), PAIRS)
def test_on_the_meta_device(activation: Activation, function: Function) -> None:
    x = torch.empty(2**18, device="meta")
    assert activation()(x).shape == function(x).shape


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("activation", "function"), PAIRS)
def test_in_compiled_code(activation: Activation, function: Function, gradients: bool) -> None:
    compiled = torch.compile(activation(), backend="eager", fullgraph=True)
    x = inputs(2**13)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=3e-7)
