"""From settings to a run's environments, and to the parts that its algorithm makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.collectors import BaseCollector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.objectives.common import LossModule
from torchrl.trainers import Trainer

from minerva_torchrl.algorithms import ALGORITHMS, RunConfig
from minerva_torchrl.envs import ReturnStdScaling, RunningObservationNorm, make_env
from minerva_torchrl.modules import PinkNoiseActor, keep_freed_memory
from minerva_torchrl.runs.parts import UserParts, find_parts
from minerva_torchrl.runs.sizes import check_memory
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.text import one_line
from minerva_torchrl.trainers.collector import DirectCollector
from minerva_torchrl.trainers.compiled import CompiledGradients, why_not
from minerva_torchrl.trainers.stepping import GuardedStepper

__all__ = [
    "Assembly",
    "assemble",
    "evaluation_seed",
    "exploring",
    "make_actor_and_loss",
    "make_evaluation_env",
    "make_training_env",
    "resolve_compile",
    "resolve_device",
]

# Runs have seeds such as 0, 1, 2; those of their evaluations are far away from all of them.
_EVALUATION_SEED = 1_000_003
# Gradient steps after which half a minute of compiling is earned back, with a margin, and the
# second that it takes to record an update.
_STEPS_WORTH_COMPILING, _STEPS_WORTH_RECORDING = 20_000, 2_000


@dataclass
class Assembly:
    """What a run consists of."""

    env: TransformedEnv
    collector: DirectCollector
    loss: LossModule
    trainer: Trainer
    replay_buffer: TensorDictReplayBuffer | None = None

    @property
    def actor(self) -> ProbabilisticTensorDictSequential:
        """The policy; deterministic or not, as the exploration type says."""
        return self.loss.actor_network

    def refresh(self) -> None:
        """Bring here what has been learned elsewhere: nothing, in a run of one process."""

    def shutdown(self) -> None:
        """Close the environment, and whatever else is open."""
        self.collector.shutdown()


def assemble(
    config: RunConfig,
    parts: UserParts | None = None,
    *,
    make_collector: Callable[[TransformedEnv, LossModule], BaseCollector] | None = None,
    prepare_env: Callable[[TransformedEnv], Any] | None = None,
) -> Assembly:
    """Everything that a run of these settings trains with.

    Args:
        config (RunConfig): settings without problems.
        parts (UserParts, optional): what the run takes from its user. Defaults to what the settings
            name.

    Keyword Args:
        make_collector (callable, optional): makes another collector for the trainer, from the
            environment and the loss.
        prepare_env (callable, optional): called with the environment before its first step.

    Returns:
        Its parts, seeded with ``config.seed``.
    """
    parts = find_parts(config) if parts is None else parts
    device = resolve_device(config.device)
    torch.backends.cudnn.deterministic = config.deterministic
    torch.manual_seed(config.seed)
    # Not used here, but some environments do.
    random.seed(config.seed)
    np.random.seed(config.seed)
    keep_freed_memory()
    env = make_training_env(config, parts)
    if prepare_env is not None:
        prepare_env(env)
    problems = list(config.problems_with_episodes(env.base_env.step_limit))
    if problems:
        raise ConfigError(problems)
    check_memory(config, env)
    loss = make_actor_and_loss(config, env, device, parts)
    collector = DirectCollector(
        env,
        exploring(config, loss.actor_network),
        frames_per_batch=config.collector.frames_per_batch,
        policy_device=device,
    )
    algorithm = ALGORITHMS[config.algo](_with_replay_device(config))
    replay_buffer = algorithm.make_replay_buffer()
    try:
        trainer = algorithm.make_trainer(
            loss,
            replay_buffer,
            collector=collector if make_collector is None else make_collector(env, loss),
            total_frames=config.total_frames,
            loss_module=loss,
            frame_skip=config.env.frame_skip,
            progress_bar=False,
            auto_log_optim_steps=False,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError([f"optim: {error}"]) from error
    enabled = resolve_compile(config)[0].compile.enabled
    if enabled == "recorded":
        trainer.optimization_stepper.compiled = CompiledGradients(backend="recorded")
    elif enabled:
        trainer.optimization_stepper.compiled = CompiledGradients(config.compile.mode)
    if isinstance(trainer.optimization_stepper, GuardedStepper):
        trainer.optimization_stepper.reports_param_delta = config.logger.param_delta
    return Assembly(env, collector, loss, trainer, replay_buffer)


def exploring(config: RunConfig, actor: Any) -> Any:
    """The policy that collects: with the exploration noise of the settings.

    Args:
        config (RunConfig): the settings.
        actor (ProbabilisticTensorDictSequential): the policy that is trained.
    """
    noise, problem = config.collector.noise, PinkNoiseActor.problem_with(actor)
    if noise == "white" or (noise is None and problem is not None):
        return actor
    if problem is not None:
        raise ConfigError([f"collector.noise=pink: the policy {problem}"])
    return PinkNoiseActor(actor)


def resolve_device(name: str) -> torch.device:
    """The device of a name, ``"auto"`` included; an error if it can't be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).add(1).item()
    except Exception as error:  # of another class for each kind of device
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError([f"device {name!r} can't be used here: {reason}"]) from None
    return device


def _with_replay_device(config: RunConfig) -> RunConfig:
    """Settings in which ``replay_buffer.device``, if there is one, names a device."""
    buffer: Any = getattr(config, "replay_buffer", None)
    if buffer is None:
        return config
    device = resolve_device(config.device if buffer.device == "auto" else buffer.device)
    changes: Any = {"replay_buffer": replace(buffer, device=str(device))}
    return replace(config, **changes)


def resolve_compile(config: RunConfig, *, resumed: bool = False) -> tuple[RunConfig, str | None]:
    """Settings in which ``compile.enabled`` is not "auto", and a line for the user if it helps.

    It depends on the settings and on whether there is a compiler, never on a timing, so that the
    same command gives the same run.

    Args:
        config (RunConfig): the settings.

    Keyword Args:
        resumed (bool): whether the run goes on, with what it came to when it began. Then a missing
            compiler is no error. Defaults to ``False``.
    """
    enabled, note = config.compile.enabled, None
    automatic = enabled == "auto"
    if automatic:  # networks of the user's may do what can't be traced
        steps = config.compilable_steps if config.network.factory is None else 0
        enabled = "recorded" if steps >= _STEPS_WORTH_RECORDING else False
        enabled = True if steps >= _STEPS_WORTH_COMPILING else enabled
    missing = why_not(resolve_device(config.device).type) if enabled is True else None
    if missing is not None:
        if not (automatic or resumed):
            raise ConfigError([f"compile.enabled=true is not possible here: {missing}."])
        enabled = "recorded"
        note = f"updates are not compiled, which would be faster: {missing}"
    return replace(config, compile=replace(config.compile, enabled=enabled)), note


# Environments ------------------------------------------------------------------------------------


def make_training_env(config: RunConfig, parts: UserParts) -> TransformedEnv:
    """The environment to collect from, ``[num_envs]``."""
    arguments = asdict(config.env)
    reward_scaling = arguments.pop("reward_scaling", False)
    scaling_gamma = arguments.pop("reward_scaling_gamma", None)
    scaling_reset = arguments.pop("reward_scaling_reset", "done")
    for name in ("name", "factory", "kwargs", "wrappers"):
        del arguments[name]
    env = _make_env(config, parts, seed=config.seed, **arguments)
    if reward_scaling:
        gamma = config.loss.gamma if scaling_gamma is None else scaling_gamma
        env.append_transform(ReturnStdScaling(gamma, reset=scaling_reset))
    return env


def make_evaluation_env(
    config: RunConfig, training_env: TransformedEnv, parts: UserParts
) -> TransformedEnv:
    """Environments for evaluation: rewards as they are, statistics those of training, frozen."""
    norms = [t for t in training_env.transform if isinstance(t, RunningObservationNorm)]
    return _make_env(
        config,
        parts,
        video=config.eval.video,
        num_envs=config.eval.episodes,
        seed=evaluation_seed(config),
        frame_skip=config.env.frame_skip,
        max_episode_steps=config.env.max_episode_steps,
        canonical_actions=config.env.canonical_actions,
        observation_norm=norms[0].frozen_view() if norms else False,
    )


def _make_env(
    config: RunConfig, parts: UserParts, *, video: bool = False, **arguments: Any
) -> TransformedEnv:
    """Copies of the task. What goes wrong with that is a problem of the settings."""
    simulator, kwargs = parts.simulator(config, video=video)
    title = "env.name" if parts.make_env is None else parts.env_title
    arguments |= {"wrappers": parts.wrappers, "max_skipped": config.max_skipped}
    try:
        return make_env(simulator, **arguments, **kwargs)
    except ValueError as error:
        of_wrappers = str(error).startswith("wrappers: ")
        problem = f"env.{error}" if of_wrappers else f"{title}: {error}"
        raise ConfigError([" ".join(problem.split())]) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, TypeError) and kwargs:
            title = "env.kwargs"
        raise ConfigError([f"{title}: {type(error).__name__}: {one_line(error)}"]) from error


def evaluation_seed(config: RunConfig) -> int:
    """Seed of the environments for evaluation."""
    if config.eval.seed is not None:
        return config.eval.seed
    return (config.seed + _EVALUATION_SEED) % 2**32


# Networks and losses -----------------------------------------------------------------------------


def make_actor_and_loss(
    config: RunConfig, env: TransformedEnv, device: torch.device, parts: UserParts
) -> LossModule:
    """Networks for an environment, the user's or the algorithm's, in the loss of the algorithm."""
    algorithm = ALGORITHMS[config.algo](config)
    title, networks = "loss", None
    if parts.networks is not None:
        networks = parts.make_networks(env, config)
        title = f"loss with the networks of {parts.networks_title}"
    try:
        actor, critic = algorithm.make_networks(env) if networks is None else networks
        several = isinstance(critic, (list, tuple))
        critics = [network.to(device) for network in (critic if several else [critic])]
        return algorithm.make_loss(actor.to(device), critics if several else critics[0])
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError([f"{title}: {error}"]) from error
