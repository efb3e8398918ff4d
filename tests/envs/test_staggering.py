"""StaggeredEpisodes: when it ends episodes, what it leaves alone, and its state."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import SerialEnv, StepCounter, TransformedEnv, check_env_specs

from minerva_torchrl.envs import StaggeredEpisodes, SuiteEnv, make_env
from tests.envs.play import play, random_actions
from tests.envs.scripted import ScriptedEnv, collect, save_and_load


def ends(data: TensorDict, key: str = "truncated") -> list[list[int]]:
    """The steps, counted from one, after which the copies' flags are set."""
    flags = data["next", key].squeeze(-1)
    return [copy.nonzero().flatten().add(1).tolist() for copy in flags]


def make(num_envs: int = 4, length: int = 12, limit: int | None = None) -> TransformedEnv:
    env = TransformedEnv(SuiteEnv("cartpole", "swingup", num_envs=num_envs, seed=0))
    return env.append_transform(StepCounter(max_steps=limit)).append_transform(
        StaggeredEpisodes(length)
    )


def test_specs() -> None:
    check_env_specs(make())


def test_first_episodes_end_at_different_times() -> None:
    """And the next ones have their full length, so the copies stay apart."""
    data = collect(make(limit=12), 40)
    assert ends(data) == [[12, 24, 36], [3, 15, 27, 39], [6, 18, 30], [9, 21, 33]]
    assert ends(data, "done") == ends(data)
    assert ends(data, "terminated") == [[], [], [], []]


def test_episodes_begin_anew_after_them() -> None:
    data = collect(make(), 8)
    count = data["step_count"].squeeze(-1)
    assert count[1].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    # Cartpole-swingup begins at rest with the pole hanging down.
    upright = data["observation"][..., 1]
    assert (upright[1, [0, 3]] < -0.99).all()


@pytest.mark.parametrize(("length", "expected"), [(10, [[], [4], [7]]), (2, [[], [1], []])])
def test_lengths_that_are_no_multiple(length: int, expected: list[list[int]]) -> None:
    """Rounded up; what would be a whole episode is none of its business."""
    assert ends(collect(make(3, length), 9)) == expected


def test_one_copy_is_left_alone() -> None:
    env = TransformedEnv(SuiteEnv("cartpole", "swingup", seed=0), StaggeredEpisodes(5))
    assert not env.rollout(9)["next", "done"].any()


def test_a_terminated_episode_is_not_truncated() -> None:
    """A copy whose second episode terminates at the very step that would cut it."""
    env = SerialEnv(4, [lambda: ScriptedEnv(length=3)] * 4)
    data = collect(TransformedEnv(env, StaggeredEpisodes(12)), 12)
    terminated, truncated = data["next", "terminated"], data["next", "truncated"]
    assert not (terminated & truncated).any()
    assert terminated[2, 5]


@pytest.mark.slow
def test_workers() -> None:
    """Copies count over all processes."""
    env = make_env(
        "cartpole-swingup", num_envs=4, num_workers=2, seed=0, max_episode_steps=8, staggered=True
    )
    try:
        data = collect(env, 10).reshape(4, 10)
    finally:
        env.close()
    assert ends(data) == [[8], [2, 10], [4], [6]]


@pytest.mark.parametrize(
    ("name", "arguments", "length"),
    [
        ("cartpole-swingup", {}, 1000),
        ("cartpole-swingup", {"frame_skip": 3}, 334),
        ("cartpole-swingup", {"frame_skip": 3, "max_episode_steps": 100}, 100),
        ("cartpole-swingup", {"max_episode_steps": 5000}, 1000),
        ("gym:Pendulum-v1", {}, 200),
        ("gym:HalfCheetah-v5", {"frame_skip": 2}, 500),
        ("lqr-lqr_2_1", {}, None),
        ("lqr-lqr_2_1", {"max_episode_steps": 30}, 30),
    ],
)
def test_length_of_an_episode(name: str, arguments: dict[str, int], length: int | None) -> None:
    """The task's limit in actions, or a smaller one that is given; without any, nothing is cut."""
    env = make_env(name, num_envs=2, seed=0, staggered=True, **arguments)
    found = [t.episode_length for t in env.transform if isinstance(t, StaggeredEpisodes)]
    assert found == ([] if length is None else [length])
    assert not any(isinstance(t, StaggeredEpisodes) for t in make_env(name, **arguments).transform)


def test_limit_is_the_true_one() -> None:
    env = make_env("cartpole-swingup", frame_skip=3, seed=0)
    assert env.base_env.step_limit == len(env.rollout(2000)) == 334


def first_ends(env: TransformedEnv, steps: int) -> list[list[int]]:
    return ends(env.rollout(steps, break_when_any_done=False))


def test_all_reset_at_once_start_over() -> None:
    env = make()
    assert first_ends(env, 10) == first_ends(env, 10) == [[], [3], [6], [9]]


def test_state() -> None:
    """A copy of the environment goes on with the same count."""
    env, other = make(), make()
    actions = random_actions(env, 12)
    play(env, actions[:4])
    other.reset()
    other.load_state_dict(save_and_load(env.state_dict()))

    def rest(which: TransformedEnv) -> Tensor:
        data = which.reset(TensorDict({"_reset": torch.zeros(4, 1, dtype=torch.bool)}, [4]))
        return play(which, actions[4:], data)["next", "truncated"]

    truncated = rest(other)
    assert torch.equal(truncated, rest(env))
    assert truncated.squeeze(-1).nonzero().tolist() == [[1, 2], [4, 3]]


def test_collector() -> None:
    """Rollouts shorter than an episode soon have all of its phases."""
    env = make_env("cartpole-swingup", num_envs=4, seed=0, max_episode_steps=40, staggered=True)
    collector = Collector(env, env.rand_action, frames_per_batch=40, total_frames=400)
    for batch in collector:
        counts = batch["step_count"].flatten()
    assert {int(count) // 10 for count in counts} == {0, 1, 2, 3}


@pytest.mark.parametrize("length", [0, -1])
def test_bad_lengths(length: int) -> None:
    with pytest.raises(ValueError, match=f"episode_length must be at least 1, got {length}"):
        StaggeredEpisodes(length)


def test_outside_an_environment() -> None:
    with pytest.raises(RuntimeError, match="must be part of a TransformedEnv"):
        StaggeredEpisodes(5)(TensorDict())
