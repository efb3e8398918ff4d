"""Gymnasium environments as one batched TorchRL environment."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs import classic_control
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from torchrl.envs import EnvBase

from minerva_torchrl.envs._mujoco import get_physics_state, set_physics_state
from minerva_torchrl.envs._names import unknown_name
from minerva_torchrl.envs._opengl import check_screen, no_opengl
from minerva_torchrl.envs.actions import actions_of
from minerva_torchrl.envs.batched import BatchedEnv, Observation, copy_seeds
from minerva_torchrl.envs.torchrl_env import TorchRLAsGymnasium
from minerva_torchrl.text import one_line

__all__ = ["GymnasiumEnv", "gymnasium_names"]

GymEnv = gymnasium.Env[Any, Any]

_CLASSIC_CONTROL = (
    classic_control.AcrobotEnv,
    classic_control.CartPoleEnv,
    classic_control.Continuous_MountainCarEnv,
    classic_control.MountainCarEnv,
    classic_control.PendulumEnv,
)
_CLASSIC_CONTROL_STATE = ("state", "last_u", "steps_beyond_terminated")
_WRAPPER_STATE = {OrderEnforcing: "_has_reset", TimeLimit: "_elapsed_steps"}


def gymnasium_names() -> list[str]:
    """All environments that are registered."""
    return sorted(gymnasium.registry)


class GymnasiumEnv(BatchedEnv):
    """Several copies of a Gymnasium environment behind one environment.

    Observations are flat and float32; those of a ``Dict`` space follow each other in the order of
    its keys. Actions of a ``Box`` space are flat, too, and clipped to their bounds here and nowhere
    else, so that the action in the data stays the one that the policy drew. Actions of several
    parts have an entry for each: ``("action", "arm")`` for the key ``"arm"`` of a ``Dict``,
    ``("action", "0")`` for the first part of a ``Tuple``, ``MultiDiscrete`` or ``MultiBinary``,
    and ``("action", "arm_0")`` for the first part of what has the key ``"arm"``.
    Ends are terminated or truncated as Gymnasium says. Every copy starts its next episode on its
    own, and every transition is a real one.

    The generators of the copies are part of ``state_dict``. For Gymnasium's own MuJoCo and classic
    control environments the state of the simulators is, too: an environment that loads it goes on
    exactly as the one that saved it would have. Others go on exactly only from an episode's
    beginning: :attr:`exact_state` tells, and they must be reset after loading. (A
    :class:`~torchrl.envs.TransformedEnv` saves its transforms only; its ``base_env`` has the rest.)

    Args:
        name (str or callable): for example ``"HalfCheetah-v5"``; or what makes a single environment
            when it is called: a subclass of :class:`gymnasium.Env`, or a function that returns one
            or a TorchRL environment.

    Keyword Args:
        num_envs (int, optional): number of copies. The batch size is ``[num_envs]``, or ``[]`` if
            it is ``None`` (default).
        frame_skip (int): environment steps that each action is repeated for, on top of those that
            the environment takes itself. Defaults to ``1``.
        seed (int, optional): seed of the first copy; the others follow from it. Each is used in a
            copy's first reset. Without it every environment is different.
        device (torch.device, optional): device of the data.
        max_skipped (int): steps in a row that may not be finite. Defaults to ``10``.
        categorical_actions (bool): represent discrete actions by their numbers and not one-hot.
            Defaults to ``False``.
        canonical_actions (bool): continuous actions are between -1 and 1 in the data, whatever the
            bounds of the environment. Defaults to ``False``.
        wrappers (sequence of callables): Gymnasium wrappers that go around each copy, the innermost
            first. Defaults to none.
        **make_kwargs: go to :func:`gymnasium.make`, for example ``max_episode_steps``, or to the
            callable. ``render`` needs ``render_mode="rgb_array"``; MuJoCo tasks also take
            ``height`` and ``width``.

    Examples:
        >>> env = GymnasiumEnv("Pendulum-v1", num_envs=2, seed=0, max_episode_steps=3)
        >>> rollout = env.rollout(3)
        >>> rollout["observation"].shape
        torch.Size([2, 3, 3])
        >>> rollout["next", "truncated"][:, -1].all()
        tensor(True)
        >>> GymnasiumEnv("CartPole-v1").action_spec
        OneHot(
            shape=torch.Size([2]),
            ...
    """

    def __init__(
        self,
        name: str | Callable[..., Any],
        *,
        num_envs: int | None = None,
        frame_skip: int = 1,
        seed: int | None = None,
        device: torch.device | str | None = None,
        max_skipped: int = 10,
        categorical_actions: bool = False,
        canonical_actions: bool = False,
        wrappers: Sequence[Callable[[GymEnv], GymEnv]] = (),
        **make_kwargs: Any,
    ) -> None:
        seeds = copy_seeds(seed, num_envs)
        envs = [_wrap(_make(name, make_kwargs), wrappers) for _ in seeds]
        actions = actions_of(
            envs[0].action_space, categorical=categorical_actions, canonical=canonical_actions
        )
        layout = {keys: box.shape for keys, box in _boxes(envs[0].observation_space)}
        simulators = [_GymnasiumCopy(env, seed) for env, seed in zip(envs, seeds, strict=True)]
        super().__init__(
            simulators,
            actions,
            observation_layout=layout,
            num_envs=num_envs,
            frame_skip=frame_skip,
            device=device,
            title=f"gym:{name}" if isinstance(name, str) else _title(name),
            max_skipped=max_skipped,
        )
        self.name = name


def _title(make: Callable[..., Any]) -> str:
    """The name of what makes an environment."""
    make = getattr(make, "func", make)  # of a partial
    return f"{make.__module__}:{getattr(make, '__qualname__', type(make).__qualname__)}"


# Spaces ------------------------------------------------------------------------------------------


def _boxes(
    space: spaces.Space[Any], keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], spaces.Box]]:
    """The boxes that an observation consists of, in order, and the keys that lead to them."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _boxes(part, (*keys, key))
    elif not isinstance(space, spaces.Box):
        raise ValueError(f"observations must be in a Box or in a Dict of Boxes, got {space}.")
    elif _is_image(space):
        raise ValueError(f"observations are images, and there is no network for them yet: {space}.")
    else:
        yield keys, space


def _is_image(box: spaces.Box) -> bool:
    """Whether a box has two of an image's three marks: bytes, channels, 32 x 32 pixels or more.

    Flattened or grey images have lost the channels, scaled ones the bytes. What has one mark only
    may be a board, or the memory of a game console.
    """
    marks = (box.dtype == np.uint8, len(box.shape) >= 3, math.prod(box.shape) >= 32 * 32)
    return sum(marks) >= 2


# Simulators --------------------------------------------------------------------------------------


def _make(name: str | Callable[..., Any], kwargs: dict[str, Any]) -> GymEnv:
    if callable(name):
        env = name(**kwargs)
        if isinstance(env, EnvBase):
            return TorchRLAsGymnasium(env)
        if not isinstance(env, gymnasium.Env):
            raise ValueError(
                "what makes an environment must return one of Gymnasium or TorchRL, got "
                f"{type(env).__name__}."
            )
        return env
    try:
        return gymnasium.make(name, **{"disable_env_checker": True, **kwargs})
    except Exception as error:  # of many classes: packages that are missing, wrong arguments
        unknown = (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv)
        if isinstance(error, unknown) or "Malformed environment ID" in str(error):
            raise unknown_name("Gymnasium environment", name, gymnasium_names()) from error
        module = name.partition(":")[0]
        missing = error.name if isinstance(error, ModuleNotFoundError) else ""
        if ":" in name and missing in (None, module):
            raise ValueError(f"there is no module {module!r} to import for {name!r}.") from error
        if isinstance(error, TypeError) and kwargs:
            raise  # one of them is wrong
        kind = type(error).__name__
        raise ValueError(f"{name} can't be made here ({kind}: {one_line(error)})") from error


def _wrap(env: GymEnv, wrappers: Sequence[Callable[[GymEnv], GymEnv]]) -> GymEnv:
    for wrapper in wrappers:
        env = wrapper(env)
        if not isinstance(env, gymnasium.Env):
            raise ValueError(
                f"wrappers: {getattr(wrapper, '__qualname__', wrapper)} must return a Gymnasium "
                f"environment, got {type(env).__name__}."
            )
    return env


class _GymnasiumCopy:
    """A Gymnasium environment as a ``Simulator``."""

    def __init__(self, env: GymEnv, seed: int) -> None:
        self.env = env
        self.first_seed: int | None = seed
        self.wrappers: list[gymnasium.Wrapper[Any, Any, Any, Any]] = []
        while isinstance(env, gymnasium.Wrapper):
            self.wrappers.append(env)
            env = env.env
        self.step_limit = self.env.spec.max_episode_steps if self.env.spec else None
        for wrapper in self.wrappers:
            if isinstance(wrapper, TimeLimit) and self.step_limit is None:
                self.step_limit = wrapper._max_episode_steps
        self.parts = [keys for keys, _ in _boxes(self.env.observation_space)]
        self.has_physics = isinstance(getattr(env, "model", None), mujoco.MjModel)
        self.renderer: Any = getattr(env, "mujoco_renderer", None)  # has no viewer at first
        # Classes of others may have state that is not known here.
        self.exact_state = (
            all(type(wrapper) in _WRAPPER_STATE for wrapper in self.wrappers)
            and type(env).__module__.startswith("gymnasium.envs.")
            and (self.has_physics or isinstance(env, _CLASSIC_CONTROL))
        )

    def _observation(self, observation: Any) -> Observation:
        return [reduce(getitem, keys, observation) for keys in self.parts]

    def reset(self) -> Observation:
        observation, _ = self.env.reset(seed=self.first_seed)
        self.first_seed = None  # the generator runs on
        return self._observation(observation)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return self._observation(observation), float(reward), terminated, truncated

    def seed(self, seed: int) -> None:
        self.first_seed = seed

    def get_state(self) -> dict[str, Any]:
        env: Any = self.env.unwrapped
        state: dict[str, Any] = {
            "first_seed": self.first_seed,
            "random": copy.deepcopy(env.np_random.bit_generator.state),
        }
        if self.exact_state:
            state["wrappers"] = [getattr(x, _WRAPPER_STATE[type(x)]) for x in self.wrappers]
            if self.has_physics:
                state["physics"] = get_physics_state(env.model, env.data)
            else:
                names = [name for name in _CLASSIC_CONTROL_STATE if hasattr(env, name)]
                state["attributes"] = {name: _to_plain(getattr(env, name)) for name in names}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        env: Any = self.env.unwrapped
        self.first_seed = state["first_seed"]
        env.np_random.bit_generator.state = state["random"]
        if self.exact_state:
            for wrapper, value in zip(self.wrappers, state["wrappers"], strict=True):
                setattr(wrapper, _WRAPPER_STATE[type(wrapper)], value)
            if self.has_physics:
                set_physics_state(env.model, env.data, state["physics"])
            else:
                for name, value in state["attributes"].items():
                    setattr(env, name, _from_plain(value))

    def render(self, height: int | None, width: int | None) -> Any:
        if height is not None or width is not None:
            raise ValueError(
                "pictures of Gymnasium have the size that the environment was made with, and take "
                f"no height and width; got {height} and {width}."
            )
        if self.env.render_mode != "rgb_array":
            name = self.env.spec.id if self.env.spec else "the environment"
            raise RuntimeError(
                f'{name} must be made with render_mode="rgb_array" to be rendered, '
                f"and not with {self.env.render_mode!r}."
            )
        if self.renderer is None:
            return self.env.render()
        try:
            check_screen(os.environ.get("MUJOCO_GL", "glfw"))
            self._make_current()
            return self.env.render()
        except gymnasium.error.Error:
            raise
        except Exception as error:  # of another class from each library
            raise no_opengl(error) from error

    def _make_current(self) -> None:
        """Draw here, and free here: OpenGL takes what was current last, be it another copy's."""
        if self.renderer is not None and self.renderer.viewer is not None:
            self.renderer.viewer.make_context_current()

    def close(self) -> None:
        self._make_current()
        self.env.close()


def _to_plain(value: Any) -> Any:
    """Arrays as tensors, which checkpoints may hold."""
    if isinstance(value, tuple):
        return tuple(_to_plain(item) for item in value)
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value))
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_from_plain(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.numpy()[()].copy()
    return value
