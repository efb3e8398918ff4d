"""From settings to a run's environments, and to the parts that its algorithm makes."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.objectives.common import LossModule
from torchrl.trainers import Trainer

from minerva_torchrl.algorithms import ALGORITHMS, RunConfig
from minerva_torchrl.envs import ReturnStdScaling, RunningObservationNorm, make_env
from minerva_torchrl.modules import keep_freed_memory
from minerva_torchrl.runs.strict import ConfigError

__all__ = [
    "Assembly",
    "assemble",
    "evaluation_seed",
    "make_actor_and_loss",
    "make_evaluation_env",
    "make_training_env",
    "resolve_device",
]

# Runs have seeds such as 0, 1, 2; those of their evaluations are far away from all of them.
_EVALUATION_SEED = 1_000_003


@dataclass
class Assembly:
    """What a run consists of."""

    env: TransformedEnv
    collector: Collector
    loss: LossModule
    trainer: Trainer
    replay_buffer: TensorDictReplayBuffer | None = None

    @property
    def actor(self) -> ProbabilisticTensorDictSequential:
        """The policy; deterministic or not, as the exploration type says."""
        return self.loss.actor_network


def assemble(config: RunConfig) -> Assembly:
    """Everything that a run of these settings trains with.

    Args:
        config (RunConfig): settings without problems.

    Returns:
        Its parts, seeded with ``config.seed``.
    """
    device = resolve_device(config.device)
    torch.manual_seed(config.seed)
    # Not used here, but some environments do.
    random.seed(config.seed)
    np.random.seed(config.seed)
    keep_freed_memory()
    env = make_training_env(config)
    loss = make_actor_and_loss(config, env, device)
    if config.compile.enabled:
        _compile_networks(loss, config.compile.mode)
    collector = Collector(
        env,
        loss.actor_network,
        frames_per_batch=config.collector.frames_per_batch,
        total_frames=-1,
        policy_device=device,
        env_device="cpu",
        storing_device="cpu",
        trust_policy=True,
    )
    algorithm = ALGORITHMS[config.algo](config)
    replay_buffer = algorithm.make_replay_buffer()
    try:
        trainer = algorithm.make_trainer(
            loss,
            replay_buffer,
            collector=collector,
            total_frames=config.total_frames,
            loss_module=loss,
            frame_skip=config.env.frame_skip,
            progress_bar=False,
            auto_log_optim_steps=False,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError([f"optim: {error}"]) from error
    return Assembly(env, collector, loss, trainer, replay_buffer)


def resolve_device(name: str) -> torch.device:
    """The device of a name, ``"auto"`` included; an error if it can't be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError([f"device {name!r} can't be used here: {reason}"]) from None
    return device


# Environments ------------------------------------------------------------------------------------


def make_training_env(config: RunConfig) -> TransformedEnv:
    """The environment to collect from, ``[num_envs]``."""
    arguments = asdict(config.env)
    reward_scaling = arguments.pop("reward_scaling", False)
    try:
        env = make_env(**arguments, seed=config.seed)
    except ValueError as error:
        raise ConfigError([f"env.name: {error}"]) from None
    if reward_scaling:
        env.append_transform(ReturnStdScaling(config.loss.gamma))
    return env


def make_evaluation_env(config: RunConfig, training_env: TransformedEnv) -> TransformedEnv:
    """Environments for evaluation: rewards as they are, statistics those of training, frozen."""
    norms = [t for t in training_env.transform if isinstance(t, RunningObservationNorm)]
    extra: dict[str, Any] = {}
    if config.eval.video and config.env.name.startswith("gym:"):
        extra["render_mode"] = "rgb_array"
    return make_env(
        config.env.name,
        num_envs=config.eval.episodes,
        seed=evaluation_seed(config),
        frame_skip=config.env.frame_skip,
        max_episode_steps=config.env.max_episode_steps,
        observation_norm=norms[0].frozen_view() if norms else False,
        **extra,
    )


def evaluation_seed(config: RunConfig) -> int:
    """Seed of the environments for evaluation."""
    if config.eval.seed is not None:
        return config.eval.seed
    return (config.seed + _EVALUATION_SEED) % 2**32


# Networks and losses -----------------------------------------------------------------------------


def make_actor_and_loss(config: RunConfig, env: TransformedEnv, device: torch.device) -> LossModule:
    """Networks for an environment, in the loss of the algorithm."""
    algorithm = ALGORITHMS[config.algo](config)
    try:
        actor, critic = algorithm.make_networks(env)
        several = isinstance(critic, (list, tuple))
        critics = [network.to(device) for network in (critic if several else [critic])]
        return algorithm.make_loss(actor.to(device), critics if several else critics[0])
    except (ValueError, TypeError) as error:
        raise ConfigError([f"loss: {error}"]) from error


def _compile_networks(loss: LossModule, mode: str) -> None:
    for name in ("actor_network", "critic_network", "qvalue_network"):
        network = getattr(loss, name, None)
        for module in () if network is None else network.modules():
            if isinstance(module, TensorDictModule) and not isinstance(
                module.module, (nn.ModuleList, TensorDictModule)
            ):
                module.module.compile(mode=mode)
