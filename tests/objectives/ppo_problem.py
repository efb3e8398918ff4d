"""Networks and data for the tests of PPO."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor

from minerva_torchrl.modules import StateIndependentScale, orthogonal_init_

OBSERVATION_DIM, ACTION_DIM = 3, 2
LEARNING_RATE = 3e-3


def make_mlp(outputs: int, last_gain: float, inputs: int = OBSERVATION_DIM) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs)
    )
    return orthogonal_init_(layers, last_gain=last_gain)


def make_actor(policy: nn.Module) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def make_critic(network: nn.Module) -> TensorDictModule:
    return TensorDictModule(network, in_keys=["observation"], out_keys=["state_value"])


def make_networks(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    policy = StateIndependentScale(make_mlp(ACTION_DIM, last_gain=0.5), ACTION_DIM, init_scale=0.6)
    return policy.to(dtype), make_mlp(1, last_gain=1.0).to(dtype)


def make_rollout(
    actor: ProbabilisticActor, batch: tuple[int, int] = (4, 16), seed: int = 1
) -> TensorDict:
    """Random transitions with terminations and truncations; actions sampled from the actor."""
    torch.manual_seed(seed)
    dtype = next(actor.parameters()).dtype
    done = torch.rand(*batch, 1) < 0.25
    terminated = done & (torch.rand(*batch, 1) < 0.5)
    rollout = TensorDict(
        {
            "observation": torch.randn(*batch, OBSERVATION_DIM, dtype=dtype),
            "next": {
                "observation": torch.randn(*batch, OBSERVATION_DIM, dtype=dtype),
                "reward": torch.randn(*batch, 1, dtype=dtype),
                "done": done,
                "terminated": terminated,
                "truncated": done & ~terminated,
            },
        },
        batch_size=batch,
    )
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return actor(rollout)


def total_loss(losses: TensorDict) -> Tensor:
    return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]


def gaussian_log_prob(action: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    squared = ((action - loc) / scale).square()
    return (-0.5 * squared - scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
