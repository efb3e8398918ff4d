"""What an algorithm is to a training run, and what several algorithms need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Any, ClassVar, Generic, TypeVar

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torchrl.data import TensorDictReplayBuffer, TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.objectives.common import LossModule
from torchrl.trainers import Trainer

from minerva_torchrl.algorithms.config import RunConfig
from minerva_torchrl.modules import DirectModule

__all__ = ["Algorithm", "Preset", "adam", "gaussian_actor", "single_specs"]

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
    run: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of a training run beyond these, by section."""
    description: str = ""
    """What it is, in words."""

    def settings(self) -> dict[str, dict[str, Any]]:
        """All of it as settings of a training run, by section."""
        sections = {name: dict(section) for name, section in self.run.items()}
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
    earlier: ClassVar[Mapping[str, Any]] = {"env.canonical_actions": False}
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
    """Size of an observation, and the spec of a single action.

    Args:
        env (EnvBase): with any batch size.
    """
    spec = env.action_spec
    for _ in env.batch_size:
        spec = spec[0]
    return env.observation_spec["observation"].shape[-1], spec


def gaussian_actor(policy: nn.Module, action_spec: TensorSpec) -> ProbabilisticActor:
    """A Gaussian policy without tanh.

    Args:
        policy (nn.Module): returns mean and standard deviation for observations.
        action_spec (TensorSpec): of a single action.
    """
    return ProbabilisticActor(
        DirectModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=action_spec,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def adam(parameters: Any, lr: float, eps: float) -> torch.optim.Adam:
    """Adam with one kernel for all parameters.

    Args:
        parameters (iterable): parameters or groups of them.
        lr (float): learning rate of groups without one.
        eps (float): the constant in the denominator.
    """
    return torch.optim.Adam(parameters, lr=lr, eps=eps, fused=True)
