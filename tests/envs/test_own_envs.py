"""Environments that nobody has registered, and what goes around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from torchrl.data import Categorical, Composite, MultiCategorical, Unbounded
from torchrl.envs import EnvBase, GymEnv
from torchrl.envs.utils import check_env_specs

from minerva_torchrl import make_env
from minerva_torchrl.envs import GymnasiumEnv
from minerva_torchrl.envs.torchrl_env import TorchRLAsGymnasium
from tests.runs import own

# Gymnasium ---------------------------------------------------------------------------------------


def test_each_copy_is_the_environment_with_its_seed() -> None:
    env = make_env(own.Task, num_envs=2, seed=3, gravity=2.0)
    rollout = env.rollout(5)
    seeds = [
        simulator.first_seed for simulator in GymnasiumEnv(own.Task, num_envs=2, seed=3)._simulators
    ]
    for i, seed in enumerate(seeds):
        task = own.Task(gravity=2.0)
        observation, _ = task.reset(seed=seed)
        for t in range(rollout.shape[1]):
            assert np.array_equal(rollout["observation"][i, t], observation)
            action = rollout["action"][i, t].numpy()
            observation, reward, *_ = task.step(action)
            assert rollout["next", "reward"][i, t].item() == pytest.approx(reward)


def test_a_function_that_makes_them() -> None:
    env = make_env(lambda: TimeLimit(own.Task(), 7), num_envs=2, staggered=True)
    assert env.base_env.step_limit == 7
    check_env_specs(env)
    assert not env.base_env.exact_state  # who knows what else it has


def test_arguments_of_tasks() -> None:
    env = make_env("cartpole-balance", seed=0, time_limit=0.05)
    assert env.base_env.step_limit == 5
    with pytest.raises(TypeError, match="random can't be given"):
        make_env("cartpole-balance", random=3)
    assert make_env("gym:Pendulum-v1", g=5.0).base_env._simulators[0].env.unwrapped.g == 5.0


# Wrappers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrappers", "expected"),
    [
        ([own.Double, own.AddOne], lambda x: 2 * x + 1),
        ([own.AddOne, own.Double], lambda x: 2 * (x + 1)),
        ([own.Double, own.Shift], lambda x: 2 * x + 1),
        ([own.Shift, own.Shift], lambda x: x + 2),
    ],
)
def test_order_of_wrappers(wrappers: list[Any], expected: Any) -> None:
    plain, wrapped = (
        make_env(own.Task, num_envs=2, seed=0, wrappers=some) for some in ([], wrappers)
    )
    wanted = expected(plain.reset()["observation"])
    torch.testing.assert_close(wrapped.reset()["observation"], wanted)
    action = {"action": torch.ones(2, 1)}
    steps = [env.step(env.reset().update(action)) for env in (plain, wrapped)]
    wanted = expected(steps[0]["next", "observation"])
    torch.testing.assert_close(steps[1]["next", "observation"], wanted)


def test_rewards_and_returns_are_those_of_the_wrapped_environment() -> None:
    envs = [make_env(own.Task, seed=0, wrappers=some) for some in ([], [own.half_reward])]
    plain, half = (env.rollout(5, lambda td: td.set("action", torch.ones(1))) for env in envs)
    for key in ("reward", "episode_reward"):
        torch.testing.assert_close(half["next", key], plain["next", key] / 2)


def test_statistics_are_those_of_transformed_observations() -> None:
    env = make_env(own.Task, num_envs=2, seed=0, wrappers=[own.Shift], observation_norm=True)
    other = make_env(own.Task, num_envs=2, seed=0, observation_norm=True)
    for some in (env, other):
        some.rollout(5, lambda td: td.set("action", torch.zeros(2, 1)))
    means = [some.transform[-1].loc["observation"] for some in (env, other)]
    torch.testing.assert_close(means[0], means[1] + 1)


# TorchRL -----------------------------------------------------------------------------------------


def test_environments_of_torchrl() -> None:
    env = make_env(own.TorchRLTask, num_envs=2, seed=0)
    check_env_specs(env)
    assert env.base_env.observation_layout == {("v",): (1,), ("x",): (1,)}
    assert env.action_spec.space.high.unique() == 1.0
    own_units = make_env(own.TorchRLTask, num_envs=2, seed=0, canonical_actions=False)
    assert own_units.action_spec.space.high.unique() == 2.0


def test_steps_of_torchrl() -> None:
    def rollout(gravity: float, action: float) -> Any:
        env = make_env(own.TorchRLTask, num_envs=2, seed=0, gravity=gravity)
        push = lambda td: td.set("action", torch.full((2, 1), action))  # noqa: E731
        return env.rollout(5, push, break_when_any_done=False)

    data = rollout(1.0, 1.0)
    _, x = data["next", "observation"].unbind(-1)
    assert torch.equal(data["next", "reward"].squeeze(-1), -x.abs())
    assert torch.equal(data["observation"], rollout(1.0, 9.0)["observation"])  # clipped
    difference = rollout(0.0, 0.5)["next", "observation"] - data["next", "observation"]
    torch.testing.assert_close(difference, torch.zeros(2, 5, 2))  # less gravity, less force


def test_seeds_of_torchrl() -> None:
    first, same, other = (make_env(own.TorchRLTask, num_envs=2, seed=s) for s in (0, 0, 1))
    rollouts = [
        env.rollout(20, lambda td: td.set("action", torch.zeros(2, 1)), break_when_any_done=False)
        for env in (first, same, other)
    ]
    observations = [rollout["observation"] for rollout in rollouts]
    assert torch.equal(observations[0], observations[1])
    assert not torch.equal(observations[0], observations[2])
    assert not torch.equal(observations[0][0], observations[0][1])


def test_the_same_environment_from_both_libraries() -> None:
    ours = make_env("gym:Pendulum-v1", seed=0)
    theirs = make_env(lambda: GymEnv("Pendulum-v1"), seed=0)
    assert theirs.action_spec == ours.action_spec
    assert theirs.observation_spec == ours.observation_spec
    assert theirs.base_env.observation_layout == {(): (3,)}
    rollout = theirs.rollout(250)
    assert rollout.shape == (200,)
    assert rollout["next", "truncated"][-1]


@pytest.mark.parametrize("categorical", [True, False])
def test_discrete_actions_of_torchrl(categorical: bool) -> None:
    make = lambda: GymEnv("CartPole-v1", categorical_action_encoding=categorical)  # noqa: E731
    env = make_env(make, seed=0)
    right = torch.tensor([False, True])
    rollout = env.rollout(100, lambda td: td.set("action", right))
    assert len(rollout) < 15  # it falls
    assert rollout["next", "terminated"][-1]
    assert rollout["next", "observation"][-1, 1] > 0  # to where it was pushed


class Odd(EnvBase):
    """Has an action that is no single one."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = MultiCategorical([2, 3])

    def _reset(self, *args: Any) -> Any: ...
    def _step(self, *args: Any) -> Any: ...
    def _set_seed(self, seed: Any) -> None: ...


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a single one, with batch size \[\].* got \[3\]"):
        TorchRLAsGymnasium(own.TorchRLTask(batch_size=(3,)))
    with pytest.raises(ValueError, match="actions must be continuous or discrete, one at a time"):
        TorchRLAsGymnasium(Odd())
    env = Odd()
    env.action_spec = Categorical(3)
    env.observation_spec = Composite(pixels=Unbounded((64, 64, 3), dtype=torch.uint8))
    with pytest.raises(ValueError, match="observations are images"):
        make_env(lambda: env)
    with pytest.raises(RuntimeError, match="reset the environment first"):
        TorchRLAsGymnasium(own.TorchRLTask()).step([0.0])
