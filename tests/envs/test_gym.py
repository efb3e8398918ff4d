from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, OneHot, Unbounded
from torchrl.envs import EnvCreator, TransformedEnv, check_env_specs

from minerva_torchrl.envs import GymnasiumEnv, make_env
from tests.envs.play import (
    assert_goes_on_exactly,
    assert_same,
    chain,
    play,
    random_actions,
    stack_reference,
)
from tests.envs.recorder import Recorder, registered_recorder
from tests.envs.scripted import save_and_load


def copies(env: GymnasiumEnv) -> list[gymnasium.Env]:
    return [simulator.env for simulator in env._simulators]


def play_gymnasium(name: str, seed: int, actions: np.ndarray, frame_skip: int = 1, **kwargs):
    env = gymnasium.make(name, disable_env_checker=True, **kwargs)
    seeds = iter([seed])

    def reset():
        return (env.reset(seed=next(seeds, None))[0],)

    def step(action: np.ndarray):
        if isinstance(env.action_space, spaces.Box):
            action = np.clip(action, env.action_space.low, env.action_space.high)
        else:
            action = int(action.argmax())
        total = 0.0
        for _ in range(frame_skip):
            observation, reward, terminated, truncated, _ = env.step(action)
            total += reward
            if terminated or truncated:
                break
        return (observation,), total, terminated, truncated

    return stack_reference(reset, step, actions)


BOX = spaces.Box(-1.0, 1.0, (2,))


@pytest.fixture(autouse=True)
def recorder() -> Iterator[None]:
    with registered_recorder():
        yield


def make_recorder(observations: spaces.Space = BOX, actions: spaces.Space = BOX, **kwargs):
    kwargs |= {"observation_space": observations, "action_space": actions}
    return GymnasiumEnv("Recorder-v0", **kwargs)


# Specs and steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"categorical_actions": True}),
        ("Pendulum-v1", {}),
        ("Hopper-v5", {}),
    ],
)
def test_specs(name: str, kwargs: dict, num_envs: int | None) -> None:
    env = GymnasiumEnv(name, num_envs=num_envs, seed=0, **kwargs)
    check_env_specs(env)
    assert env.batch_size == torch.Size([] if num_envs is None else [num_envs])
    assert env.reset()["observation"].dtype == torch.float32


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize(
    ("name", "kwargs", "ends"),
    [
        ("Pendulum-v1", {"max_episode_steps": 5}, {"truncated"}),
        ("HalfCheetah-v5", {"max_episode_steps": 5}, {"truncated"}),
        ("Hopper-v5", {"max_episode_steps": 15}, {"terminated", "truncated"}),
        ("CartPole-v1", {}, {"terminated"}),
    ],
)
def test_does_what_gymnasium_does(
    name: str, kwargs: dict, ends: set[str], num_envs: int | None
) -> None:
    torch.manual_seed(0)
    env = GymnasiumEnv(name, num_envs=num_envs, seed=3, **kwargs)
    actions = random_actions(env, 70, scale=1.5)
    data = play(env, actions)
    for i, seed in enumerate(chain(3, num_envs or 1)):
        mine = data if num_envs is None else data[:, i]
        own_actions = (actions if num_envs is None else actions[:, i]).numpy()
        assert_same(mine, play_gymnasium(name, seed, own_actions, **kwargs))
    assert {key for key in ("terminated", "truncated") if data["next", key].any()} == ends


def test_a_last_step_may_be_both() -> None:
    env = GymnasiumEnv("CartPole-v1", seed=0)
    to_the_left = torch.tensor([[1, 0]]).expand(100, 2)
    length = int(play(env, to_the_left)["next", "terminated"].flatten().nonzero()[0]) + 1
    env = GymnasiumEnv("CartPole-v1", seed=0, max_episode_steps=length)
    data = play(env, to_the_left[:length])
    assert data["next", "terminated"].flatten().tolist() == [False] * (length - 1) + [True]
    assert data["next", "truncated"].flatten().tolist() == [False] * (length - 1) + [True]


def test_repeats_actions() -> None:
    env = GymnasiumEnv("Pendulum-v1", frame_skip=3, seed=0, max_episode_steps=7)
    assert not isinstance(env, TransformedEnv)  # which would repeat them once more
    actions = random_actions(env, 8)
    expected = play_gymnasium("Pendulum-v1", 0, actions.numpy(), 3, max_episode_steps=7)
    assert_same(play(env, actions), expected)
    assert expected["next", "done"].flatten().nonzero().flatten().tolist() == [2, 5]


def test_collector_goes_through_episodes() -> None:
    env = GymnasiumEnv("CartPole-v1", num_envs=3, seed=0)
    collector = Collector(env, None, frames_per_batch=150, total_frames=450)
    data = torch.cat([batch.clone() for batch in collector], -1)
    collector.shutdown()
    trajectories = data["collector", "traj_ids"]
    assert (data["next", "done"].sum(1) > 2).all()
    for i, seed in enumerate(chain(0, 3)):
        assert_same(data[i], play_gymnasium("CartPole-v1", seed, data["action"][i].numpy()))
    changes = trajectories[:, :-1] != trajectories[:, 1:]
    assert torch.equal(changes, data["next", "done"][:, :-1, 0])
    assert len(trajectories.unique()) == 3 + int(changes.sum())
    same = (data["next", "observation"][:, :-1] == data["observation"][:, 1:]).all(-1)
    assert torch.equal(same, ~changes)


# Spaces ------------------------------------------------------------------------------------------


def test_observations_are_flat_in_the_order_of_their_keys() -> None:
    space = spaces.Dict(
        {
            "b": spaces.Box(0, 255, (2, 3), np.uint8),
            "a": spaces.Dict({"y": spaces.Box(-1.0, 1.0, ()), "x": spaces.Box(-2.0, 2.0, (2,))}),
        }
    )
    env = make_recorder(space, num_envs=2, seed=0)
    check_env_specs(env)
    env.set_seed(1)
    observation = env.reset()["observation"]
    assert observation.shape == (2, 9)
    for row, seed in zip(observation, chain(1, 2), strict=True):
        plain = Recorder(space, BOX).reset(seed=seed)[0]
        assert list(plain) == ["a", "b"]  # sorted, as Gymnasium does
        expected = [plain["a"]["x"], [plain["a"]["y"]], plain["b"].flatten()]
        assert row.tolist() == np.concatenate(expected).astype(np.float32).tolist()


def test_box_actions_are_clipped_and_shaped_for_gymnasium_only() -> None:
    space = spaces.Box(-2.0, 1.0, (2, 2), np.float64)
    env = make_recorder(actions=space, num_envs=2, seed=0)
    assert isinstance(env.action_spec, Bounded)
    assert env.action_spec.shape == (2, 4)
    actions = torch.linspace(-4.0, 4.0, 8).reshape(2, 4)
    data = env.step(env.reset().set("action", actions.clone()))
    assert torch.equal(data["action"], actions)
    for copy, action in zip(copies(env), actions, strict=True):
        [seen] = copy.unwrapped.actions
        assert seen.dtype == np.float64
        assert seen.tolist() == action.clamp(-2.0, 1.0).reshape(2, 2).tolist()


def test_actions_without_bounds() -> None:
    low, high = np.float32([-1.0, -np.inf]), np.float32([np.inf, np.inf])
    env = make_recorder(actions=spaces.Box(low, high))
    assert isinstance(env.action_spec, Unbounded)
    env.step(env.reset().set("action", torch.tensor([-5.0, -5.0])))
    assert copies(env)[0].unwrapped.actions[0].tolist() == [-1.0, -5.0]


@pytest.mark.parametrize("categorical", [False, True])
def test_discrete_actions(categorical: bool) -> None:
    space = spaces.Discrete(3, start=10)
    env = make_recorder(actions=space, num_envs=2, categorical_actions=categorical)
    numbers = torch.tensor([2, 0])
    actions = numbers if categorical else torch.nn.functional.one_hot(numbers, 3)
    assert type(env.action_spec) is (Categorical if categorical else OneHot)
    assert env.action_spec.shape == actions.shape
    env.step(env.reset().set("action", actions))
    seen = [copy.unwrapped.actions[0] for copy in copies(env)]
    assert seen == [12, 10]
    assert all(space.contains(action) for action in seen)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"observations": spaces.Discrete(3)}, "observations must be in a Box .* got Discrete"),
        (
            {"observations": spaces.Dict(a=BOX, b=spaces.Tuple([BOX]))},
            "observations must be in a Box .* got Tuple",
        ),
        ({"actions": spaces.Text(3)}, "actions must be .* got Text"),
        ({"actions": spaces.Box(0, 5, (1,), np.int64)}, "actions must be in a Box of floats"),
        ({"categorical_actions": True}, "categorical_actions needs discrete actions, got Box"),
    ],
)
def test_other_spaces_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_recorder(**kwargs)


@pytest.mark.parametrize(
    "image",
    [
        spaces.Box(0, 255, (96, 96, 3), np.uint8),
        spaces.Box(0, 255, (7, 7, 3), np.uint8),
        spaces.Box(0, 255, (84, 84), np.uint8),  # grey
        spaces.Box(0, 255, (96 * 96 * 3,), np.uint8),  # flattened
        spaces.Box(0.0, 1.0, (4, 84, 84)),  # scaled
    ],
)
def test_images_are_refused(image: spaces.Box) -> None:
    message = (
        rf"observations are images, and there is no network for them yet: Box\(.*{image.dtype}"
    )
    with pytest.raises(ValueError, match=message):
        make_recorder(image)
    with pytest.raises(ValueError, match=message):
        make_env("gym:Recorder-v0", observation_space=spaces.Dict(a=BOX, b=image), action_space=BOX)


@pytest.mark.parametrize(
    "vector",
    [
        spaces.Box(0, 255, (128,), np.uint8),  # the memory of a game console
        spaces.Box(0, 2, (3, 3), np.uint8),  # a board
        spaces.Box(-1.0, 1.0, (2000,)),
        spaces.Box(-1.0, 1.0, (2, 2, 2)),
    ],
)
def test_what_is_no_image_is_not_refused(vector: spaces.Box) -> None:
    observation = make_recorder(vector).reset()["observation"]
    assert observation.shape == (np.prod(vector.shape),)


# Seeds -------------------------------------------------------------------------------------------


def test_seed() -> None:
    make = lambda seed: GymnasiumEnv("CartPole-v1", num_envs=3, seed=seed)  # noqa: E731
    env, other = make(7), make(8)
    actions = random_actions(env, 60)
    data = play(env, actions)
    assert data["next", "done"].any()
    assert_same(play(make(7), actions), data)
    assert not torch.equal(play(other, actions)["observation"], data["observation"])
    assert other.set_seed(7) == chain(7, 4)[-1]
    assert_same(play(other, actions), data)
    first = data["observation"][0]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    # The generators run on.
    assert not torch.equal(env.reset()["observation"], first)


def test_environments_without_a_seed_differ() -> None:
    observations = []
    for _ in range(2):
        torch.manual_seed(0)  # as in workers, which all begin with torch's default seed
        np.random.seed(0)
        observations.append(GymnasiumEnv("Pendulum-v1").reset()["observation"])
    assert not torch.equal(*observations)


def test_environments_of_one_creator_differ() -> None:
    creator = EnvCreator(lambda: GymnasiumEnv("Pendulum-v1"))
    assert not torch.equal(creator().reset()["observation"], creator().reset()["observation"])


# State -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 7])
@pytest.mark.parametrize(
    "name",
    [
        "Acrobot-v1",
        "Ant-v5",  # its rewards depend on positions that lag behind the state
        "CartPole-v1",
        "HalfCheetah-v5",
        "Hopper-v5",
        "Humanoid-v5",
        "MountainCar-v0",
        "MountainCarContinuous-v0",
        "Pendulum-v1",
        "Reacher-v5",
    ],
)
def test_state_goes_on_exactly(name: str, steps_before: int) -> None:
    env, other = (
        GymnasiumEnv(name, num_envs=2, seed=seed, max_episode_steps=12) for seed in (0, 1)
    )
    assert env.exact_state
    actions = random_actions(env, 20, scale=1.5)
    data = assert_goes_on_exactly(env, other, steps_before, actions)
    assert data["next", "done"].any()  # the time limit's count is part of it


def test_state_before_the_first_reset() -> None:
    env, other = (GymnasiumEnv("Pendulum-v1", num_envs=2, seed=seed) for seed in (0, 1))
    other.load_state_dict(save_and_load(env.state_dict()))
    assert torch.equal(other.reset()["observation"], env.reset()["observation"])


def test_state_of_an_environment_that_was_never_reset_takes_steps() -> None:
    env, other = (GymnasiumEnv("Hopper-v5", seed=seed) for seed in (0, 1))
    first = env.reset()
    actions = random_actions(env, 5)
    other.load_state_dict(save_and_load(env.state_dict()))
    assert_same(play(other, actions, first), play(env, actions, first))


def test_other_environments_go_on_exactly_from_the_beginning_of_an_episode() -> None:
    env, other = (make_recorder(num_envs=2, seed=seed) for seed in (0, 1))
    assert not env.exact_state
    data = env.rollout(3)[:, -1]
    other.reset()
    other.load_state_dict(save_and_load(env.state_dict()))
    with pytest.raises(RuntimeError, match="reset it first"):
        other.step(data["next"].clone().set("action", data["action"]))
    assert torch.equal(other.reset()["observation"], env.reset()["observation"])


class OwnCartPole(gymnasium.envs.classic_control.CartPoleEnv):
    pass


def test_classes_of_others_may_have_other_state() -> None:
    gymnasium.register("OwnCartPole-v0", OwnCartPole)
    assert not GymnasiumEnv("OwnCartPole-v0").exact_state
    assert not GymnasiumEnv("CartPole-v1", disable_env_checker=False).exact_state
    del gymnasium.registry["OwnCartPole-v0"]


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "HalfCheeta-v5",
            "no Gymnasium environment 'HalfCheeta-v5'. Did you mean 'HalfCheetah-v5'",
        ),
        ("halfcheetah-v5", "Did you mean 'HalfCheetah-v5'"),
        ("HalfCheetah-v99", "Did you mean 'HalfCheetah-v"),
        ("?", r"no Gymnasium environment '\?'. minerva_torchrl.envs.list_envs\(\) lists all"),
    ],
)
def test_unknown_environment(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymnasiumEnv(name)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_envs": 0}, ValueError, "num_envs must be at least 1"),
        ({"frame_skip": 1.5}, TypeError, "frame_skip must be an integer"),
        ({"seed": -1}, ValueError, "seed must be between 0 and"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GymnasiumEnv("Pendulum-v1", **arguments)


def test_must_be_reset_after_an_end() -> None:
    env = GymnasiumEnv("Pendulum-v1", max_episode_steps=1, seed=0)
    data = env.step(env.rand_action(env.reset()))
    with pytest.raises(RuntimeError, match="reset it first"):
        env.step(env.rand_action(data["next"].clone()))
