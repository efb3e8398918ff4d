"""From settings to members of the family: policies, critics and objectives by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeVar

from torchrl.data import Composite, OneHot, TensorSpec
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from minerva_torchrl.algorithms.common import (
    gaussian_actor,
    gaussian_policy,
    mlp,
    scale_settings,
    torso_settings,
)
from minerva_torchrl.algorithms.config import NetworkConfig
from minerva_torchrl.algorithms.parted import FullNormal, part_keys, parted_policy
from minerva_torchrl.modules import (
    CholeskyPolicy,
    DirectModule,
    StateActionCritic,
)
from minerva_torchrl.objectives.critics import CRITICS, Critic
from minerva_torchrl.objectives.goals import CostLimit, Objective, resolve_objectives
from minerva_torchrl.text import close_names, did_you_mean

__all__ = ["CRITICS", "make_action_critic", "make_critic", "make_policy", "objectives_from"]

Made = TypeVar("Made")


def make_critic(name: str, arguments: Mapping[str, Any]) -> Critic:
    """A critic by its name in the settings.

    Args:
        name (str): one of :data:`CRITICS`.
        arguments (mapping): of its class.
    """
    return _made_of(CRITICS[name], arguments)


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
        try:
            goals[name] = _made_of(CostLimit if "threshold" in given else Objective, given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return resolve_objectives(goals)


def _made_of(kind: Callable[..., Made], arguments: Mapping[str, Any]) -> Made:
    """An object of a class whose arguments are in the settings."""
    parameters, title = signature(kind).parameters, kind.__name__
    for name in arguments:
        if name not in parameters:
            raise ValueError(
                f"{title} has no argument {name!r}. Allowed: {', '.join(parameters) or 'none'}."
                + did_you_mean(close_names(name, parameters))
            )
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ValueError(f"{title} needs {name}, got {', '.join(arguments) or 'nothing'}.")
    return kind(**arguments)


def make_policy(obs_dim: int, action_spec: TensorSpec, network: Any) -> ProbabilisticActor:
    """The policy of a run: categorical for discrete actions, else what the settings say.

    That of an action with several parts has such a distribution for each of them.

    Args:
        obs_dim (int): size of an observation.
        action_spec (TensorSpec): of a single action.
        network (NetworkConfig): the settings of the networks.
    """
    if isinstance(action_spec, Composite):
        _check_covariance(network)
        return parted_policy(obs_dim, action_spec, network)
    action_dim = action_spec.shape[-1]
    if isinstance(action_spec, OneHot):
        if network.policy != "gaussian":  # the default
            raise ValueError(
                f"network.policy={network.policy} does not fit a task whose actions are discrete."
            )
        logits = mlp(obs_dim, network.actor_sizes, action_dim, "loc", network)
        return ProbabilisticActor(
            DirectModule(logits, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            spec=action_spec,
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        )
    if network.policy != "full_covariance":
        policy = gaussian_policy(obs_dim, action_spec, network)
        return gaussian_actor(policy, action_spec, network.policy)
    _check_covariance(network)
    cholesky = CholeskyPolicy(
        obs_dim,
        action_dim,
        network.actor_sizes,
        scale_function=network.scale,
        **scale_settings(network),
        **torso_settings(network),
    )
    return ProbabilisticActor(
        DirectModule(cholesky, in_keys=["observation"], out_keys=["loc", "scale_tril"]),
        in_keys=["loc", "scale_tril"],
        spec=action_spec,
        distribution_class=FullNormal,
        return_log_prob=True,
    )


def _check_covariance(network: Any) -> None:
    if network.policy == "full_covariance" and (network.scale == "free" or network.tanh_mean):
        raise ValueError(
            "network.policy=full_covariance needs network.scale other than free and "
            f"network.tanh_mean=false, got {network.scale} and {network.tanh_mean}."
        )


def make_action_critic(
    obs_dim: int, action_spec: TensorSpec, network: NetworkConfig, outputs: int
) -> DirectModule:
    """A critic of observations and actions, or of all discrete actions at once.

    Args:
        obs_dim (int): size of an observation.
        action_spec (TensorSpec): of a single action.
        network (NetworkConfig): the settings of the networks.
        outputs (int): outputs for one action.
    """
    sizes, keys = network.critic_sizes, part_keys(action_spec)
    parts = action_spec.values() if isinstance(action_spec, Composite) else [action_spec]
    action_dim = sum(part.shape[-1] for part in parts)
    if isinstance(action_spec, OneHot):
        values = mlp(obs_dim, sizes, action_dim * outputs, "value", network)
        return DirectModule(values, in_keys=["observation"], out_keys=["action_value"])
    return DirectModule(
        StateActionCritic(
            obs_dim, action_dim, sizes, out_features=outputs, **torso_settings(network)
        ),
        in_keys=["observation", *keys],
        out_keys=["state_action_value"],
    )
