"""The assembled PPO loss where no look at a value on the host is accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import ClipPPOLoss

from minerva_torchrl.modules import DirectClipPPOLoss, PopArtClipPPOLoss, PopArtHead
from minerva_torchrl.objectives import estimate_advantage, make_ppo_loss
from tests.objectives.ppo_problem import (
    OBSERVATION_DIM,
    make_actor,
    make_critic,
    make_networks,
    make_rollout,
    total_loss,
)

LOSSES = [ClipPPOLoss, DirectClipPPOLoss, PopArtClipPPOLoss]


def make_critic_network(loss_class: type[ClipPPOLoss]) -> nn.Module:
    if loss_class is PopArtClipPPOLoss:
        return nn.Sequential(nn.Linear(OBSERVATION_DIM, 16), nn.Tanh(), PopArtHead(16)).double()
    return make_networks()[1]


def make_minibatch(loss_class: type[ClipPPOLoss]) -> tuple[nn.Module, nn.Module, TensorDict]:
    policy, critic = make_networks()[0], make_critic_network(loss_class)
    actor = make_actor(policy)
    loss = make_ppo_loss(actor, make_critic(critic), loss_class=loss_class)
    rollout = estimate_advantage(loss, make_rollout(actor))
    return policy, critic, rollout.reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("loss_class", LOSSES)
# TensorDict sets a flag of the compiler that newer versions of torch have dropped.
@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules.*:FutureWarning")
@pytest.mark.filterwarnings(r"ignore:Using lock_\(\) inside a compiled graph:UserWarning")
def test_ppo_compile(loss_class: type[ClipPPOLoss]) -> None:
    """The compiled loss has no graph break and gives the values and gradients of the plain one."""
    torch._dynamo.reset()
    policy, critic, data = make_minibatch(loss_class)
    loss = make_ppo_loss(make_actor(policy), make_critic(critic), loss_class=loss_class)
    parameters = list(loss.parameters())
    expected = loss(data.clone())
    gradients = torch.autograd.grad(total_loss(expected), parameters)
    output = torch.compile(loss, fullgraph=True, backend="aot_eager")(data.clone())
    for key in expected.keys():
        torch.testing.assert_close(output[key], expected[key], msg=key)
    actual = torch.autograd.grad(total_loss(output), parameters)
    for left, right in zip(actual, gradients, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.01])
@pytest.mark.parametrize("loss_class", LOSSES[1:])  # TorchRL's looks at the entropy
def test_ppo_meta(loss_class: type[ClipPPOLoss], entropy_coeff: float) -> None:
    """Tensors on the meta device have no values: whatever reads one on the host fails."""
    policy, critic, data = make_minibatch(loss_class)
    actor, value = make_actor(policy).to("meta"), make_critic(critic).to("meta")

    class BuiltOnTheHost(loss_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, device="cpu", **kwargs)  # TorchRL reads a coefficient here

    loss = make_ppo_loss(actor, value, entropy_coeff=entropy_coeff, loss_class=BuiltOnTheHost)
    loss, data = loss.to("meta"), data.to("meta")
    output = loss(data)
    assert all(x.is_meta and x.shape in ((), (1,)) for x in output.values())
    total_loss(output).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in loss.parameters())
    if isinstance(loss, DirectClipPPOLoss):
        alone = loss.losses(data)
        assert {"loss_objective", "loss_critic"} <= alone.keys()
        assert all(x.is_meta for x in alone.values())
