"""Policies, and tasks without TorchRL, as a user of a trained policy has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import TransformedEnv
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor

from minerva_torchrl.envs.suite import suite
from minerva_torchrl.modules import ELU, StateIndependentScale, Tanh
from minerva_torchrl.runs import RunConfig, TrainedPolicy, evaluate
from tests.envs.play import chain

MakeEnv = Callable[..., TransformedEnv]
EPISODES = 3


# Tasks -------------------------------------------------------------------------------------------


class BareTask:
    """One episode, from the seed of a copy in an evaluation."""

    def __init__(self, name: str, seed: int, *, frame_skip: int = 1, max_steps: int = 1) -> None:
        self.frame_skip, self.max_steps = frame_skip, max_steps
        self.steps, self.done = 0, False
        self.total = np.float32(0)  # as TorchRL's RewardSum adds
        self.is_gym = name.startswith("gym:")
        if self.is_gym:
            self.env: Any = gymnasium.make(name.removeprefix("gym:"))
            self.observation: Any = self.env.reset(seed=seed)[0]
        else:
            domain, _, task = name.partition("-")
            self.env = suite.load(domain, task, task_kwargs={"random": seed})
            self.observation = self.env.reset().observation

    def step(self, action: Any) -> None:
        reward = 0.0
        for _ in range(self.frame_skip):
            if self.is_gym:
                self.observation, frame_reward, terminated, truncated, _ = self.env.step(action)
                self.done = terminated or truncated
            else:
                step = self.env.step(action)
                self.observation, frame_reward = step.observation, step.reward
                self.done = step.last()
            reward += frame_reward
            if self.done:
                break
        self.total += np.float32(reward)
        self.steps += 1
        self.done = self.done or self.steps == self.max_steps


def make_tasks(config: RunConfig, seeds: Sequence[int]) -> list[BareTask]:
    limit = config.env.max_episode_steps
    assert limit is not None
    return [
        BareTask(config.env.name, seed, frame_skip=config.env.frame_skip, max_steps=limit)
        for seed in seeds
    ]


def play_bare(policy: TrainedPolicy, act: Callable[[list[Any]], Any]) -> list[float]:
    """Returns of the evaluation's episodes: ``act`` always gets the observations of all of them."""
    tasks = make_tasks(policy.config, chain(policy.evaluation_seed, EPISODES))
    while not all(task.done for task in tasks):
        actions = act([task.observation for task in tasks])
        for task, action in zip(tasks, actions, strict=True):
            if not task.done:
                task.step(action)
    return [float(task.total) for task in tasks]


def evaluated_returns(policy: TrainedPolicy) -> list[float]:
    """The same in TorchRL."""
    env = policy.make_env(episodes=EPISODES)
    return evaluate(env, policy.actor, seed=policy.evaluation_seed).returns.tolist()


def stack(observations: Sequence[Any]) -> Any:
    """A batch of observations, which may be dicts."""
    if isinstance(observations[0], dict):
        return {key: np.stack([o[key] for o in observations]) for key in observations[0]}
    return np.stack(observations)


def flatten(observation: Any) -> np.ndarray:
    """An observation as the input of an exported file: written here without the package."""
    parts = observation.values() if isinstance(observation, dict) else [observation]
    return np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)


# Policies ----------------------------------------------------------------------------------------


def make_actor(network: nn.Module, kind: type, **kwargs: Any) -> ProbabilisticActor:
    keys = ["logits"] if kind is OneHotCategorical else ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=keys),
        in_keys=keys,
        distribution_class=kind,
        return_log_prob=True,
        **kwargs,
    )


def gaussian(
    env: TransformedEnv, kind: type = IndependentNormal, scale: float = 0.5, **kwargs: Any
) -> tuple[ProbabilisticActor, nn.Module]:
    """A policy with a random network, and the network of its mean."""
    torch.manual_seed(0)
    sizes = (env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1])
    mean = nn.Sequential(nn.Linear(sizes[0], 16), Tanh(), nn.Linear(16, 8), ELU())
    mean.append(nn.Linear(8, sizes[1]))
    return make_actor(StateIndependentScale(mean, sizes[1], init_scale=scale), kind, **kwargs), mean


def random_rows(count: int, size: int, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
