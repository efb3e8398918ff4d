"""What on-policy algorithms share: settings, networks, and a learning rate that falls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchrl.data import OneHot
from torchrl.envs import EnvBase

from minerva_torchrl.algorithms.common import Algorithm, mlp, single_specs
from minerva_torchrl.algorithms.config import (
    CollectorConfig,
    EnvConfig,
    NetworkConfig,
    RunConfig,
)
from minerva_torchrl.algorithms.family import make_critic, make_policy
from minerva_torchrl.modules import (
    DirectModule,
    GaussianPolicy,
    PartedPolicy,
    StateIndependentScale,
)
from minerva_torchrl.modules.init import Initializer
from minerva_torchrl.modules.networks import Activation
from minerva_torchrl.objectives.critics import Critic
from minerva_torchrl.trainers import linear_lr_annealing

__all__ = ["OnPolicyAlgorithm", "OnPolicyConfig", "OnPolicyEnvConfig", "OnPolicyNetworkConfig"]


@dataclass(frozen=True)
class OnPolicyEnvConfig(EnvConfig):
    """The task, as on-policy algorithms see it."""

    num_envs: int = 8
    staggered: bool = True
    """Spread the copies over the length of an episode, by cutting their first ones short. A rollout
    then has all phases of an episode."""
    observation_norm: bool = True
    reward_scaling: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    reward_scaling_gamma: float | None = None
    """Discount of that return. By default that of the loss."""
    reward_scaling_reset: Literal["done", "termination"] = "done"
    """When that return begins anew: with each episode, or as in Gymnasium's ``NormalizeReward``,
    see :class:`~minerva_torchrl.envs.ReturnStdScaling`."""


@dataclass(frozen=True)
class OnPolicyNetworkConfig(NetworkConfig):
    """Tanh networks with orthogonal initialisation."""

    activation: Activation = "tanh"
    layer_norm: bool = False
    initializer: Initializer = "orthogonal"
    scale: Literal["softplus", "exp", "free"] = "free"
    init_scale: float = 0.6
    """Much larger, and most actions would be cut off at their bounds."""
    min_scale: float = 1e-8
    critic: Literal["scalar", "two_hot", "hl_gauss"] = "scalar"
    """What the critic predicts: the value, or probabilities of bins around it."""
    critic_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of that critic, as in ``network.critic_kwargs.v_max=100``."""
    shared: bool = False
    """Whether policy and critic have the same hidden layers, those of ``actor_sizes``."""


@dataclass(frozen=True)
class OnPolicyConfig(RunConfig):
    """What the settings of on-policy algorithms have."""

    env: OnPolicyEnvConfig = field(default_factory=OnPolicyEnvConfig)
    collector: CollectorConfig = field(default_factory=lambda: CollectorConfig(2048))
    network: OnPolicyNetworkConfig = field(default_factory=OnPolicyNetworkConfig)

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from super().problems()
        gamma = self.env.reward_scaling_gamma
        if gamma is not None and not 0 <= gamma <= 1:
            yield f"env.reward_scaling_gamma must be between 0 and 1, or null; got {gamma}."
        yield from self._problems_with_critic()

    def _problems_with_critic(self) -> Iterator[str]:
        kind, loss = self.network.critic, self.loss
        try:
            make_critic(kind, self.network.critic_kwargs)
        except ValueError as error:
            yield f"network.critic_kwargs: {error}"
        clip_value = getattr(loss, "clip_value", None)
        if kind != "scalar" and clip_value:
            off = "false" if clip_value is True else "null"
            yield (
                f"network.critic={kind} needs loss.clip_value={off}: only a scalar value can be "
                f"clipped; got {clip_value}."
            )
        error_of_scalar = getattr(loss, "loss_critic_type", "l2")
        if kind != "scalar" and error_of_scalar != "l2":
            yield (
                f"loss.loss_critic_type={error_of_scalar} is for network.critic=scalar, got {kind}."
            )


Config = TypeVar("Config", bound=OnPolicyConfig)


class OnPolicyAlgorithm(Algorithm[Config]):
    """An algorithm with a policy and a state-value critic, for continuous or discrete actions."""

    def make_networks(self, env: EnvBase) -> tuple[ProbabilisticTensorDictSequential, DirectModule]:
        """The policy of the task's actions, and a critic of states."""
        obs_dim, action_spec = single_specs(env)
        network, sizes = self.config.network, self.config.network.critic_sizes
        if isinstance(action_spec, OneHot):  # what presets say is for continuous actions
            network = replace(network, policy="gaussian")
        actor = make_policy(obs_dim, action_spec, network)
        policy = actor.module[0].module
        torso = None
        if network.shared:
            torso, sizes = _torso(policy, network), network.actor_sizes
        width = self.make_critic().width
        value = mlp(obs_dim, sizes, width, "value", network, torso=torso)
        return actor, DirectModule(value, in_keys=["observation"], out_keys=["state_value"])

    def make_critic(self) -> Critic:
        """What the outputs of the critic's network mean."""
        return make_critic(self.config.network.critic, self.config.network.critic_kwargs)

    def annealing(self, optimizer: Optimizer) -> LambdaLR:
        """Learning rates that fall to zero with the last rollout.

        Args:
            optimizer (Optimizer): has them.
        """
        frames_per_rollout = self.config.collector.frames_per_batch * self.config.env.frame_skip
        return linear_lr_annealing(optimizer, -(-self.config.total_frames // frames_per_rollout))


def _torso(policy: Any, network: OnPolicyNetworkConfig) -> nn.Module:
    """The hidden layers of a policy."""
    if isinstance(policy, (GaussianPolicy, PartedPolicy)):
        return policy.torso
    layers: Any = policy.loc_network if isinstance(policy, StateIndependentScale) else policy
    hidden = len(network.actor_sizes)
    norms = hidden if network.norm_every_layer else int(network.layer_norm)
    return layers[: 2 * hidden + norms]
