"""Several simulators behind one TorchRL environment."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl._utils import seed_generator
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

from minerva_torchrl.envs.actions import Actions
from minerva_torchrl.envs.failures import EnvironmentFailure
from minerva_torchrl.objectives.checks import check_count
from minerva_torchrl.text import one_line

__all__ = [
    "BatchedEnv",
    "Observation",
    "ObservationLayout",
    "Simulator",
    "copy_seeds",
]

Observation = Iterable[Any]  # numbers and arrays: always as many, of the same shapes

# The shape of each part of an observation by the keys that lead to it, in the order of the flat
# observation. The only part of an observation that is an array itself has no keys: ().
ObservationLayout = dict[tuple[str, ...], tuple[int, ...]]


_LARGEST = float(np.finfo(np.float32).max)


class Simulator(Protocol):
    """One copy of a task."""

    exact_state: bool
    """Whether :meth:`get_state` has all that the future depends on."""

    @property
    def step_limit(self) -> int | None:
        """Steps after which an episode is truncated; ``None`` if there is no limit."""

    def reset(self) -> Observation:
        """Begin an episode."""

    def step(self, action: Any) -> tuple[Observation, float, bool, bool]:
        """The observation, the reward, and whether the episode is terminated or truncated."""

    def seed(self, seed: int) -> None:
        """Seed what episodes draw from."""

    def get_state(self) -> dict[str, Any]:
        """What it takes to go on from here, in tensors, numbers and strings."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`get_state` was called."""

    def render(self, height: int | None, width: int | None) -> NDArray[np.uint8]:
        """A picture, which leaves the simulation as it is."""

    def close(self) -> None:
        """Free what the simulator holds."""


def copy_seeds(seed: int | None, num_envs: int | None) -> list[int]:
    """A seed for each copy; ``None`` asks the operating system for the first one."""
    check_count("num_envs", num_envs, optional=True)
    if seed is None:
        # Not from torch's generator: that one starts out the same in every worker process.
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {type(seed).__name__}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, got {seed}.")
    seeds = [seed]
    while len(seeds) < (num_envs or 1):
        seeds.append(seed_generator(seeds[-1]))
    return seeds


class BatchedEnv(EnvBase):
    """Steps several simulators in turn: the base of ``SuiteEnv`` and ``GymnasiumEnv``.

    Observations are flat and float32. Each simulator is reset on its own when its episode has
    ended, so every transition is one of a single episode. Stepping it further raises an error.

    No observation is infinite or not a number. A step that leads to one, or to such a reward, is
    *lost*: it truncates the episode of its copy, has the observation before it once more, and
    ``nan`` as its reward, which marks it. :class:`~minerva_torchrl.trainers.hooks.FiniteBatches`
    takes such steps out of what is trained on. A copy that loses ``max_skipped`` steps in a row
    raises :class:`EnvironmentFailure`, and so does one that raises anything itself.

    ``state_dict`` holds the state of the simulators and of their random generators.

    Args:
        simulators (sequence of Simulator): the copies.
        actions (Actions): what they take.

    Keyword Args:
        observation_layout (dict): shapes of an observation's parts, by their keys.
        num_envs (int, optional): number of copies, or ``None`` for one without a batch dimension.
        frame_skip (int): simulator steps that an action is repeated for.
        device (torch.device, optional): device of the data.
        title (str): what errors call it.
        max_skipped (int): steps in a row that a copy may lose. Defaults to ``10``.
    """

    on_failure: Callable[[EnvironmentFailure], None] | None = None
    """Called before an :class:`EnvironmentFailure` is raised."""

    _has_frame_skip = True  # without it EnvBase would repeat the repeated steps

    def __init__(
        self,
        simulators: Sequence[Simulator],
        actions: Actions,
        *,
        observation_layout: ObservationLayout,
        num_envs: int | None,
        frame_skip: int,
        device: torch.device | str | None,
        title: str,
        max_skipped: int = 10,
    ) -> None:
        check_count("frame_skip", frame_skip)
        check_count("max_skipped", max_skipped)
        batch_size = [] if num_envs is None else [num_envs]
        super().__init__(device=device, batch_size=batch_size)
        self.is_closed = False
        self.frame_skip, self.title, self.max_skipped = frame_skip, title, max_skipped
        self.actions, self.observation_layout = actions, observation_layout
        self._simulators, shapes = simulators, list(observation_layout.values())
        count, width = len(simulators), sum(math.prod(shape) for shape in shapes)
        self._observation = np.zeros((*batch_size, width), np.float32)
        self._rows = self._observation.reshape(count, width)
        self._numbers = self._observation.reshape(-1)
        self._parts = [_split(row, shapes) for row in self._rows]
        # Done, terminated and truncated. What is done must be reset first, as all must be now.
        self._flags = np.ones((3, *batch_size, 1), bool)
        self._done, self._terminated, self._truncated = self._flags.reshape(3, count)
        # Of each copy: steps of its episode, and steps that it lost in a row.
        self._steps, self._lost = np.zeros((2, count), np.int64)
        self._is_losing = False  # whether any copy lost its last step
        self._make_specs(batch_size, width)

    def _make_specs(self, batch_size: list[int], width: int) -> None:
        kwargs = {"dtype": torch.float32, "device": self.device}
        self.observation_spec = Composite(
            observation=Unbounded((*batch_size, width), **kwargs), shape=batch_size
        )
        spec = self.actions.spec()
        spec = spec.expand(*batch_size, *spec.shape).to(self.device or "cpu")
        self.full_action_spec = Composite(action=spec, shape=batch_size, device=self.device)
        self.reward_spec = Unbounded((*batch_size, 1), **kwargs)
        flag = Binary(1, (*batch_size, 1), dtype=torch.bool, device=self.device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch_size
        )

    @property
    def exact_state(self) -> bool:
        """Whether an environment that loads ``state_dict`` goes on exactly, even mid-episode.

        If not, ``state_dict`` has the random generators only, and what loads it must be reset.
        """
        return all(simulator.exact_state for simulator in self._simulators)

    @property
    def step_limit(self) -> int | None:
        """Actions after which an episode is truncated; ``None`` if the task has no limit."""
        limit = self._simulators[0].step_limit
        return None if limit is None else -(-limit // self.frame_skip)

    # Stepping ------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        # Arrays, or a dictionary of them if an action has parts.
        actions = self.actions.read(tensordict.get("action").detach().cpu().numpy())
        return self._output(reward=self.step_copies(actions, self._selected(tensordict, "_step")))

    def step_copies(
        self, actions: Sequence[Any] | NDArray[Any], selected: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Step copies without making a TensorDict of it.

        Args:
            actions (sequence or array): as ``actions.read`` returns them.
            selected (sequence of int, optional): numbers of the copies to step. Defaults to all.

        Returns:
            array, ``[*num_envs, 1]``: the rewards. :attr:`observation` and :attr:`flags` have the
            rest.
        """
        rewards = np.zeros((*self.batch_size, 1), np.float32)
        before, all_finite = self._rows.copy(), not self._is_losing
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is found below
            for i in range(len(self._simulators)) if selected is None else selected:
                if self._done[i]:
                    raise RuntimeError(
                        f"the episode of environment {i} has ended or not begun: reset it first."
                    )
                self._steps[i] += 1
                try:
                    step, reward = self._simulators[i].step, 0.0
                    for _ in range(self.frame_skip):
                        observation, frame_reward, terminated, truncated = step(actions[i])
                        reward += frame_reward
                        if terminated or truncated:
                            break
                    self._write(i, observation, terminated, truncated)
                    rewards.flat[i] = reward
                    all_finite &= -_LARGEST <= reward <= _LARGEST
                except (Exception, SystemExit) as error:
                    raise self._failure(i, _described(error)) from error
            # One look at all numbers together, which is cheap; large ones may overflow here.
            all_finite &= math.isfinite(self._numbers.dot(self._numbers))
        if not all_finite:
            finite = np.isfinite(self._rows).all(-1) & np.isfinite(rewards.ravel())
            self._lost[finite] = 0
            self._is_losing = not finite.all()
            self._lose(~finite, before, rewards)
        return rewards

    def _lose(self, lost: NDArray[Any], before: NDArray[Any], rewards: NDArray[Any]) -> None:
        """Put marked ends of episodes in the place of steps that are not finite."""
        for i in np.flatnonzero(lost).tolist():
            reward = rewards.flat[i]
            reason = f"a reward of {reward}" if not np.isfinite(reward) else self._not_finite(i)
            self._count_lost(i, reason)
            self._rows[i], rewards.flat[i] = before[i], np.nan
            self._done[i], self._terminated[i], self._truncated[i] = True, False, True

    def _count_lost(self, index: int, reason: str) -> None:
        self._lost[index], self._is_losing = self._lost[index] + 1, True
        if self._lost[index] >= self.max_skipped:
            raise self._failure(
                index,
                f"gave numbers that are not finite {self._lost[index]} times in a row (the limit, "
                f"max_skipped, is {self.max_skipped}), now {reason}",
            )

    def _not_finite(self, index: int) -> str:
        row = self._rows[index]
        entry = int(np.flatnonzero(~np.isfinite(row))[0])
        return f"an observation with {row[entry]} as its entry {entry}"

    def _failure(self, index: int, what: str) -> EnvironmentFailure:
        copy = f", copy {index} of {len(self._simulators)}," if len(self._simulators) > 1 else ""
        moment = f"at step {self._steps[index]} of an episode" if self._steps[index] else "at reset"
        failure = EnvironmentFailure(f"environment {self.title}{copy} {what}, {moment}.")
        if self.on_failure is not None:
            self.on_failure(failure)
        return failure

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDict:
        self.reset_copies(self._selected(tensordict, "_reset"))
        return self._output()

    def reset_copies(self, selected: Sequence[int]) -> None:
        """Begin episodes without making a TensorDict of it.

        Args:
            selected (sequence of int): numbers of the copies to reset.
        """
        for i in selected:
            self._steps[i] = 0
            while True:
                try:
                    with np.errstate(over="ignore", invalid="ignore"):
                        self._write(i, self._simulators[i].reset(), False, False)
                except (Exception, SystemExit) as error:
                    raise self._failure(i, _described(error)) from error
                if np.isfinite(self._rows[i]).all():
                    break
                self._count_lost(i, self._not_finite(i))

    @property
    def observation(self) -> NDArray[np.float32]:
        """The observations of now, ``[*num_envs, O]``: memory that the next step writes into."""
        return self._observation

    @property
    def flags(self) -> NDArray[np.bool_]:
        """Done, terminated and truncated, ``[3, *num_envs, 1]``: such memory, too."""
        return self._flags

    def _selected(self, tensordict: TensorDictBase | None, key: str) -> Sequence[int]:
        """The copies that a mask selects; all, if there is no mask."""
        mask = None if tensordict is None else tensordict.get(key, None)
        if mask is None:
            return range(len(self._simulators))
        return mask.reshape(-1).nonzero().flatten().tolist()

    def _write(
        self, index: int, observation: Observation, terminated: bool, truncated: bool
    ) -> None:
        for part, value in zip(self._parts[index], observation, strict=True):
            part[...] = value
        self._terminated[index] = terminated
        self._truncated[index] = truncated
        self._done[index] = terminated or truncated

    def _output(self, **arrays: NDArray[Any]) -> TensorDict:
        done, terminated, truncated = self._flags.copy()
        arrays["observation"] = self._observation.copy()
        arrays |= {"done": done, "terminated": terminated, "truncated": truncated}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)

    # In TorchRL these two methods check what a step returns, and add what is missing. Here nothing
    # is missing, and the checks would take as long as the simulation itself.

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        return next_tensordict_out

    @classmethod
    def _complete_done(cls, done_spec: Composite, data: TensorDictBase) -> TensorDictBase:
        return data

    # Seeds and state -----------------------------------------------------------------------------

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed all copies and return the seed for a further environment.

        Args:
            seed (int, optional): seed of the first copy; ``None`` changes nothing.
            static_seed (bool): give all copies the same seed. Defaults to ``False``.
        """
        for simulator in self._simulators:
            if seed is not None:
                simulator.seed(seed)
                seed = seed if static_seed else seed_generator(seed)
        return seed

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    def get_extra_state(self) -> Tensor:
        """The state of the simulators and of their random generators, as bytes."""
        state = {
            "observation": torch.from_numpy(self._observation.copy()),
            "flags": torch.from_numpy(self._flags.copy()),
            "counts": torch.from_numpy(np.stack([self._steps, self._lost])),
            "simulators": [simulator.get_state() for simulator in self._simulators],
        }
        # As one tensor, because an EnvCreator loads everything else in the state of its first
        # environment into all that follow, and they would do the same as each other.
        file = io.BytesIO()
        torch.save(state, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Go on where :meth:`get_extra_state` was called."""
        content = torch.load(io.BytesIO(state.cpu().numpy().tobytes()), weights_only=True)
        observation = content["observation"].numpy()
        if observation.shape != self._observation.shape:
            raise ValueError(
                "the state is that of another task or number of environments: its observations "
                f"have the shape {observation.shape} and not {self._observation.shape}."
            )
        self._observation[:] = observation
        self._flags[:] = content["flags"].numpy()
        if "counts" in content:  # version 0.1 had none
            self._steps[:], self._lost[:] = content["counts"].numpy()
            self._is_losing = bool(self._lost.any())
        if not self.exact_state:
            self._done[:] = True  # to be reset
        for simulator, simulator_state in zip(self._simulators, content["simulators"], strict=True):
            simulator.set_state(simulator_state)

    # Pictures ------------------------------------------------------------------------------------

    def render(
        self, index: int = 0, *, height: int | None = None, width: int | None = None
    ) -> NDArray[np.uint8]:
        """A picture of one copy as it is now.

        It changes nothing: the simulation goes on as if there had been none. A copy whose episode
        has ended still shows its last state, until it is reset.

        Pictures of DM Control and of MuJoCo tasks need OpenGL. Without a screen, the environment
        variable ``MUJOCO_GL`` must be ``egl`` or ``osmesa`` before this package is imported.

        Args:
            index (int): number of the copy. Defaults to ``0``.

        Keyword Args:
            height (int, optional): height of a picture of DM Control. Defaults to ``240``. Those of
                Gymnasium have the size that the environment gives them: MuJoCo tasks are made with
                ``height`` and ``width``, the others have a size of their own.
            width (int, optional): width of a picture of DM Control. Defaults to ``320``.

        Returns:
            array of uint8, ``[height, width, 3]``: red, green and blue, from the top left.

        Examples:
            >>> from minerva_torchrl.envs import make_env
            >>> env = make_env("cheetah-run", num_envs=2, seed=0)
            >>> rollout = env.rollout(10)
            >>> env.render(1).shape  # doctest: +SKIP
            (240, 320, 3)
        """
        check_count("height", height, optional=True)
        check_count("width", width, optional=True)
        count = len(self._simulators)
        if not 0 <= index < count:
            raise IndexError(f"index must be between 0 and {count - 1}, got {index}.")
        # Simulators may give a view, even of memory that they draw the next picture into.
        return np.array(self._simulators[index].render(height, width), order="C")

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Free the simulators."""
        if not self.is_closed:
            for simulator in self._simulators:
                simulator.close()
        super().close(raise_if_closed=raise_if_closed)


def _described(error: BaseException) -> str:
    kind, text = type(error).__name__, one_line(error).rstrip(".")
    return f"raised {kind}" if text == kind else f"raised {kind}: {text}"


def _split(row: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Views of the parts that a row consists of."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(row, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
