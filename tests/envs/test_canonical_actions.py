"""A policy acts between -1 and 1, whatever the bounds of the task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import OneHot, Unbounded

from minerva_torchrl import make_env
from tests.envs.recorder import Recorder

OBSERVATIONS = spaces.Box(-1.0, 1.0, (3,))


def make(actions: spaces.Space, **kwargs: Any) -> Any:
    return make_env(lambda: Recorder(OBSERVATIONS, actions), seed=0, **kwargs)


def act(env: Any, *actions: Any) -> list[Any]:
    """Take actions; returns what the simulator saw of them, and the data must not have changed."""
    data = env.reset()
    for action in actions:
        given = torch.as_tensor(action, dtype=env.action_spec.dtype)
        data = env.step(data.set("action", given.clone()))
        assert torch.equal(data["action"], given)
        data = data["next"].exclude("reward")
    return env.base_env._simulators[0].env.unwrapped.actions


def test_scaled_to_the_bounds_of_each_dimension() -> None:
    low, high = np.float32([-0.4, 0.0]), np.float32([0.4, 10.0])
    env = make(spaces.Box(low, high))
    assert env.action_spec.space.low.tolist() == [-1.0, -1.0]
    assert env.action_spec.space.high.tolist() == [1.0, 1.0]
    seen = act(env, [0.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [0.5, -0.5], [-7.0, 3.0])
    expected = [[0.0, 5.0], high, low, [0.2, 2.5], [low[0], high[1]]]
    for found, wanted in zip(seen, expected, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert ((low <= found) & (found <= high)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounds_of_one_change_nothing(dtype: Any) -> None:
    actions = torch.randn(20, 2)
    scaled, plain = (
        act(make(spaces.Box(-1.0, 1.0, (2,), dtype), canonical_actions=canonical), *actions)
        for canonical in (True, False)
    )
    for ours, theirs, action in zip(scaled, plain, actions, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert ours.tolist() == theirs.tolist() == action.clamp(-1, 1).tolist()


def test_own_units() -> None:
    env = make(spaces.Box(-0.4, 0.4, (1,)), canonical_actions=False)
    assert env.action_spec.space.high.item() == pytest.approx(0.4)
    seen = [action.item() for action in act(env, [0.3], [1.0])]
    assert seen == pytest.approx([0.3, 0.4])


def test_without_bounds_or_discrete() -> None:
    low, high = np.float32([-2.0, -np.inf]), np.float32([2.0, np.inf])
    env = make(spaces.Box(low, high))
    assert isinstance(env.action_spec, Unbounded)
    assert [a.tolist() for a in act(env, [1.5, 1.5], [9.0, 9.0])] == [[1.5, 1.5], [2.0, 9.0]]
    assert isinstance(make(spaces.Discrete(3)).action_spec, OneHot)


def test_bounds_that_are_large_for_their_type() -> None:
    largest = np.finfo(np.float32).max
    env = make(spaces.Box(-largest, largest, (1,)))
    assert [a.item() for a in act(env, [1.0], [-1.0], [0.0])] == [largest, -largest, 0.0]


@pytest.mark.parametrize("name", ["gym:Humanoid-v5", "cartpole-balance"])
def test_tasks(name: str) -> None:
    env = make_env(name, num_envs=2, seed=0)
    assert env.action_spec.space.low.unique() == -1
    assert env.action_spec.space.high.unique() == 1
    env.rollout(2)
