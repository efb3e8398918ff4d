"""A critic network for each objective, in the place of one with all outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ValueOperator

from minerva_torchrl import MPOLoss
from minerva_torchrl.objectives.critics import TwoHotCritic
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    assert_equal,
    make_actor,
    make_transitions,
    run,
    with_updater,
)
from tests.objectives.family_problem import make_family_actor, make_family_data
from tests.objectives.test_goals import with_rewards

INPUTS = OBSERVATION_DIM + ACTION_DIM
OBJECTIVES = {"energy": 0.05}


def make_critic(layer: nn.Linear) -> ValueOperator:
    return ValueOperator(Concatenate(layer), ["observation", "action"])


def rows(layer: nn.Linear, *indices: int) -> nn.Linear:
    """A layer of its own with some rows of another."""
    part = nn.Linear(layer.in_features, len(indices))
    part.load_state_dict({name: x[list(indices)] for name, x in layer.state_dict().items()})
    return part


def make_loss(network: Any, **kwargs: Any) -> MPOLoss:
    torch.manual_seed(0)
    kwargs = {"objectives": OBJECTIVES, "num_action_samples": 5} | kwargs
    return with_updater(MPOLoss(make_actor(), network, **kwargs).make_value_estimator(gamma=0.9))


@pytest.mark.parametrize("bins", [False, True])
def test_as_one_network_with_their_outputs(bins: bool) -> None:
    """All losses and metrics, and the gradients of both critics."""
    width = 7 if bins else 1
    kwargs = {"critic": TwoHotCritic(-3.0, 3.0, 7)} if bins else {}
    layer = nn.Linear(INPUTS, 2 * width)
    parts = [rows(layer, *range(i * width, (i + 1) * width)) for i in range(2)]
    whole = make_loss(make_critic(layer), **kwargs)
    value, energy = map(make_critic, parts)
    apart = make_loss({"energy": energy, "value": value}, **kwargs)
    data = with_rewards(make_transitions(6), own_keys=False)
    outputs = [run(loss, data.clone()) for loss in (whole, apart)]
    assert_equal(*outputs)
    for loss, output in zip((whole, apart), outputs, strict=True):
        output["loss_qvalue"].backward()
        assert all(p.grad is not None for p in loss.qvalue_network_params.parameters())
    found = [p.grad for p in apart.qvalue_network_params.parameters() if p.ndim == 2]
    gradient = torch.cat(found)
    expected = next(p.grad for p in whole.qvalue_network_params.parameters() if p.ndim == 2)
    torch.testing.assert_close(gradient, expected)


def test_ensembles() -> None:
    """A list of mappings, or one that is copied."""
    data = with_rewards(make_transitions(6), own_keys=False)
    layers = [nn.Linear(INPUTS, 2) for _ in range(2)]
    whole = make_loss([make_critic(layer) for layer in layers])
    mappings = [
        {"value": make_critic(rows(layer, 0)), "energy": make_critic(rows(layer, 1))}
        for layer in layers
    ]
    assert_equal(run(whole, data.clone()), run(make_loss(mappings), data.clone()))
    copied = make_loss(mappings[0], num_qvalue_nets=3)
    assert copied.num_qvalue_nets == 3
    assert run(copied, data.clone())["loss_qvalue"].isfinite()


def test_values_of_all_actions() -> None:
    """The outputs of one action stay together."""

    def critic(layer: nn.Module) -> TensorDictModule:
        return TensorDictModule(layer, ["observation"], ["action_value"])

    layer = nn.Linear(3, 6)
    parts = {"value": critic(rows(layer, 0, 2, 4)), "energy": critic(rows(layer, 1, 3, 5))}
    data = with_rewards(make_family_data("one-hot", 6), own_keys=False)
    losses = []
    for network in (critic(layer), parts):
        torch.manual_seed(0)
        loss = MPOLoss(make_family_actor("one-hot"), network, objectives=OBJECTIVES)
        losses.append(run(with_updater(loss), data.clone()))
    assert_equal(*losses)


@pytest.mark.parametrize(
    ("critic", "error", "message"),
    [
        ({"value": 1}, ValueError, r"for each of the objectives, \['value', 'energy'\]; got \["),
        ({"value": 1, "energy": 2}, TypeError, r"qvalue_network\['value'\] must be a TensorDictM"),
        ("shared", ValueError, r"qvalue_network\['energy'\] shares parameters"),
        ("wide", ValueError, r"qvalue_network\['energy'\] must write 2 outputs"),
        ("elsewhere", ValueError, r"must write 'state_action_value', but .* writes 'q'"),
    ],
)
def test_refused(critic: Any, error: type[Exception], message: str) -> None:
    network = make_critic(nn.Linear(INPUTS, 2))
    others = {
        "shared": network,
        "wide": TensorDictModule(nn.Linear(3, 3), ["observation"], ["state_action_value"]),
        "elsewhere": ValueOperator(
            Concatenate(nn.Linear(INPUTS, 2)), ["observation", "action"], ["q"]
        ),
    }
    if isinstance(critic, str):
        critic = {"value": network, "energy": others[critic]}
    with pytest.raises(error, match=message):
        make_loss(critic, critic=TwoHotCritic(0.0, 1.0, 2))


def test_width_that_shows_late() -> None:
    """A network that does not tell its width is refused with the first data."""
    networks = {
        name: make_critic(nn.Linear(INPUTS, n)) for name, n in (("value", 1), ("energy", 3))
    }
    with pytest.raises(ValueError, match=r"with 1 outputs for one value, got the shapes .* 3\)"):
        run(make_loss(networks), with_rewards(make_transitions(6), own_keys=False))
