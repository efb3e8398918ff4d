"""What an algorithm is to a training run, and what several algorithms need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl.data import TensorDictReplayBuffer, TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal
from torchrl.objectives.common import LossModule
from torchrl.trainers import Trainer

from minerva_torchrl.algorithms.config import NetworkConfig, OptimConfig, RunConfig
from minerva_torchrl.modules import (
    DirectModule,
    GaussianPolicy,
    StateIndependentScale,
    TanhInterval,
    initialize_,
)
from minerva_torchrl.modules.networks import torso_layers
from minerva_torchrl.objectives.specs import action_bounds

__all__ = [
    "Algorithm",
    "Preset",
    "action_bounds_for",
    "bounded_mean",
    "gaussian_actor",
    "gaussian_policy",
    "make_optimizer",
    "mlp",
    "scale_settings",
    "single_specs",
    "torso_settings",
]

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class Preset:
    """Named settings: keyword arguments by the object that takes them."""

    loss: dict[str, Any] = field(default_factory=dict)
    """Of the loss."""
    stepper: dict[str, Any] = field(default_factory=dict)
    """Of the optimisation stepper."""
    adam: dict[str, Any] = field(default_factory=dict)
    """Of every ``torch.optim.Adam``."""
    run: dict[str, Any] = field(default_factory=dict)
    """Settings of a training run beyond these, with sections as dictionaries."""
    description: str = ""
    """What it is, in words."""

    def settings(self) -> dict[str, Any]:
        """All of it as settings of a training run, with sections as dictionaries."""
        sections = dict(self.run)
        sections["loss"] = {**sections.get("loss", {}), **self.loss}
        adam = {f"adam_{name}": value for name, value in self.adam.items()}
        sections["optim"] = {**sections.get("optim", {}), **self.stepper, **adam}
        return sections


class Algorithm(ABC, Generic[Config]):
    """An algorithm: its settings and presets, and the parts of a training run that it makes.

    A run calls the four methods in the order that they have here. Everything else, from
    environments to checkpoints, is the run's.

    Args:
        config (RunConfig): settings of the algorithm, without problems.
    """

    title: ClassVar[str]
    """How the algorithm is written."""
    config_class: ClassVar[type[RunConfig]]
    """Its settings. The default of ``algo`` is the algorithm's name."""
    presets: ClassVar[Mapping[str, Preset]] = {"default": Preset()}
    """Named settings."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Old names of settings, dotted, and the new ones. The old ones still work, with a warning."""
    earlier: ClassVar[Mapping[str, Any]] = {
        "env.canonical_actions": False,
        "collector.noise": "white",
        "network.scale_gain": 1.0,
    }
    """Settings that the files of older runs lack, dotted, and what those runs did."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def about(cls) -> str:
        """The first sentence of the docstring."""
        return cleandoc(cls.__doc__ or "").partition("\n")[0]

    @abstractmethod
    def make_networks(self, env: EnvBase) -> tuple[ProbabilisticTensorDictSequential, Any]:
        """The policy, and the critic or a list of critics, for an environment. On the CPU."""

    @abstractmethod
    def make_loss(self, actor: ProbabilisticTensorDictSequential, critic: Any) -> LossModule:
        """The loss of such networks, with ``actor_network`` and its value estimator."""

    def make_replay_buffer(self) -> TensorDictReplayBuffer | None:
        """What checkpoints keep as the replay buffer. Nothing, for an on-policy algorithm."""
        return None

    @abstractmethod
    def make_trainer(
        self, loss: Any, replay_buffer: TensorDictReplayBuffer | None, **arguments: Any
    ) -> Trainer:
        """The trainer, with its optimisers.

        Args:
            loss (LossModule): from :meth:`make_loss`.
            replay_buffer (TensorDictReplayBuffer, optional): from :meth:`make_replay_buffer`.
            **arguments: of TorchRL's :class:`~torchrl.trainers.Trainer`, to be passed on.

        Returns:
            The trainer. A run reads what was left out as not finite from its ``finite_batches``,
            a :class:`~minerva_torchrl.trainers.hooks.FiniteBatches`.
        """


def single_specs(env: EnvBase) -> tuple[int, TensorSpec]:
    """Size of an observation, and the spec of a single action, a ``Composite`` if it has parts.

    Args:
        env (EnvBase): with any batch size.
    """
    spec = env.full_action_spec["action"]
    for _ in env.batch_size:
        spec = spec[0]
    return env.observation_spec["observation"].shape[-1], spec


def torso_settings(network: NetworkConfig) -> dict[str, Any]:
    """Those arguments that all networks have."""
    names = ("activation", "layer_norm", "norm_every_layer", "initializer")
    return {name: getattr(network, name) for name in names}


def mlp(
    obs_dim: int,
    sizes: Sequence[int],
    out_features: int,
    part: Literal["loc", "value"],
    network: NetworkConfig,
    *,
    torso: nn.Module | None = None,
) -> nn.Sequential:
    """Hidden layers and a linear head for observations, as settings want them.

    Args:
        obs_dim (int): size of an observation.
        sizes (sequence of int): sizes of the hidden layers.
        out_features (int): size of the output.
        part (str): what the head is for, see :func:`~minerva_torchrl.modules.initialize_`.
        network (NetworkConfig): the settings.

    Keyword Args:
        torso (nn.Module, optional): hidden layers of another network to share.
    """
    if torso is None:
        settings = torso_settings(network)
        del settings["initializer"]
        layers = torso_layers(obs_dim, sizes, **settings)
    else:
        layers = [torso]
    stacked = nn.Sequential(*layers, nn.Linear(sizes[-1], out_features))
    if torso is None:
        initialize_(stacked[:-1], "hidden", network.initializer)
    initialize_(stacked[-1], part, network.initializer)
    return stacked


def scale_settings(network: NetworkConfig) -> dict[str, Any]:
    """How a standard deviation starts, moves and ends.

    Args:
        network (NetworkConfig): the settings.
    """
    names = ("init_scale", "min_scale", "max_scale", "scale_gain")
    return {name: getattr(network, name) for name in names}


def gaussian_policy(obs_dim: int, action_spec: TensorSpec, network: NetworkConfig) -> nn.Module:
    """Mean and standard deviation of a policy, as settings want them.

    Args:
        obs_dim (int): size of an observation.
        action_spec (TensorSpec): of a single action.
        network (NetworkConfig): the settings.
    """
    action_dim, bound = action_spec.shape[-1], bounded_mean(network, action_spec)
    scales = scale_settings(network)
    if network.scale != "free":
        return GaussianPolicy(
            obs_dim,
            action_dim,
            network.actor_sizes,
            **scales,
            scale_function=network.scale,
            loc_activation=bound,
            **torso_settings(network),
        )
    mean = mlp(obs_dim, network.actor_sizes, action_dim, "loc", network)
    mean = mean if bound is None else mean.append(bound)
    return StateIndependentScale(mean, action_dim, **scales)


def bounded_mean(network: NetworkConfig, action_spec: TensorSpec) -> TanhInterval | None:
    """What keeps the mean of a Gaussian within the bounds; ``None`` if settings want nothing.

    Args:
        network (NetworkConfig): the settings.
        action_spec (TensorSpec): of a single action.
    """
    if network.tanh_mean is None:  # where it fits
        bounds = action_bounds(action_spec) if network.policy == "gaussian" else None
        return None if bounds is None else TanhInterval(*bounds)
    if not network.tanh_mean:
        return None
    return TanhInterval(*action_bounds_for("network.tanh_mean=true", action_spec))


def gaussian_actor(
    policy: nn.Module,
    action_spec: TensorSpec,
    family: Literal["gaussian", "tanh_gaussian"] = "gaussian",
) -> ProbabilisticActor:
    """A Gaussian policy, with or without tanh.

    Args:
        policy (nn.Module): returns mean and standard deviation for observations.
        action_spec (TensorSpec): of a single action.
        family (str): ``"gaussian"`` (default) or ``"tanh_gaussian"``.
    """
    distribution: dict[str, Any] = {"distribution_class": IndependentNormal}
    if family == "tanh_gaussian":
        low, high = action_bounds_for("network.policy=tanh_gaussian", action_spec)
        distribution = {
            "distribution_class": TanhNormal,
            "distribution_kwargs": {"low": low, "high": high, "tanh_loc": False},
        }
    return ProbabilisticActor(
        DirectModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=action_spec,
        return_log_prob=True,
        **distribution,
    )


def action_bounds_for(name: str, action_spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """The bounds of an action, which a setting needs.

    Args:
        name (str): the setting, with its value.
        action_spec (TensorSpec): of a single action.
    """
    bounds = action_bounds(action_spec)
    if bounds is None:
        raise ValueError(f"{name} needs an action with bounds, got {type(action_spec).__name__}.")
    return bounds


def make_optimizer(groups: Mapping[str, Any], optim: OptimConfig, *, eps: float) -> Optimizer:
    """The optimiser that settings want, with one kernel for all parameters.

    Args:
        groups (mapping): parameters and their learning rate, by the name of the rate without
            ``lr_``. The parameters that two groups share belong to the first one.
        optim (OptimConfig): the settings.

    Keyword Args:
        eps (float): the constant in Adam's denominator.
    """
    seen: set[Tensor] = set()
    parts = []
    for name, (parameters, lr) in groups.items():
        own = [parameter for parameter in parameters if parameter not in seen]
        seen.update(own)
        parts.append({"params": own, "lr": lr, "name": name})
    if optim.optimizer == "adam":
        return torch.optim.Adam(parts, eps=eps, fused=True)
    sgd = torch.optim.SGD(parts, momentum=optim.momentum, fused=True)
    if optim.momentum:
        # What the first step starts from anyway; PyTorch leaves it undefined if that is left out.
        for parameter in seen:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd
