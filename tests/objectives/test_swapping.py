"""Networks with other parameters for the time of a call."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

from minerva_torchrl.objectives.swapping import using


def make_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


def zeros_for(network: nn.Module) -> TensorDictParams:
    return TensorDictParams(TensorDict.from_module(network).data * 0, no_convert=True)


@pytest.fixture
def no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDictParams, "to_module", lambda *_, **__: pytest.fail("walked"))


@pytest.mark.usefixtures("no_walk")
@pytest.mark.parametrize("times", [1, 2])
def test_parameters_are_exchanged_and_put_back(times: int) -> None:
    network = make_network()
    own, params = list(network.parameters()), zeros_for(network)
    x = torch.ones(2)
    expected = network(x)
    for _ in range(times):
        with using(network, params):
            assert not network(x).any()
            assert network[0].weight is params["0", "weight"]
    assert all(a is b for a, b in zip(network.parameters(), own, strict=True))
    torch.testing.assert_close(network(x), expected)


@pytest.mark.usefixtures("no_walk")
def test_put_back_after_an_error() -> None:
    network = make_network()
    own = network[0].weight
    with pytest.raises(RuntimeError), using(network, zeros_for(network)):
        network(torch.ones(5))
    assert network[0].weight is own


@pytest.mark.usefixtures("no_walk")
def test_one_within_the_other() -> None:
    network = make_network()
    own, params = network[0].weight, zeros_for(network)
    other = TensorDictParams(TensorDict.from_module(network).data + 1, no_convert=True)
    with using(network, params):
        with using(network, other):
            assert network[0].weight is other["0", "weight"]
        assert network[0].weight is params["0", "weight"]
    assert network[0].weight is own


def test_tensors_that_were_replaced_are_noticed() -> None:
    network = make_network()
    params = zeros_for(network)
    with using(network, params):
        pass
    params["0", "weight"] = torch.full((3, 2), 7.0)
    with using(network, params):
        assert (network[0].weight == 7).all()


def test_gradients_go_to_the_given_parameters() -> None:
    network = make_network()
    params = TensorDictParams(TensorDict.from_module(network).data.clone())
    with using(network, params):
        network(torch.ones(2)).backward()
    assert params["0", "weight"].grad is not None
    assert network[0].weight.grad is None


@pytest.mark.parametrize("network", [nn.BatchNorm1d(2), nn.Sequential(*2 * [nn.Linear(2, 2)])])
def test_buffers_and_shared_modules_take_the_usual_way(network: nn.Module) -> None:
    own = list(network.parameters())
    with using(network, zeros_for(network)):
        assert not any(parameter.any() for parameter in network.parameters())
    assert all(a is b for a, b in zip(network.parameters(), own, strict=True))


def test_many_sets_do_not_pile_up() -> None:
    from minerva_torchrl.objectives import swapping

    network = make_network()
    sets = [zeros_for(network) for _ in range(20)]
    for params in sets:
        with using(network, params):
            assert network[0].weight is params["0", "weight"]
    assert len(swapping._known[network]) <= swapping._SETS_PER_NETWORK
