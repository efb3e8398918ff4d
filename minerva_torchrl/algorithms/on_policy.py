"""What on-policy algorithms share: settings, networks, and a learning rate that falls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchrl.data import OneHot
from torchrl.envs import EnvBase
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor

from minerva_torchrl.algorithms.common import Algorithm, gaussian_actor, single_specs
from minerva_torchrl.algorithms.config import (
    CollectorConfig,
    EnvConfig,
    NetworkConfig,
    RunConfig,
)
from minerva_torchrl.modules import DirectModule, StateIndependentScale, Tanh, orthogonal_init_
from minerva_torchrl.trainers import linear_lr_annealing

__all__ = ["OnPolicyAlgorithm", "OnPolicyConfig", "OnPolicyEnvConfig", "OnPolicyNetworkConfig"]


@dataclass(frozen=True)
class OnPolicyEnvConfig(EnvConfig):
    """The task, as on-policy algorithms see it."""

    num_envs: int = 8
    staggered: bool = False
    """Spread the copies over the length of an episode, by cutting their first ones short."""
    observation_norm: bool = True
    """Shift and scale observations by running statistics."""
    reward_scaling: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""


@dataclass(frozen=True)
class OnPolicyNetworkConfig(NetworkConfig):
    """Tanh networks with orthogonal initialisation."""

    init_scale: float = 0.4
    """Initial standard deviation, one free parameter per action dimension.

    Much larger, and most actions would be cut off at their bounds.
    """


@dataclass(frozen=True)
class OnPolicyConfig(RunConfig):
    """What the settings of on-policy algorithms have."""

    env: OnPolicyEnvConfig = field(default_factory=OnPolicyEnvConfig)
    collector: CollectorConfig = field(default_factory=lambda: CollectorConfig(2048))
    network: OnPolicyNetworkConfig = field(default_factory=OnPolicyNetworkConfig)


Config = TypeVar("Config", bound=OnPolicyConfig)


class OnPolicyAlgorithm(Algorithm[Config]):
    """An algorithm with a policy and a state-value critic, for continuous or discrete actions."""

    def make_networks(self, env: EnvBase) -> tuple[ProbabilisticTensorDictSequential, DirectModule]:
        """A Gaussian or categorical policy, and a critic of states."""
        obs_dim, action_spec = single_specs(env)
        out_dim, sizes = action_spec.shape[-1], self.config.network
        network = _tanh_mlp(obs_dim, out_dim, sizes.actor_sizes, last_gain=0.01)
        if isinstance(action_spec, OneHot):
            actor = ProbabilisticActor(
                DirectModule(network, in_keys=["observation"], out_keys=["logits"]),
                in_keys=["logits"],
                spec=action_spec,
                distribution_class=OneHotCategorical,
                return_log_prob=True,
            )
        else:
            policy = StateIndependentScale(network, out_dim, init_scale=sizes.init_scale)
            actor = gaussian_actor(policy, action_spec)
        value = _tanh_mlp(obs_dim, 1, sizes.critic_sizes, last_gain=1.0)
        return actor, DirectModule(value, in_keys=["observation"], out_keys=["state_value"])

    def annealing(self, optimizer: Optimizer) -> LambdaLR:
        """Learning rates that fall to zero with the last rollout.

        Args:
            optimizer (Optimizer): has them.
        """
        frames_per_rollout = self.config.collector.frames_per_batch * self.config.env.frame_skip
        return linear_lr_annealing(optimizer, -(-self.config.total_frames // frames_per_rollout))


def _tanh_mlp(
    in_features: int, out_features: int, sizes: tuple[int, ...], *, last_gain: float
) -> nn.Module:
    network = MLP(in_features, out_features, num_cells=list(sizes), activation_class=Tanh)
    return orthogonal_init_(network, last_gain=last_gain)
