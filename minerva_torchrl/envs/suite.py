"""The DM Control suite as one batched TorchRL environment."""

from __future__ import annotations

import logging
import math
import os
import warnings
from typing import Any

import mujoco
import numpy as np
import torch
from absl import logging as absl_logging
from numpy.typing import NDArray

from minerva_torchrl.envs._mujoco import get_physics_state, set_physics_state
from minerva_torchrl.envs._names import unknown_name
from minerva_torchrl.envs._opengl import OPENGL_ADVICE, check_screen, no_opengl
from minerva_torchrl.envs.actions import BoxActions
from minerva_torchrl.envs.batched import BatchedEnv, Observation, ObservationLayout, copy_seeds

# OSMesa would draw in a thread of its own. When Python ends, that is gone before DM Control frees
# what it holds there, and tracebacks follow. The other backends have no such thread anyway.
os.environ.setdefault("DISABLE_RENDER_THREAD_OFFLOADING", "1")

with warnings.catch_warnings():
    # GLFW complains where there is no display, which only matters for rendering.
    warnings.filterwarnings("ignore", module="glfw")
    from dm_control import _render, suite

__all__ = ["SuiteEnv", "suite_names"]


def _is_not_about_total_mass(record: logging.LogRecord) -> bool:
    return "'settotalmass' is deprecated" not in record.getMessage()


# The suite's own models cause this warning each time they are loaded.
absl_logging.get_absl_logger().addFilter(_is_not_about_total_mass)


def suite_names() -> list[str]:
    """All tasks as ``"domain-task"``."""
    return [f"{domain}-{task}" for domain, task in suite.ALL_TASKS]


class SuiteEnv(BatchedEnv):
    """Several copies of a DM Control task behind one environment.

    Observations are flat and float32, in the order in which the task lists them. Actions are
    clipped to their bounds here and nowhere else, so that the action in the data stays the one that
    the policy drew. Episodes that end by the time limit are truncated, those that the task ends
    itself are terminated. Every copy starts its next episode on its own.

    The whole simulator state, the tasks' random generators included, is part of ``state_dict``:
    an environment that loads it goes on exactly as the one that saved it would have. (A
    :class:`~torchrl.envs.TransformedEnv` saves its transforms only; its ``base_env`` has the rest.)

    Args:
        domain (str): for example ``"cheetah"``.
        task (str): for example ``"run"``.

    Keyword Args:
        num_envs (int, optional): number of copies. The batch size is ``[num_envs]``, or ``[]`` if
            it is ``None`` (default).
        frame_skip (int): simulator steps that each action is repeated for. Defaults to ``1``.
        seed (int, optional): seed of the first copy; the others follow from it. Without it every
            environment is different.
        device (torch.device, optional): device of the data.
        canonical_actions (bool): actions are between -1 and 1 in the data, whatever the bounds of
            the task. Defaults to ``False``.
        max_skipped (int): steps in a row that may not be finite. Defaults to ``10``.
        **task_kwargs: go to the task, for example ``time_limit``.

    Examples:
        >>> env = SuiteEnv("cartpole", "balance", num_envs=2, seed=0)
        >>> rollout = env.rollout(3)
        >>> rollout["observation"].shape
        torch.Size([2, 3, 5])
        >>> other = SuiteEnv("cartpole", "balance", num_envs=2)
        >>> _ = other.load_state_dict(env.state_dict())
        >>> torch.equal(other.reset()["observation"], env.reset()["observation"])
        True
    """

    def __init__(
        self,
        domain: str,
        task: str,
        *,
        num_envs: int | None = None,
        frame_skip: int = 1,
        seed: int | None = None,
        device: torch.device | str | None = None,
        canonical_actions: bool = False,
        max_skipped: int = 10,
        **task_kwargs: Any,
    ) -> None:
        if (domain, task) not in suite.ALL_TASKS:
            raise unknown_name("DM Control task", f"{domain}-{task}", suite_names())
        if "random" in task_kwargs:
            raise TypeError("random can't be given: the random generators follow from seed.")
        simulators = [
            _SuiteTask(domain, task, seed, task_kwargs) for seed in copy_seeds(seed, num_envs)
        ]
        super().__init__(
            simulators,
            _make_actions(simulators[0].env, canonical_actions),
            observation_layout=simulators[0].observation_layout,
            num_envs=num_envs,
            frame_skip=frame_skip,
            device=device,
            title=f"{domain}-{task}",
            max_skipped=max_skipped,
        )
        self.domain, self.task = domain, task


def _make_actions(env: Any, canonical: bool) -> BoxActions:
    spec = env.action_spec()
    low, high = spec.minimum.copy(), spec.maximum.copy()
    # What MuJoCo writes for actuators without limits.
    low[low <= -mujoco.mjMAXVAL], high[high >= mujoco.mjMAXVAL] = -np.inf, np.inf
    return BoxActions(low, high, canonical=canonical)


class _SuiteTask:
    """A task of the suite as a ``Simulator``."""

    exact_state = True

    def __init__(self, domain: str, task: str, seed: int, task_kwargs: dict[str, Any]) -> None:
        self.domain, self.task, self.task_kwargs = domain, task, task_kwargs
        self._load(seed)

    def _load(self, seed: int) -> None:
        task_kwargs = {"random": seed, **self.task_kwargs}
        self.env = suite.load(self.domain, self.task, task_kwargs=task_kwargs)
        # Some tasks have attributes only once an episode has begun. Its draws do not count.
        random = self.env.task.random.get_state()
        try:
            observation = self.env.reset().observation
        except (mujoco.FatalError, RuntimeError) as error:
            raise RuntimeError(
                f"{self.domain}-{self.task} does not start ({error}). If it cannot do without "
                f"OpenGL, {OPENGL_ADVICE}."
            ) from error
        self.env.task.random.set_state(random)
        self.observation_layout: ObservationLayout = {
            (name,): np.shape(part) for name, part in observation.items()
        }

    @property
    def step_limit(self) -> int | None:
        limit = self.env._step_limit
        return math.ceil(limit) if math.isfinite(limit) else None

    def reset(self) -> Observation:
        return self.env.reset().observation.values()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool]:
        step = self.env.step(action)
        terminated = step.last() and step.discount == 0.0
        truncated = step.last() and not terminated
        return step.observation.values(), step.reward, terminated, truncated

    def seed(self, seed: int) -> None:
        if self.domain == "lqr":  # draws its model, too
            self.close()
            self._load(seed)
        else:
            self.env.task.random.seed(seed)

    def get_state(self) -> dict[str, Any]:
        physics = self.env.physics
        name, keys, position, has_gauss, gauss = self.env.task.random.get_state()
        return {
            "physics": get_physics_state(physics.model.ptr, physics.data.ptr),
            "random": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
            "step_count": self.env._step_count,
            "reset_next_step": self.env._reset_next_step,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        physics = self.env.physics
        set_physics_state(physics.model.ptr, physics.data.ptr, state["physics"])
        name, keys, position, has_gauss, gauss = state["random"]
        keys = keys.numpy().astype(np.uint32)
        self.env.task.random.set_state((name, keys, position, has_gauss, gauss))
        self.env._step_count = state["step_count"]
        self.env._reset_next_step = state["reset_next_step"]

    def render(self, height: int | None, width: int | None) -> NDArray[np.uint8]:
        height = 240 if height is None else height
        width = 320 if width is None else width
        physics = self.env.physics
        largest = physics.model.vis.global_
        if height > largest.offheight or width > largest.offwidth:
            raise ValueError(
                f"pictures of {self.domain}-{self.task} have a height of at most "
                f"{largest.offheight} and a width of at most {largest.offwidth}, "
                f"got {height} and {width}."
            )
        try:
            check_screen(_render.BACKEND)
            self._make_current()
        except Exception as error:  # of another class from each library
            raise no_opengl(error) from error
        return physics.render(height, width, camera_id=0)

    def _make_current(self) -> None:
        """Draw here, and free here: DM Control does not notice when Gymnasium takes over OpenGL."""
        opengl = self.env.physics.contexts.gl  # made now if there is none
        with opengl.make_current() as thread:
            thread.call(opengl._platform_make_current)

    def close(self) -> None:
        physics = self.env.physics
        if physics._contexts is not None:  # else they would stay until Python ends
            self._make_current()
            physics._free_rendering_contexts()
        self.env.close()
