"""From settings to members of the family: policies, critics and objectives by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import distributions as D
from torch import nn
from torchrl.data import OneHot, TensorSpec
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from minerva_torchrl.algorithms.common import gaussian_actor
from minerva_torchrl.modules import (
    CholeskyPolicy,
    ControlTorso,
    DirectModule,
    GaussianPolicy,
    StateActionCritic,
)
from minerva_torchrl.objectives.critics import (
    CategoricalCritic,
    Critic,
    GaussianMixtureCritic,
    HLGaussCritic,
    QuantileCritic,
    ScalarCritic,
    TwoHotCritic,
)
from minerva_torchrl.objectives.goals import CostLimit, Objective, resolve_objectives

__all__ = ["CRITICS", "make_action_critic", "make_critic", "make_policy", "objectives_from"]

CRITICS: dict[str, type[Critic]] = {
    "scalar": ScalarCritic,
    "categorical": CategoricalCritic,
    "two_hot": TwoHotCritic,
    "hl_gauss": HLGaussCritic,
    "quantile": QuantileCritic,
    "gaussian_mixture": GaussianMixtureCritic,
}
"""Critics by the names that ``network.critic`` takes."""


def make_critic(name: str, arguments: Mapping[str, Any]) -> Critic:
    """A critic by its name in the settings.

    Args:
        name (str): one of :data:`CRITICS`.
        arguments (mapping): of its class.
    """
    try:
        return CRITICS[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{CRITICS[name].__name__} {str(error).partition(') ')[2]}") from error


def objectives_from(settings: Mapping[str, Any]) -> dict[str, Objective | CostLimit]:
    """Objectives by name, from numbers or sections of settings.

    Args:
        settings (mapping): by name a bound, or the fields of an ``Objective`` or a ``CostLimit``.
    """
    goals: dict[str, Any] = {}
    for name, given in settings.items():
        if not isinstance(given, Mapping):
            goals[name] = given
            continue
        kind = CostLimit if "threshold" in given else Objective
        try:
            goals[name] = kind(**given)
        except TypeError as error:
            message = str(error).partition(") ")[2]
            raise ValueError(f"{name}: {kind.__name__} {message}") from error
    return resolve_objectives(goals)


def make_policy(kind: str, obs_dim: int, action_spec: TensorSpec, sizes: Any) -> ProbabilisticActor:
    """The policy of a run.

    Args:
        kind (str): ``network.policy``.
        obs_dim (int): size of an observation.
        action_spec (TensorSpec): of a single action.
        sizes (MPONetworkConfig): the settings of the networks.
    """
    discrete = isinstance(action_spec, OneHot)
    if kind != "auto" and (kind == "categorical") != discrete:
        actions = "discrete" if discrete else "continuous"
        raise ValueError(f"network.policy={kind} does not fit a task whose actions are {actions}.")
    action_dim = action_spec.shape[-1]
    if discrete:
        network = nn.Sequential(torso := ControlTorso(obs_dim, sizes.actor_sizes))
        network.append(_small(nn.Linear(torso.out_features, action_dim)))
        return ProbabilisticActor(
            DirectModule(network, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            spec=action_spec,
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        )
    if kind == "full_covariance":
        return ProbabilisticActor(
            DirectModule(
                CholeskyPolicy(obs_dim, action_dim, sizes.actor_sizes, init_scale=sizes.init_scale),
                in_keys=["observation"],
                out_keys=["loc", "scale_tril"],
            ),
            in_keys=["loc", "scale_tril"],
            spec=action_spec,
            distribution_class=FullNormal,
            return_log_prob=True,
        )
    policy = GaussianPolicy(obs_dim, action_dim, sizes.actor_sizes, init_scale=sizes.init_scale)
    return gaussian_actor(policy, action_spec)


class FullNormal(D.MultivariateNormal):
    """A multivariate normal distribution whose deterministic sample is its mean."""

    def __init__(self, loc: Any, scale_tril: Any) -> None:
        super().__init__(loc, scale_tril=scale_tril, validate_args=False)

    @property
    def deterministic_sample(self) -> Any:
        """The mean."""
        return self.mean


def make_action_critic(
    obs_dim: int, action_spec: TensorSpec, sizes: tuple[int, ...], outputs: int
) -> DirectModule:
    """A critic of observations and actions, or of all discrete actions at once.

    Args:
        obs_dim (int): size of an observation.
        action_spec (TensorSpec): of a single action.
        sizes (tuple of int): units of the hidden layers.
        outputs (int): outputs for one action.
    """
    action_dim = action_spec.shape[-1]
    if isinstance(action_spec, OneHot):
        network = nn.Sequential(torso := ControlTorso(obs_dim, sizes))
        network.append(_small(nn.Linear(torso.out_features, action_dim * outputs)))
        return DirectModule(network, in_keys=["observation"], out_keys=["action_value"])
    return DirectModule(
        StateActionCritic(obs_dim, action_dim, sizes, out_features=outputs),
        in_keys=["observation", "action"],
        out_keys=["state_action_value"],
    )


def _small(layer: nn.Linear) -> nn.Linear:
    """A last layer whose outputs are near zero at first."""
    nn.init.trunc_normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer
