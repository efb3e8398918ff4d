"""Actions of several parts: MultiDiscrete, MultiBinary, Dict and Tuple spaces of Gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, OneHot
from torchrl.envs.utils import check_env_specs

from minerva_torchrl import make_env
from minerva_torchrl.envs.failures import PolicyFailure
from tests.envs.hybrid import Hybrid
from tests.envs.recorder import Recorder
from tests.envs.scripted import save_and_load

OBSERVATIONS = spaces.Box(-1.0, 1.0, (3,))
BOX = spaces.Box(np.float32([-0.5, 0.0]), np.float32([0.5, 4.0]))
DEEP = spaces.Dict(
    {
        "arm": BOX,
        "hand": spaces.Tuple((spaces.MultiDiscrete([2, 3], start=[0, 5]), spaces.Discrete(2))),
        "lamps": spaces.MultiBinary(2),
    }
)


def make(actions: spaces.Space, **kwargs: Any) -> Any:
    return make_env(lambda: Recorder(OBSERVATIONS, actions), seed=0, **kwargs)


def one_hot(index: int, count: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), count).bool()


def act(env: Any, **parts: torch.Tensor) -> Any:
    """Take an action; returns what the simulator saw of it."""
    env.step(env.reset().set("action", TensorDict(parts)))
    return env.base_env._simulators[0].env.unwrapped.actions[-1]


def test_every_part_has_an_entry() -> None:
    spec = make(DEEP).full_action_spec["action"]
    assert isinstance(spec, Composite)
    shapes = {name: tuple(part.shape) for name, part in spec.items()}
    assert shapes == {
        "arm": (2,),
        "hand_0_0": (2,),
        "hand_0_1": (3,),
        "hand_1": (2,),
        "lamps_0": (2,),
        "lamps_1": (2,),
    }
    assert isinstance(spec["arm"], Bounded)
    assert all(isinstance(part, OneHot) for name, part in spec.items() if name != "arm")


def test_simulators_get_the_form_of_their_space() -> None:
    """Scaled and clipped, counted from the first number, in arrays, tuples and dictionaries."""
    seen = act(
        make(DEEP),
        arm=torch.tensor([1.0, -7.0]),
        hand_0_0=one_hot(1, 2),
        hand_0_1=one_hot(2, 3),
        hand_1=one_hot(0, 2),
        lamps_0=one_hot(0, 2),
        lamps_1=one_hot(1, 2),
    )
    assert DEEP.contains(seen)
    np.testing.assert_allclose(seen["arm"], [0.5, 0.0])
    assert seen["hand"][0].tolist() == [1, 7]
    assert seen["hand"][1] == 0
    assert seen["lamps"].tolist() == [0, 1]


def test_own_units() -> None:
    actions = spaces.Tuple((BOX, spaces.Discrete(3)))
    env = make(actions, canonical_actions=False)
    seen = act(env, **{"0": torch.tensor([0.25, 3.0]), "1": one_hot(2, 3)})
    assert isinstance(seen, tuple)
    assert (seen[0].tolist(), seen[1]) == ([0.25, 3.0], 2)


def test_matrix_of_discrete_actions() -> None:
    actions = spaces.MultiDiscrete([[2, 3], [4, 5]])
    env = make(actions, categorical_actions=True)
    seen = act(env, **{str(i): torch.tensor(i) for i in range(4)})
    assert seen.tolist() == [[0, 1], [2, 3]]
    assert actions.contains(seen)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_torchrl_takes_it(num_envs: int | None) -> None:
    env = make_env(Hybrid, num_envs=num_envs, seed=0)
    check_env_specs(env)
    batch = env.rollout(25, break_when_any_done=False)
    assert batch["action", "arm"].shape == (*env.batch_size, 25, 1)
    assert batch["next", "truncated"].any()


@pytest.mark.slow
def test_the_same_in_processes() -> None:
    envs = [make_env(Hybrid, num_envs=2, num_workers=n, seed=0) for n in (0, 2)]
    actions = envs[0].full_action_spec.rand()
    first, second = (env.step(env.reset().update(actions)) for env in envs)
    assert torch.equal(first["next", "reward"], second["next", "reward"])
    broken = envs[1].reset().update(actions).set(("action", "arm"), torch.full((2, 1), torch.nan))
    with pytest.raises(PolicyFailure, match="not a finite number"):
        envs[1].step(broken)
    for env in envs:
        env.close()


def test_state() -> None:
    """The generators go on; what is not exact begins a new episode."""
    env, other = (make_env(Hybrid, num_envs=2, seed=seed) for seed in (0, 1))
    env.rollout(3)
    other.reset()
    other.base_env.load_state_dict(save_and_load(env.base_env.state_dict()))
    assert not env.base_env.exact_state
    assert torch.equal(env.reset()["observation"], other.reset()["observation"])


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (spaces.Dict({"a": spaces.Text(3)}), r"got Text\(.*\) as 'a'"),
        (
            spaces.Tuple((BOX, spaces.Dict({"b": spaces.Sequence(BOX)}))),
            r"got Sequence\(.*\) as '1/b'",
        ),
        (spaces.Dict({"a": spaces.Box(0, 9, (2,), np.int64)}), r"got Box\(0, 9, .*\) as 'a'"),
        (spaces.Dict({}), r"Dict or Tuple of these, got Dict\(\)"),
        (spaces.Dict({"a.b": BOX}), "texts without dots, .* got 'a.b'"),
        (
            spaces.Dict({"a_0": BOX, "a": spaces.Tuple((BOX,))}),
            "two parts of an action would have the name 'a_0'",
        ),
    ],
)
def test_refused(actions: gymnasium.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(actions)


def test_numbers_need_discrete_parts() -> None:
    with pytest.raises(ValueError, match="categorical_actions needs discrete actions"):
        make(spaces.Tuple((BOX, BOX)), categorical_actions=True)
