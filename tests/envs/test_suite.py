from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from absl import logging as absl_logging
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import EnvCreator, SerialEnv, TransformedEnv, check_env_specs

from minerva_torchrl.envs import SuiteEnv
from minerva_torchrl.envs.suite import suite
from tests.envs.play import (
    assert_goes_on_exactly,
    assert_same,
    chain,
    play,
    random_actions,
    stack_reference,
)
from tests.envs.scripted import collect, save_and_load


def copies(env: SuiteEnv) -> list:
    """The environments of DM Control inside."""
    return [simulator.env for simulator in env._simulators]


def make(name: str, limits: int | tuple[int, ...] | None = None, **kwargs) -> SuiteEnv:
    """A task with short episodes."""
    env = SuiteEnv(*name.split("-"), **kwargs)
    if limits is not None:
        count = len(copies(env))
        limits = (limits,) * count if isinstance(limits, int) else limits
        for copy, limit in zip(copies(env), limits, strict=True):
            copy._step_limit = limit
    return env


def play_dm_control(name: str, seed: int, limit: int, actions: np.ndarray, frame_skip: int = 1):
    env = suite.load(*name.split("-"), task_kwargs={"random": seed})
    env._step_limit = limit
    spec = env.action_spec()

    def step(action: np.ndarray):
        reward = 0.0
        for _ in range(frame_skip):
            result = env.step(np.clip(action, spec.minimum, spec.maximum))
            reward += result.reward
            if result.last():
                break
        terminated = result.last() and result.discount == 0.0
        truncated = result.last() and result.discount == 1.0
        return result.observation.values(), reward, terminated, truncated

    return stack_reference(lambda: env.reset().observation.values(), step, actions)


# Specs and steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("name", ["cartpole-balance", "ball_in_cup-catch", "humanoid-run"])
def test_specs(name: str, num_envs: int | None) -> None:
    env = make(name, num_envs=num_envs, seed=0)
    check_env_specs(env)
    assert env.batch_size == torch.Size([] if num_envs is None else [num_envs])
    assert env.reset()["observation"].dtype == torch.float32


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("name", ["cheetah-run", "finger-turn_hard", "reacher-easy", "lqr-lqr_2_1"])
def test_does_what_dm_control_does(name: str, num_envs: int | None) -> None:
    env = make(name, 5, num_envs=num_envs, seed=3)
    actions = random_actions(env, 12)
    data = play(env, actions)
    for i, seed in enumerate(chain(3, num_envs or 1)):
        mine = data if num_envs is None else data[:, i]
        own_actions = (actions if num_envs is None else actions[:, i]).double().numpy()
        expected = play_dm_control(name, seed, 5, own_actions)
        assert_same(mine, expected)
        assert mine["next", "truncated"].flatten().nonzero().flatten().tolist() == [4, 9]
        assert not mine["next", "terminated"].any()


@pytest.mark.parametrize("num_envs", [None, 2])
def test_repeats_actions(num_envs: int | None) -> None:
    env = make("cheetah-run", 7, num_envs=num_envs, frame_skip=3, seed=0)
    assert not isinstance(env, TransformedEnv)  # which would repeat them once more
    actions = random_actions(env, 8)
    data = play(env, actions)
    for i, seed in enumerate(chain(0, num_envs or 1)):
        own_actions = (actions if num_envs is None else actions[:, i]).double().numpy()
        mine = data if num_envs is None else data[:, i]
        assert_same(mine, play_dm_control("cheetah-run", seed, 7, own_actions, frame_skip=3))
    # Seven frames are two steps of three and a short one.
    ends = data["next", "done"].reshape(8, -1)[:, 0].nonzero().flatten()
    assert ends.tolist() == [2, 5]


def test_a_task_that_ends_itself_terminates() -> None:
    env = make("lqr-lqr_2_1", num_envs=2, seed=0)
    tensordict = env.reset().set("action", torch.zeros(2, 1))
    physics = copies(env)[1].physics
    physics.data.qpos[:] = physics.data.qvel[:] = 0.0
    physics.forward()
    data, following = env.step_and_maybe_reset(tensordict)
    assert data["next", "terminated"].flatten().tolist() == [False, True]
    assert not data["next", "truncated"].any()
    assert following["observation"][1].norm() > 0.1
    assert not following["done"].any()


def test_clips_what_the_simulator_sees_and_not_the_data() -> None:
    env = make("cheetah-run", num_envs=2, seed=0)
    actions = torch.linspace(-3.0, 3.0, 12).reshape(2, 6)
    data = env.step(env.reset().set("action", actions.clone()))
    assert torch.equal(data["action"], actions)
    for copy, action in zip(copies(env), actions, strict=True):
        assert copy.physics.data.ctrl.tolist() == action.clamp(-1, 1).tolist()


def test_actions_without_limits() -> None:
    env = make("lqr-lqr_2_1", seed=0)
    assert isinstance(env.action_spec, Unbounded)
    env.step(env.reset().set("action", torch.tensor([123.0])))
    assert copies(env)[0].physics.data.ctrl.tolist() == [123.0]


def test_infinite_actions_are_clipped_too() -> None:
    env = make("cheetah-run", seed=0)
    env.step(env.reset().set("action", torch.full((6,), torch.inf)))
    assert copies(env)[0].physics.data.ctrl.tolist() == [1.0] * 6


def test_data_is_not_overwritten_by_later_steps() -> None:
    env = make("cartpole-balance", num_envs=2, seed=0)
    data = env.step(env.reset().set("action", torch.ones(2, 1)))
    before = data.clone()
    env.step(env.reset().set("action", -torch.ones(2, 1)))
    assert (data == before).all()


def test_device() -> None:
    env = make("cartpole-balance", seed=0, device="cpu")
    assert env.reset().device == env.rollout(2).device == torch.device("cpu")
    assert make("cartpole-balance", seed=0).reset().device is None


# Episodes ----------------------------------------------------------------------------------------


def test_collector_goes_through_episodes_of_different_lengths() -> None:
    limits, steps = (3, 4, 7), 30
    env = make("cartpole-swingup", limits, num_envs=3, seed=0)

    def policy(tensordict: TensorDict) -> TensorDict:
        action = (100 * tensordict["observation"].sum(-1, keepdim=True)).sin()
        return tensordict.set("action", 2 * action)

    collector = Collector(env, policy, frames_per_batch=3 * steps, total_frames=6 * steps)
    data = torch.cat([batch.clone() for batch in collector], -1)
    collector.shutdown()
    assert data.shape == (3, 2 * steps)
    trajectories = data["collector", "traj_ids"]
    for i, (limit, seed) in enumerate(zip(limits, chain(0, 3), strict=True)):
        actions = data["action"][i].double().numpy()
        expected = play_dm_control("cartpole-swingup", seed, limit, actions)
        assert_same(data[i], expected)
        ids, counts = trajectories[i].unique_consecutive(return_counts=True)
        assert counts[:-1].tolist() == [limit] * (len(counts) - 1)
        assert len(ids.unique()) == len(ids)
    assert len(trajectories.unique()) == sum(len(own.unique()) for own in trajectories)
    # Within a trajectory the next observation is the following one. Across, it is not.
    same = (data["next", "observation"][:, :-1] == data["observation"][:, 1:]).all(-1)
    assert torch.equal(same, trajectories[:, :-1] == trajectories[:, 1:])


def test_rollout_until_all_are_done_leaves_those_that_are_alone() -> None:
    env = make("cartpole-swingup", (2, 5), num_envs=2, seed=0)
    data = env.rollout(20, break_when_any_done=False, break_when_all_done=True)
    assert data.shape == (2, 5)
    assert [copy._step_count for copy in copies(env)] == [2, 5]
    assert data["next", "done"][0, 1:].all()
    assert data["next", "done"][1].flatten().tolist() == [False] * 4 + [True]
    assert (data["next", "observation"][0, 1:] == data["next", "observation"][0, 1]).all()


def test_resets_only_what_is_asked_for() -> None:
    env = make("cartpole-swingup", num_envs=3, seed=0)
    data = env.rollout(4)[:, -1]["next"]
    mask = torch.tensor([[False], [True], [False]])
    before = data["observation"].clone()
    after = env.reset(data.clone().set("_reset", mask))
    changed = (after["observation"] != before).any(-1)
    assert changed.tolist() == [False, True, False]
    assert [copy._step_count for copy in copies(env)] == [4, 0, 4]


def test_batches_of_batches() -> None:
    env = SerialEnv(
        2, [lambda s=s: make("cartpole-balance", (2, 3), num_envs=2, seed=s) for s in (0, 1)]
    )
    data = collect(env, 7)
    ends = data["next", "truncated"].squeeze(-1)
    assert ends[:, 0].nonzero()[:, 1].tolist() == [1, 3, 5] * 2
    assert ends[:, 1].nonzero()[:, 1].tolist() == [2, 5] * 2


# Seeds -------------------------------------------------------------------------------------------


def first_observations(env: SuiteEnv, episodes: int = 2) -> torch.Tensor:
    return torch.stack([env.reset()["observation"] for _ in range(episodes)])


@pytest.mark.parametrize("name", ["cheetah-run", "lqr-lqr_6_2"])
def test_seed(name: str) -> None:
    env = make(name, num_envs=3, seed=7)
    actions = random_actions(env, 4)
    data = play(env, actions)
    assert_same(play(make(name, num_envs=3, seed=7), actions), data)
    other = make(name, num_envs=3, seed=8)
    assert not torch.equal(play(other, actions)["observation"], data["observation"])
    other.set_seed(7)
    assert_same(play(other, actions), data)
    first = data["observation"][0]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


def test_seed_of_a_further_environment_is_new() -> None:
    env = make("cartpole-balance", num_envs=3)
    following = env.set_seed(0)
    assert following == chain(0, 4)[-1]
    assert env.set_seed(None) is None


def test_static_seed_is_the_same_for_all() -> None:
    env = make("cartpole-balance", num_envs=2)
    assert env.set_seed(5, static_seed=True) == 5
    observation = env.reset()["observation"]
    assert torch.equal(observation[0], observation[1])


def test_environments_without_a_seed_differ() -> None:
    observations = []
    for _ in range(2):
        torch.manual_seed(0)  # as in workers, which all begin with torch's default seed
        np.random.seed(0)
        observations.append(make("cartpole-balance").reset()["observation"])
    assert not torch.equal(*observations)


def test_environments_of_one_creator_differ() -> None:
    creator = EnvCreator(lambda: make("cartpole-balance"))
    assert not torch.equal(first_observations(creator()), first_observations(creator()))


# State -------------------------------------------------------------------------------------------

RANDOM_MODELS = (
    "ball_in_cup-catch",
    "finger-turn_hard",
    "fish-swim",
    "humanoid-run",
    "lqr-lqr_6_2",
    "manipulator-insert_peg",
    "point_mass-hard",
    "reacher-hard",
    "swimmer-swimmer6",
)


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_state_goes_on_exactly(name: str) -> None:
    env, other = (make(name, 12, num_envs=2, seed=seed) for seed in (0, 1))
    assert env.exact_state
    actions = random_actions(env, 20, scale=1.5)
    data = assert_goes_on_exactly(env, other, 7, actions)
    assert data["next", "truncated"].any()  # the step count is part of it
    for mine, theirs in zip(copies(env), copies(other), strict=True):
        assert np.array_equal(mine.physics.get_state(), theirs.physics.get_state())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(map("-".join, suite.ALL_TASKS)) - set(RANDOM_MODELS)))
def test_state_of_all_others_goes_on_exactly(name: str) -> None:
    if name == "quadruped-escape" and "MUJOCO_GL" not in os.environ:
        pytest.skip("needs OpenGL: set MUJOCO_GL")
    test_state_goes_on_exactly(name)


@pytest.mark.parametrize("steps_before", [0, 1, 4, 5, 6])
def test_state_at_any_moment_of_an_episode(steps_before: int) -> None:
    env, other = (make("cheetah-run", 5, num_envs=2, seed=seed) for seed in (0, 1))
    assert_goes_on_exactly(env, other, steps_before, random_actions(env, 14))


def test_state_between_an_end_and_the_reset() -> None:
    env, other = (make("reacher-easy", 2, seed=seed) for seed in (0, 1))
    data = env.rollout(2)[-1]
    other.load_state_dict(save_and_load(env.state_dict()))
    assert data["next", "done"].all()
    with pytest.raises(RuntimeError, match="reset it first"):
        other.step(other.rand_action(data["next"].clone()))
    assert torch.equal(other.reset()["observation"], env.reset()["observation"])


def test_state_goes_into_an_environment_that_has_ended() -> None:
    env, other = (make("reacher-easy", limit, seed=0) for limit in (8, 2))
    other.rollout(2)
    first = env.reset()
    other.load_state_dict(save_and_load(env.state_dict()))
    copies(other)[0]._step_limit = 8
    actions = random_actions(env, 5)
    assert_same(play(other, actions, first), play(env, actions, first))


def test_state_has_the_observations() -> None:
    env, other = (make("reacher-easy", (2, 5), num_envs=2, seed=seed) for seed in (0, 1))
    first = env.rollout(2)[:, -1]["next"].exclude("reward")
    other.load_state_dict(save_and_load(env.state_dict()))
    # The first copy waits for the second one.
    step = first.clone().set("action", torch.zeros(2, 2)).set("_step", torch.tensor([False, True]))
    data = other.step(step)["next"]
    assert torch.equal(data["observation"][0], first["observation"][0])
    assert data["done"].flatten().tolist() == [True, False]


def test_saving_changes_nothing() -> None:
    env, other = (make("reacher-easy", num_envs=2, seed=0) for _ in range(2))
    actions = random_actions(env, 6)
    first, same = env.reset(), other.reset()
    env.state_dict()
    assert_same(play(env, actions, first), play(other, actions, same))


def test_state_of_another_task_is_refused() -> None:
    state = make("cartpole-balance", num_envs=2).state_dict()
    with pytest.raises(ValueError, match="another task or number"):
        make("cartpole-balance", num_envs=3).load_state_dict(state)
    with pytest.raises(ValueError, match="another task or number"):
        make("cheetah-run", num_envs=2).load_state_dict(state)


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cheeta", "run"), "no DM Control task 'cheeta-run'. Did you mean 'cheetah-run'"),
        (("cheetah", "runs"), "no DM Control task 'cheetah-runs'. Did you mean 'cheetah-run'"),
        (("humanoid_cmu", "run"), "Did you mean 'humanoid_CMU-run'"),
        (("", "?"), r"no DM Control task '-\?'. minerva_torchrl.envs.list_envs\(\) lists all"),
    ],
)
def test_unknown_task(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuiteEnv(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_envs": 0}, ValueError, "num_envs must be at least 1"),
        ({"num_envs": 2.0}, TypeError, "num_envs must be an integer"),
        ({"frame_skip": 0}, ValueError, "frame_skip must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be between 0 and"),
        ({"seed": 2**32}, ValueError, "seed must be between 0 and"),
        ({"seed": "0"}, TypeError, "seed must be an integer, got str"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SuiteEnv("cartpole", "balance", **arguments)


def test_must_be_reset_before_it_is_stepped() -> None:
    env = make("cartpole-balance", (5, 1), num_envs=2, seed=0)
    actions = torch.zeros(2, 1)
    with pytest.raises(RuntimeError, match="environment 0 has ended or not begun"):
        env.step(env.fake_tensordict().exclude("next").set("action", actions))
    data = env.step(env.reset().set("action", actions))
    with pytest.raises(RuntimeError, match="environment 1 has ended or not begun"):
        env.step(data["next"].clone().set("action", actions))


def test_actions_must_be_numbers() -> None:
    env = make("cartpole-balance", seed=0)
    with pytest.raises(ValueError, match="not a finite number"):
        env.step(env.reset().set("action", torch.tensor([torch.nan])))


def without_opengl(*args, **kwargs) -> None:
    raise RuntimeError("No OpenGL rendering backend is available.")


def test_tells_what_to_do_without_opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.quadruped.Escape, "initialize_episode", without_opengl)
    with pytest.raises(RuntimeError, match=r"quadruped-escape does not start.*MUJOCO_GL"):
        make("quadruped-escape")


@pytest.fixture
def absl_messages() -> Callable[[], list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = absl_logging.get_absl_logger()
    logger.addHandler(handler)
    yield lambda: messages
    logger.removeHandler(handler)


def test_loads_in_silence(absl_messages: Callable[[], list[str]]) -> None:
    make("cheetah-run")
    absl_logging.warning("something else")
    assert absl_messages() == ["something else"]
