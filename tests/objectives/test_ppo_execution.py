"""The assembled PPO loss under the compiler, which accepts no look at a value on the host."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from minerva_torchrl.objectives import PopArtHead, estimate_advantage, make_ppo_loss
from tests.objectives.ppo_problem import (
    OBSERVATION_DIM,
    make_actor,
    make_critic,
    make_networks,
    make_rollout,
    total_loss,
)


def make_critic_network(popart: bool) -> nn.Module:
    if popart:
        return nn.Sequential(nn.Linear(OBSERVATION_DIM, 16), nn.Tanh(), PopArtHead(16)).double()
    return make_networks()[1]


def make_minibatch(popart: bool) -> tuple[nn.Module, nn.Module, TensorDict]:
    policy, critic = make_networks()[0], make_critic_network(popart)
    actor = make_actor(policy)
    loss = make_ppo_loss(actor, make_critic(critic))
    rollout = estimate_advantage(loss, make_rollout(actor))
    return policy, critic, rollout.reshape(-1)


@pytest.mark.parametrize("popart", [False, True])
# TensorDict sets a flag of the compiler that newer versions of torch have dropped.
@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules.*:FutureWarning")
@pytest.mark.filterwarnings(r"ignore:Using lock_\(\) inside a compiled graph:UserWarning")
def test_ppo_compile(popart: bool) -> None:
    """The compiled loss has no graph break and gives the values and gradients of the plain one."""
    torch._dynamo.reset()
    policy, critic, data = make_minibatch(popart)
    loss = make_ppo_loss(make_actor(policy), make_critic(critic))
    parameters = list(loss.parameters())
    expected = loss(data.clone())
    gradients = torch.autograd.grad(total_loss(expected), parameters)
    output = torch.compile(loss, fullgraph=True, backend="aot_eager")(data.clone())
    for key in expected.keys():
        torch.testing.assert_close(output[key], expected[key], msg=key)
    actual = torch.autograd.grad(total_loss(output), parameters)
    for left, right in zip(actual, gradients, strict=True):
        torch.testing.assert_close(left, right)
