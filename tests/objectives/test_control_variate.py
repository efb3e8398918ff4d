"""Statistics of the fit without the sampling error that is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from minerva_torchrl import MPOLoss
from minerva_torchrl.objectives.policies import policy_family
from tests.objectives.base import gradients, total_loss, with_updater
from tests.objectives.family_problem import (
    Free,
    Payoff,
    make_family_actor,
    make_family_data,
)

SAMPLED = ["normal", "tanh", "full", "discrete parts", "hybrid"]
STATES, SAMPLES = 20_000, 6


class Indifferent(nn.Module):
    """A critic to which all actions are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(1))

    def forward(self, observation: Tensor, action: Any) -> Tensor:
        return self.value.expand(*observation.shape[:-1], 1)


def make_mpo(family: str, critic: nn.Module, **kwargs: Any) -> Any:
    module = TensorDictModule(critic, ["observation", "action"], ["state_action_value"])
    loss = MPOLoss(make_family_actor(family), module, **kwargs)
    return with_updater(loss.make_value_estimator(gamma=0.9))


def draw(kind: str) -> tuple[Any, Any, TensorDict]:
    """A family, the basis of samples of a policy, and the policy's description."""
    torch.manual_seed(0)
    actor = make_family_actor(kind, Free(kind))
    family = policy_family(actor, None, per_dim=False)
    with torch.no_grad():
        dist = actor.get_dist(TensorDict({"observation": torch.zeros(STATES, 3)}, [STATES]))
        return family, family.candidates(dist, SAMPLES).basis, family.describe(dist)


@pytest.mark.parametrize("kind", SAMPLED)
def test_equal_weights_leave_the_expectation(kind: str) -> None:
    family, basis, old = draw(kind)
    weights = torch.full((STATES, SAMPLES), 2.0 / SAMPLES)
    expected = family.expected_statistics(old)
    steady = family.steady_statistics(basis, weights, old)
    plain = family.statistics(basis, weights)
    for name in expected.keys(include_nested=True, leaves_only=True):
        torch.testing.assert_close(steady[name], 2.0 * expected[name], rtol=0, atol=1e-5)
        # What the samples say on average is what the family says it is.
        error = plain[name].std(0) / STATES**0.5
        assert ((plain[name] - 2.0 * expected[name]).mean(0).abs() <= 5 * error + 1e-6).all(), name


@pytest.mark.parametrize("kind", SAMPLED)
def test_same_expectation_with_less_noise(kind: str) -> None:
    """With weights that depend on the samples."""
    family, basis, old = draw(kind)
    everything = torch.cat(
        [leaf.flatten(2) for leaf in TensorDict(basis, [STATES, SAMPLES]).values(True, True)], -1
    )
    weights = (0.5 * everything.sum(-1)).softmax(-1)
    plain = family.statistics(basis, weights)
    steady = family.steady_statistics(basis, weights, old)
    for name in plain.keys(include_nested=True, leaves_only=True):
        difference = (steady[name] - plain[name]).flatten(1)
        error = difference.std(0) / STATES**0.5
        assert (difference.mean(0).abs() <= 5 * error + 1e-6).all(), name
        if name[-1] != "total" and name != "total":
            assert steady[name].var(0).mean() < 0.8 * plain[name].var(0).mean(), name


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("states", ["next", "both"])
def test_policy_stays_where_no_action_is_better(kind: str, states: str) -> None:
    """Samples that nothing prefers pull the policy about; without their error they do not."""
    for steady in (False, True):
        torch.manual_seed(0)
        loss = make_mpo(
            kind,
            Indifferent(),
            control_variate=steady,
            policy_states=states,
            action_penalization=False,
        )
        found = gradients(loss.actor_network_params, total_loss(loss(make_family_data(kind, 16))))
        largest = max(gradient.abs().max().item() for gradient in found.values())
        assert largest < 1e-6 if steady else largest > 1e-3


@pytest.mark.parametrize("kind", ["categorical", "one-hot"])
def test_nothing_changes_where_actions_are_enumerated(kind: str) -> None:
    found = []
    for steady in (False, True):
        torch.manual_seed(0)
        loss = make_mpo(kind, Payoff(), control_variate=steady)
        found.append(loss(make_family_data(kind, 16))["loss_actor"])
    assert torch.equal(*found)
