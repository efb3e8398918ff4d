from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys

import glfw
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from minerva_torchrl.envs import GymnasiumEnv, SuiteEnv, make_env
from minerva_torchrl.envs import suite as suite_module
from minerva_torchrl.envs.batched import BatchedEnv
from tests.envs.play import assert_same, play, random_actions

PICTURE = """
from dm_control import suite
env = suite.load("cartpole", "balance")
env.reset()
env.physics.render()
"""

ADVICE = r"rendering needs OpenGL: .*MUJOCO_GL to 'egl' .*libegl1.* or to 'osmesa' \(libosmesa6\)"


@functools.cache
def has_opengl(backend: str | None) -> bool:
    """Tried in another process, because a failure may be the end of it."""
    environment = {key: value for key, value in os.environ.items() if key != "MUJOCO_GL"}
    if backend is not None:
        environment["MUJOCO_GL"] = backend
    command = [sys.executable, "-c", PICTURE]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


@pytest.fixture
def opengl() -> None:
    if not has_opengl(os.environ.get("MUJOCO_GL")):
        pytest.skip("without OpenGL here: set MUJOCO_GL to egl or osmesa")


needs_opengl = pytest.mark.usefixtures("opengl")
needs_pygame = pytest.mark.skipif(
    importlib.util.find_spec("pygame") is None, reason="pygame is not installed"
)


def make(name: str, **kwargs) -> BatchedEnv:
    if name.startswith("gym:"):
        return GymnasiumEnv(name.removeprefix("gym:"), render_mode="rgb_array", **kwargs)
    return SuiteEnv(*name.split("-"), **kwargs)


def is_a_picture(frame: np.ndarray) -> bool:
    return frame.dtype == np.uint8 and frame.flags.c_contiguous and bool(frame.std() > 5)


@pytest.mark.slow
@pytest.mark.skipif("MUJOCO_GL" in os.environ, reason="MUJOCO_GL is chosen already")
def test_all_of_this_where_another_backend_works() -> None:
    if has_opengl(None):
        pytest.skip("the default works")
    backend = next(filter(has_opengl, ("egl", "osmesa")), None)
    if backend is None:
        pytest.skip("without OpenGL here: neither egl nor osmesa works")
    # In another process, because this one has imported DM Control.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"MUJOCO_GL": backend}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "without OpenGL here" not in result.stdout


# Pictures ----------------------------------------------------------------------------------------


@needs_opengl
@pytest.mark.parametrize("num_envs", [None, 2])
def test_pictures_of_dm_control(num_envs: int | None) -> None:
    env = make("cartpole-swingup", num_envs=num_envs, seed=0)
    env.reset()
    frame = env.render()
    assert frame.shape == (240, 320, 3)
    assert is_a_picture(frame)
    for size in ((64, 48), (31, 57), (480, 640)):
        frame = env.render(height=size[0], width=size[1])
        assert frame.shape == (*size, 3)
        assert is_a_picture(frame)
    physics = env._simulators[0].env.physics
    assert np.array_equal(env.render(), physics.render(240, 320, camera_id=0))


@needs_opengl
@pytest.mark.parametrize(
    ("kwargs", "size"), [({}, (480, 480)), ({"height": 60, "width": 100}, (60, 100))]
)
def test_pictures_of_gymnasium_have_their_own_size(kwargs: dict, size: tuple[int, int]) -> None:
    env = make("gym:Hopper-v5", num_envs=2, seed=0, **kwargs)
    env.reset()
    with pytest.raises(ValueError, match=r"take no height and width; got 33 and 44"):
        env.render(1, height=33, width=44)
    frame = env.render(1)
    assert frame.shape == (*size, 3)
    assert is_a_picture(frame)


@needs_pygame
@pytest.mark.parametrize(
    ("name", "size"), [("CartPole-v1", (400, 600)), ("Pendulum-v1", (500,) * 2)]
)
def test_pictures_of_classic_control(name: str, size: tuple[int, int]) -> None:
    env = make(f"gym:{name}", seed=0)
    env.reset()
    assert env.render().shape == (*size, 3)
    assert is_a_picture(env.render())


@needs_opengl
@pytest.mark.slow
@pytest.mark.parametrize("name", suite_module.suite_names())
def test_pictures_of_all_tasks(name: str) -> None:
    env = make(name, seed=0)
    env.reset()
    assert is_a_picture(env.render())
    env.close()


@needs_opengl
@pytest.mark.parametrize("name", ["cheetah-run", "gym:HalfCheetah-v5"])
def test_shows_the_copy_as_it_is(name: str) -> None:
    env = make(name, num_envs=2, seed=0)
    first = env.reset()
    before = [env.render(i) for i in range(2)]
    assert not np.array_equal(*before)
    step = first.set("action", torch.ones(2, 6)).set("_step", torch.tensor([False, True]))
    env.step(step)
    assert np.array_equal(env.render(0), before[0])
    assert not np.array_equal(env.render(1), before[1])


@needs_opengl
def test_shows_the_last_state_until_the_reset() -> None:
    env = make("gym:Hopper-v5", seed=0, max_episode_steps=3)
    env.rollout(3)
    last = env.render()
    assert np.array_equal(env.render(), last)
    env.reset()
    assert not np.array_equal(env.render(), last)


@needs_opengl
def test_shows_a_state_that_was_loaded() -> None:
    env, other = (make("reacher-easy", num_envs=2, seed=seed) for seed in (0, 1))
    env.rollout(5)
    assert not np.array_equal(other.render(1), env.render(1))
    other.load_state_dict(env.state_dict())
    assert np.array_equal(other.render(1), env.render(1))


@needs_opengl
def test_pictures_are_not_drawn_over() -> None:
    env = make("cartpole-swingup", seed=0)
    frames = []
    for _ in range(3):
        env.reset()
        frames.append(env.render())
    assert not np.array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[1], frames[2])


@needs_opengl
@pytest.mark.parametrize(
    "names",
    [
        ("cheetah-run", "gym:Hopper-v5", "cartpole-swingup"),
        ("gym:Hopper-v5", "cheetah-run", "gym:Ant-v5"),
    ],
)
def test_environments_side_by_side(names: tuple[str, ...]) -> None:
    envs = [make(name, seed=0) for name in names]
    for env in envs:
        env.reset()
    frames = [env.render() for env in envs]
    assert all(map(is_a_picture, frames))
    for ended in range(len(envs)):
        for env, frame in zip(envs[ended:], frames[ended:], strict=True):
            assert np.array_equal(env.render(), frame)
        envs[ended].close()


@needs_opengl
def test_through_the_transforms() -> None:
    env = make_env("cartpole-swingup", num_envs=2, seed=0, observation_norm=True)
    env.rollout(3)
    assert np.array_equal(env.render(1), env.base_env.render(1))


# The simulation goes on as without ---------------------------------------------------------------


def play_with_pictures(env: BatchedEnv, actions: Tensor) -> TensorDict:
    """As ``play``, with pictures between all steps."""
    tensordict, steps = env.reset(), []
    for action in actions:
        for i in range(2):
            before = env.get_extra_state()
            env.render(i)
            assert torch.equal(env.get_extra_state(), before)
        step, tensordict = env.step_and_maybe_reset(tensordict.set("action", action))
        steps.append(step.clone())
    return torch.stack(steps)


def assert_goes_on_as_without(name: str, **kwargs) -> None:
    env, other = (make(name, num_envs=2, seed=3, **kwargs) for _ in range(2))
    assert env.exact_state
    if not name.startswith("gym:"):
        for simulator in env._simulators + other._simulators:
            simulator.env._step_limit = 5
    actions = random_actions(env, 8)
    expected = play(other, actions)
    assert expected["next", "done"].any()
    assert_same(play_with_pictures(env, actions), expected)
    env.render()
    assert torch.equal(env.get_extra_state(), other.get_extra_state())
    assert torch.equal(env.reset()["observation"], other.reset()["observation"])


@needs_opengl
@pytest.mark.parametrize(
    "name",
    ["humanoid-run", "manipulator-bring_ball", "reacher-easy", "gym:Ant-v5", "gym:Hopper-v5"],
)
def test_changes_nothing(name: str) -> None:
    kwargs = {"max_episode_steps": 5, "height": 48, "width": 64} if name[:4] == "gym:" else {}
    assert_goes_on_as_without(name, **kwargs)


@needs_pygame
@pytest.mark.parametrize("name", ["Acrobot-v1", "CartPole-v1", "MountainCar-v0", "Pendulum-v1"])
def test_changes_nothing_in_classic_control(name: str) -> None:
    assert_goes_on_as_without(f"gym:{name}", max_episode_steps=5)


# Ends --------------------------------------------------------------------------------------------


@needs_opengl
@pytest.mark.parametrize("name", ["cheetah-run", "gym:HalfCheetah-v5"])
def test_close(name: str) -> None:
    env = make(name, num_envs=2, seed=0)
    env.reset()
    env.render(1)
    env.close()
    if name == "cheetah-run":
        assert env._simulators[1].env.physics._contexts is None
    env.state_dict()


@needs_opengl
def test_another_model_is_drawn_anew() -> None:
    env = make("lqr-lqr_6_2", seed=0)
    env.reset()
    before = env.render()
    old = env._simulators[0].env.physics
    env.set_seed(1)
    assert old._contexts is None
    env.reset()
    assert not np.array_equal(env.render(), before)


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"index": 2}, IndexError, "index must be between 0 and 1, got 2"),
        ({"index": -1}, IndexError, "index must be between 0 and 1, got -1"),
        ({"height": 0}, ValueError, "height must be at least 1"),
        ({"width": 64.0}, TypeError, "width must be an integer"),
        ({"height": 481}, ValueError, "height of at most 480 .* got 481 and 320"),
        ({"width": 641}, ValueError, "width of at most 640, got 240 and 641"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make("cartpole-balance", num_envs=2).render(**arguments)


@pytest.mark.parametrize(
    ("name", "mode"), [("Hopper-v5", None), ("Hopper-v5", "depth_array"), ("CartPole-v1", None)]
)
def test_gymnasium_must_be_made_for_pictures(name: str, mode: str | None) -> None:
    env = GymnasiumEnv(name, render_mode=mode)
    env.reset()
    with pytest.raises(RuntimeError, match=rf'{name} must be made with render_mode="rgb_array"'):
        env.render()


@pytest.mark.parametrize("name", ["cartpole-balance", "gym:Hopper-v5"])
def test_tells_what_to_do_without_a_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_module._render, "BACKEND", "glfw")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.setattr(glfw, "init", lambda: False)
    env = make(name)
    env.reset()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=ADVICE + ".* GLFW finds no screen") as error:
            env.render()
        assert "\n" not in str(error.value)


class NoLibraryError(Exception):
    """Each library has its own."""


def without_opengl(*args, **kwargs) -> None:
    raise NoLibraryError("no\nlibrary")


@pytest.mark.parametrize("name", ["cartpole-balance", "gym:Hopper-v5"])
def test_tells_what_to_do_without_opengl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_module._render, "BACKEND", "egl")
    monkeypatch.setattr(suite_module._render, "Renderer", without_opengl)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    env = make(name)
    env.reset()
    if name.startswith("gym:"):
        monkeypatch.setattr(env._simulators[0].env.unwrapped, "render", without_opengl)
    with pytest.raises(RuntimeError, match=ADVICE + ".* The error was: no library$") as error:
        env.render()
    assert isinstance(error.value.__cause__, NoLibraryError)
