from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from minerva_torchrl.modules import PopArtHead, orthogonal_init_


def make_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 16),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


def assert_orthogonal(weight: torch.Tensor, gain: float) -> None:
    rows, columns = weight.shape
    gram = weight @ weight.T if rows <= columns else weight.T @ weight
    torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-5, atol=1e-6)


def test_gains_and_biases() -> None:
    network = orthogonal_init_(make_network(), last_gain=0.01)
    assert_orthogonal(network[0].weight, math.sqrt(2.0))
    assert_orthogonal(network[3].weight, math.sqrt(2.0))
    assert_orthogonal(network[5].weight, 0.01)
    for layer in (network[0], network[3], network[5]):
        assert not layer.bias.any()


def test_hidden_gain() -> None:
    network = orthogonal_init_(make_network(), hidden_gain=1.5)
    assert_orthogonal(network[0].weight, 1.5)
    assert_orthogonal(network[5].weight, 1.0)


def test_other_layers_are_left_alone() -> None:
    network = make_network()
    nn.init.constant_(network[1].weight, 0.3)
    nn.init.constant_(network[1].bias, 0.7)
    orthogonal_init_(network)
    assert (network[1].weight == 0.3).all()
    assert (network[1].bias == 0.7).all()


def test_layer_without_bias_and_popart_head() -> None:
    network = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), PopArtHead(8))
    assert orthogonal_init_(network, last_gain=0.5) is network
    assert network[-1].weight.norm().item() == pytest.approx(0.5, rel=1e-5)


def test_rejects_network_without_linear_layers() -> None:
    with pytest.raises(ValueError, match=r"network must contain at least one nn.Linear, got Tanh"):
        orthogonal_init_(nn.Tanh())


# torch warns about the interface of lazy layers itself.
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_rejects_lazy_layers() -> None:
    with pytest.raises(ValueError, match="lazy layers"):
        orthogonal_init_(nn.LazyLinear(3))
