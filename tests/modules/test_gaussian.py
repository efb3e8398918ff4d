from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor

from minerva_torchrl.modules import StateIndependentScale


def make_actor(head: StateIndependentScale) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(head, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


@pytest.mark.parametrize("batch", [(), (4,), (2, 5)])
def test_scale_is_free_and_follows_the_batch(batch: tuple[int, ...]) -> None:
    head = StateIndependentScale(nn.Linear(3, 2), action_dim=2, init_scale=0.4)
    loc, scale = head(torch.randn(*batch, 3))
    assert loc.shape == scale.shape == (*batch, 2)
    torch.testing.assert_close(scale, torch.full((*batch, 2), 0.4))
    head.log_scale.data = torch.tensor([0.0, 1.0])
    scale = head(torch.randn(*batch, 3))[1]
    torch.testing.assert_close(scale, torch.tensor([0.0, 1.0]).exp().expand(*batch, 2))


def test_log_probability_and_gradients() -> None:
    torch.manual_seed(0)
    head = StateIndependentScale(nn.Linear(3, 2), action_dim=2, init_scale=0.5)
    actor = make_actor(head)
    with set_exploration_type(ExplorationType.RANDOM):
        data = actor(TensorDict({"observation": torch.randn(6, 3)}, batch_size=[6]))
    expected = torch.distributions.Normal(data["loc"], 0.5).log_prob(data["action"]).sum(-1)
    torch.testing.assert_close(data["action_log_prob"], expected)
    actor.get_dist(data).log_prob(data["action"].detach()).sum().backward()
    # d/d(log sigma) of log N(a; mu, sigma) is ((a - mu) / sigma)^2 - 1.
    residual = ((data["action"] - data["loc"]) / 0.5).detach()
    torch.testing.assert_close(head.log_scale.grad, (residual.square() - 1.0).sum(0))
    assert head.loc_network.weight.grad.abs().sum() > 0


def test_deterministic_action_is_the_mean() -> None:
    actor = make_actor(StateIndependentScale(nn.Linear(3, 2), action_dim=2))
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        data = actor(TensorDict({"observation": torch.randn(6, 3)}, batch_size=[6]))
    assert torch.equal(data["action"], data["loc"])


@pytest.mark.parametrize("action_dim", [0, -1])
def test_rejects_action_dim(action_dim: int) -> None:
    with pytest.raises(ValueError, match=f"action_dim must be at least 1, got {action_dim}"):
        StateIndependentScale(nn.Linear(3, 2), action_dim=action_dim)


@pytest.mark.parametrize("init_scale", [0.0, -1.0, float("nan"), float("inf")])
def test_rejects_init_scale(init_scale: float) -> None:
    with pytest.raises(ValueError, match="init_scale must be positive and finite"):
        StateIndependentScale(nn.Linear(3, 2), action_dim=2, init_scale=init_scale)


def test_rejects_mean_of_another_size() -> None:
    head = StateIndependentScale(nn.Linear(3, 4), action_dim=2)
    with pytest.raises(ValueError, match=r"must return 2 action dimensions.*got 4"):
        head(torch.randn(5, 3))
