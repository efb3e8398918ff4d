from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import ParallelEnv, TransformedEnv, check_env_specs

from minerva_torchrl.envs import (
    GymnasiumEnv,
    RunningObservationNorm,
    SuiteEnv,
    list_envs,
    make_env,
)
from minerva_torchrl.envs.suite import suite
from tests.envs.play import assert_same, play, random_actions
from tests.envs.scripted import collect, save_and_load

# In one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "domain", "task"),
    [
        ("cartpole-swingup_sparse", "cartpole", "swingup_sparse"),
        ("ball_in_cup-catch", "ball_in_cup", "catch"),
        ("humanoid_CMU-run", "humanoid_CMU", "run"),
    ],
)
def test_suite_names(name: str, domain: str, task: str) -> None:
    env = make_env(name)
    assert isinstance(env, TransformedEnv)
    assert type(env.base_env) is SuiteEnv
    assert (env.base_env.domain, env.base_env.task) == (domain, task)


def test_gymnasium_names() -> None:
    env = make_env("gym:CartPole-v1", max_episode_steps=3, categorical_actions=True)
    assert type(env.base_env) is GymnasiumEnv
    assert env.base_env.name == "CartPole-v1"
    assert env.rollout(9)["action"].shape == (3,)


def test_list_envs() -> None:
    names = list_envs()
    assert len(names) == len(set(names)) == len(suite.ALL_TASKS) + len(gymnasium.registry)
    assert {"humanoid_CMU-run", "walker-walk", "gym:Hopper-v5"} <= set(names)


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("name", ["cartpole-balance", "gym:Pendulum-v1"])
def test_data(name: str, num_envs: int | None) -> None:
    env = make_env(name, num_envs=num_envs, seed=0, max_episode_steps=4)
    check_env_specs(env)
    data = collect(env, 10).reshape(-1, 10)
    step = torch.arange(10)
    assert (data["is_init"].squeeze(-1) == (step % 4 == 0)).all()
    assert (data["step_count"].squeeze(-1) == step % 4).all()
    assert (data["next", "step_count"].squeeze(-1) == step % 4 + 1).all()
    assert (data["next", "truncated"].squeeze(-1) == (step % 4 == 3)).all()
    assert not data["next", "terminated"].any()
    rewards = data["next", "reward"].squeeze(-1)
    sums = torch.cat([rewards[:, i : i + 4].cumsum(1) for i in (0, 4, 8)], 1)
    torch.testing.assert_close(data["next", "episode_reward"].squeeze(-1), sums)


def test_is_the_bare_environment_with_transforms() -> None:
    kwargs = {"num_envs": 2, "seed": 5, "frame_skip": 2}
    env = make_env("cheetah-run", **kwargs)
    bare = SuiteEnv("cheetah", "run", **kwargs)
    actions = random_actions(bare, 5)
    assert_same(play(env, actions), play(bare, actions))


def test_device() -> None:
    assert make_env("cartpole-balance", device="cpu").rollout(2).device == torch.device("cpu")


def test_observation_norm() -> None:
    env = make_env("cartpole-balance", num_envs=4, seed=0, observation_norm=True)
    norm = env.transform[-1]
    assert isinstance(norm, RunningObservationNorm)
    raw = make_env("cartpole-balance", num_envs=4, seed=0)
    actions = random_actions(env, 20)
    play(env, actions)
    observations = play(raw, actions)
    observations = torch.cat([observations["observation"][:1], observations["next", "observation"]])
    expected = observations.double().flatten(0, 1).mean(0)
    torch.testing.assert_close(norm.loc["observation"].double(), expected)
    # An environment for evaluation sees the statistics and leaves them alone.
    eval_env = make_env("cartpole-balance", seed=9, observation_norm=norm.frozen_view())
    eval_env.rollout(5)
    view = eval_env.transform[-1]
    assert torch.equal(view.loc["observation"], norm.loc["observation"])
    torch.testing.assert_close(norm.loc["observation"].double(), expected)


def test_state_of_simulators_and_of_transforms() -> None:
    make = partial(make_env, "reacher-easy", num_envs=2, observation_norm=True)
    env, other = make(seed=0), make(seed=1)
    last = collect(env, 5)[:, -1]["next"].exclude("reward")
    other.reset()
    other.base_env.load_state_dict(save_and_load(env.base_env.state_dict()))
    other.load_state_dict(save_and_load(env.state_dict()))
    actions = random_actions(env, 5)
    assert_same(play(other, actions, last), play(env, actions, last))


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cheeta-run", "no environment 'cheeta-run'. Did you mean 'cheetah-run'"),
        ("cheetah_run", "Did you mean 'cheetah-run'"),
        ("Humanoid_cmu-run", "Did you mean 'humanoid_CMU-run'"),
        ("HalfCheetah-v5", "Did you mean 'gym:HalfCheetah-v"),
        ("gym:HalfCheeta-v5", "Did you mean 'HalfCheetah-v5'"),
        ("??????", r"'\?\?\?\?\?\?'. minerva_torchrl.envs.list_envs\(\) lists all"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_env(name)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_envs": 0}, ValueError, "num_envs must be at least 1, got 0"),
        ({"num_envs": -1, "num_workers": 2}, ValueError, "num_envs must be at least 1, got -1"),
        ({"num_workers": -1}, ValueError, "num_workers must be at least 1, got -1"),
        ({"num_workers": 1.0}, TypeError, "num_workers must be an integer"),
        (
            {"num_envs": 3, "num_workers": 2},
            ValueError,
            "num_envs must be a multiple of num_workers",
        ),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps must be at least 1"),
        ({"observation_norm": "yes"}, TypeError, "observation_norm must be a bool or a Running"),
        ({"categorical_actions": True}, TypeError, "unexpected keyword .* 'categorical_actions'"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_env("cartpole-balance", **arguments)


# In several processes ----------------------------------------------------------------------------


WORKERS = {"num_envs": 4, "num_workers": 2}
ACTIONS = torch.linspace(-1.0, 1.0, 15 * 4 * 2).sin().reshape(15, 4, 2)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[TransformedEnv, TensorDict]]:
    """An environment in two processes, and its first steps."""
    env = make_env("reacher-easy", **WORKERS, seed=0, max_episode_steps=6)
    yield env, play(env, ACTIONS.unflatten(1, (2, 2)))
    env.close(raise_if_closed=False)


@pytest.mark.slow
def test_workers_do_what_one_process_does(workers: tuple[TransformedEnv, TensorDict]) -> None:
    env, data = workers
    assert isinstance(env.base_env, ParallelEnv)
    assert env.batch_size == (2, 2)
    one = make_env("reacher-easy", num_envs=4, seed=0, max_episode_steps=6)
    assert_same(data.flatten(1, 2), play(one, ACTIONS))
    # Seeds, too, are those of one process.
    env.set_seed(3)
    one.set_seed(3)
    assert torch.equal(env.reset()["observation"].flatten(0, 1), one.reset()["observation"])


@pytest.mark.slow
def test_state_of_workers(workers: tuple[TransformedEnv, TensorDict]) -> None:
    env, _ = workers
    first = collect(env, 4)[..., -1]["next"].exclude("reward")
    state = save_and_load(env.base_env.state_dict())
    assert env.exact_state is True
    actions = random_actions(env, 5)
    data = play(env, actions, first)
    for _ in range(5):
        env.base_env.load_state_dict(state)
        assert_same(play(env, actions, first), data)


@pytest.mark.slow
def test_collector_over_workers(workers: tuple[TransformedEnv, TensorDict]) -> None:
    collector = Collector(workers[0], None, frames_per_batch=60, total_frames=60)
    [data] = [batch.clone() for batch in collector]
    assert data.shape == (2, 2, 15)
    trajectories = data["collector", "traj_ids"]
    same = (data["next", "observation"][..., :-1, :] == data["observation"][..., 1:, :]).all(-1)
    assert torch.equal(same, trajectories[..., :-1] == trajectories[..., 1:])
    assert len(trajectories.unique()) == 12


@pytest.mark.slow
def test_workers_of_a_collector() -> None:
    make = partial(make_env, "cartpole-balance", num_envs=2, max_episode_steps=7)
    collector = MultiSyncCollector([make, make], None, frames_per_batch=40, total_frames=120)
    data = torch.cat([batch.clone() for batch in collector], -1)
    collector.shutdown()
    assert data.shape == (2, 2, 30)
    assert (data["step_count"].squeeze(-1) == torch.arange(30) % 7).all()
    first = data["observation"][:, :, 0].flatten(0, 1)
    assert len(first.unique(dim=0)) == 4  # no two copies are the same
    trajectories = data["collector", "traj_ids"]
    same = (data["next", "observation"][..., :-1, :] == data["observation"][..., 1:, :]).all(-1)
    assert torch.equal(same, trajectories[..., :-1] == trajectories[..., 1:])
