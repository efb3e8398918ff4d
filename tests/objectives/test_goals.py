"""Objectives beside the return, and limits on costs, in MPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ValueOperator

from minerva_torchrl import MPOLoss
from minerva_torchrl.objectives import CostLimit, Objective
from minerva_torchrl.objectives.critics import TwoHotCritic
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    assert_equal,
    gradients,
    make_actor,
    make_transitions,
    run,
    total_loss,
    with_updater,
)
from tests.objectives.family_problem import Free, make_family_actor, make_family_data

GAMMA = 0.9


def make_loss(outputs: int, objectives: Any = None, **kwargs: Any) -> MPOLoss:
    torch.manual_seed(0)
    network = Concatenate(nn.Linear(OBSERVATION_DIM + ACTION_DIM, outputs))
    critic = ValueOperator(network, ["observation", "action"])
    loss = MPOLoss(make_actor(), critic, objectives=objectives, num_action_samples=5, **kwargs)
    return with_updater(loss.make_value_estimator(gamma=GAMMA))


def with_rewards(data: TensorDict, own_keys: bool) -> TensorDict:
    second = torch.linspace(-1, 1, data.numel()).reshape(*data.shape, 1)
    if own_keys:
        return data.clone().set(("next", "energy"), second)
    return data.clone().set(("next", "reward"), torch.cat([data["next", "reward"], second], -1))


def test_no_other_objective_is_plain_mpo() -> None:
    data = make_transitions(6)
    assert_equal(run(make_loss(1, {}), data.clone()), run(make_loss(1), data.clone()), 0, 0)


@pytest.mark.parametrize("own_keys", [False, True])
def test_two_objectives_by_hand(own_keys: bool) -> None:
    """Each has its critic's target and its weights; the policy is fitted to their sum."""
    goal = Objective(0.02, init_temperature=3.0, reward="energy" if own_keys else None)
    loss = make_loss(2, {"energy": goal})
    data = with_rewards(make_transitions(6), own_keys)
    assert (("next", "energy") in loss.in_keys) is own_keys
    torch.manual_seed(0)
    step, _ = loss.e_step(data)
    torch.manual_seed(0)
    samples, values = loss._sample(data["next"].select("observation"), 5)
    rewards = data["next", "reward"]
    if own_keys:
        rewards = torch.cat([rewards, data["next", "energy"]], -1)
    discount = GAMMA * ~data["next", "terminated"]
    expected = torch.stack([values["value"].mean(0), values["energy"].mean(0)], -1)
    target = rewards + discount * expected
    torch.testing.assert_close(step["value_target"], target)
    weights = (samples["scores", "value"] / 1.0).softmax(-1)
    weights = weights + (samples["scores", "energy"] / 3.0).softmax(-1)
    weights = weights + samples["scores", "penalty"].softmax(-1)
    statistics = loss.policy.statistics(samples["basis"], weights)
    assert_equal(step["e_step"].statistics, statistics)
    output = run(loss, data)
    error = loss._online_outputs(data)[0, ..., 0] - target
    torch.testing.assert_close(output["loss_qvalue"], error.square().sum(-1).mean())
    torch.testing.assert_close(data["td_error"], error.abs().amax(-1))
    torch.testing.assert_close(output["target_value_energy"], target[..., 1].mean())
    assert set(output.keys()) == set(loss.out_keys)
    assert gradients(loss, total_loss(output))["duals.energy_temperature.raw"].any()
    loss.epsilon_energy = 0.5
    assert loss.epsilon_energy == 0.5


def test_scale_of_rewards_does_not_matter() -> None:
    """With solved temperatures the weights of an objective depend on its bound alone."""
    scores = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    loss = make_loss(2, {"energy": 0.05}, temperature_update="solve")
    weights = []
    for scale in (1.0, 1000.0):
        loss.temperatures["energy"].solve_(scale * scores, 0.05, sample_dim=-1)
        weights.append(loss.temperatures["energy"].weigh(scale * scores)[0])
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)


def test_cost_limit_by_hand() -> None:
    loss = make_loss(2, {"cost": CostLimit(-0.3, init_multiplier=2.0)})
    data = with_rewards(make_transitions(6), False)
    samples, values = loss._sample(data["next"].select("observation"), 5)
    combined = (values["value"] - 2 * values["cost"]).movedim(0, -1)
    torch.testing.assert_close(samples["scores", "value"], combined)
    torch.testing.assert_close(samples["costs", "cost"], values["cost"].mean(0))
    torch.manual_seed(0)
    step, metrics = loss.e_step(data)
    cost = step["e_step"].duals["cost", "cost"]
    valid = step["e_step"].mask
    torch.testing.assert_close(metrics["expected_cost"], cost[valid].mean())
    output = run(loss, data)
    torch.testing.assert_close(output["loss_cost_multiplier"], (2 * (-0.3 - cost[valid])).mean())
    slope = gradients(loss, total_loss(output))["duals.cost_multiplier.raw"]
    assert slope.sign() == (-0.3 - cost[valid].mean()).sign()
    assert loss.duals["cost_multiplier"].raw in set(loss.alpha_parameters())
    loss.threshold_cost = -1.0
    assert loss.threshold_cost == -1


def test_objectives_with_bins_have_supports_of_their_own() -> None:
    loss = make_loss(22, {"energy": 0.1}, critic=TwoHotCritic(-1.0, 1.0, 11, adaptive=True))
    data = with_rewards(make_transitions(6), False)
    data["next", "reward"][..., 1] += 100
    output = run(loss, data)
    assert output["clipped_targets_energy"] == 1
    assert loss.critics[1].support.high > loss.critics[0].support.high


@pytest.mark.parametrize(
    ("objectives", "message"),
    [
        ({"energy": None}, r"objectives\['energy'\] needs a bound"),
        ({"energy": 0.0}, r"objectives\['energy'\].epsilon must be positive and finite, got 0"),
        ({"value": 0.1}, "names of objectives must be identifiers other than 'value'"),
        ({"a b": 0.1}, "names of objectives must be identifiers"),
        ({"c": CostLimit(float("nan"))}, r"objectives\['c'\].threshold must be finite"),
        ({"c": CostLimit(1.0, -1.0)}, r"objectives\['c'\].init_multiplier must be positive"),
        ({"a": 0.1, "b": Objective(0.1, reward="b")}, "either all objectives have a reward entry"),
    ],
)
def test_rejects(objectives: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loss(2, objectives)


def test_rejects_a_list() -> None:
    with pytest.raises(
        TypeError, match=r"objectives must be a mapping from names to bounds, .* list"
    ):
        make_loss(2, ["energy"])


def test_rejects_data() -> None:
    loss = make_loss(2, {"energy": 0.1})
    with pytest.raises(ValueError, match=r"'reward'\) must have shape \(6, 2\)"):
        loss(make_transitions(6))
    network = nn.Sequential(nn.Linear(OBSERVATION_DIM + ACTION_DIM, 1))
    critic = ValueOperator(network, ["observation", "action"])
    with pytest.raises(ValueError, match="qvalue_network must write 2 outputs for 2 x 1 of a Sca"):
        MPOLoss(make_actor(), critic, objectives={"energy": 0.1})


# Bandits -----------------------------------------------------------------------------------------


class TwoGoals(nn.Module):
    """The return wants actions at 0.6, the other objective actions at zero."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        values = [-(action - 0.6).square().sum(-1), -action.square().sum(-1)]
        return torch.stack(values, -1) + 0 * observation[..., :1]


def train(goal: Any, network: nn.Module | None = None, steps: int = 64) -> tuple[float, MPOLoss]:
    torch.manual_seed(0)
    critic = TensorDictModule(
        network or TwoGoals(), ["observation", "action"], ["state_action_value"]
    )
    loss = MPOLoss(
        make_family_actor("normal", Free("normal", 0.3)),
        critic,
        objectives={"other": goal},
        num_action_samples=30,
        temperature_update="solve",
        action_penalization=False,
        epsilon_mean=0.1,
    )
    with_updater(loss.make_value_estimator(gamma=GAMMA))
    data = make_family_data("normal", 16)
    data["next", "reward"] = torch.zeros(16, 2)
    policy = torch.optim.Adam(loss.actor_network_params.parameters(), lr=0.02)
    duals = torch.optim.Adam(loss.alpha_parameters(), lr=0.1)
    loss.project_duals_after(duals)
    for step in range(steps):
        output = loss(data)
        policy.zero_grad()
        duals.zero_grad()
        total_loss(output).backward()
        policy.step()
        duals.step()
        if step % 4 == 3:
            loss.target_actor_network_params.data.copy_(loss.actor_network_params.data)
    parameters = dict(loss.actor_network_params.named_parameters())
    (loc,) = (p for key, p in parameters.items() if key.endswith("loc"))
    return loc.mean().item(), loss


def test_bounds_set_the_preference() -> None:
    """Between the two optima, nearer to that of the objective with the larger bound."""
    of_return, between, of_other = (train(epsilon)[0] for epsilon in (1e-4, 0.1, 2.0))
    assert of_return == pytest.approx(0.6, abs=0.12)
    assert of_other < between - 0.05 < of_return - 0.1


class ReturnAndCost(TwoGoals):
    """The second is a cost: the squared distance from zero."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return super().forward(observation, action) * torch.tensor([1.0, -1.0])


def test_cost_limit_is_kept() -> None:
    """Without a limit the cost would be 0.9: twice 0.6 squared and the variance."""
    loc, loss = train(CostLimit(0.5), ReturnAndCost(), steps=100)
    assert 0.2 < loc < 0.5
    samples, _ = loss._sample(make_family_data("normal", 64).select("observation"), 50)
    assert samples["costs", "other"].mean() < 0.6
