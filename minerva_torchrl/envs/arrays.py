"""Rollouts of batched simulators in arrays: a TensorDict for each batch and none for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import (
    Compose,
    EnvBase,
    InitTracker,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)

from minerva_torchrl.envs.batched import BatchedEnv
from minerva_torchrl.envs.staggering import StaggeredEpisodes
from minerva_torchrl.envs.transforms import ReturnStdScaling, RunningObservationNorm

__all__ = ["ArrayRollout"]

_FIRST = (InitTracker, StepCounter, RewardSum)
_OPTIONAL = (StaggeredEpisodes, RunningObservationNorm, ReturnStdScaling)


class ArrayRollout:
    r"""What a collector does with an environment of ``make_env``, at a fraction of the time.

    TorchRL passes a TensorDict from the policy to the environment and through its transforms in
    each step, which takes several times as long as the simulation of a single copy. Here a step
    writes into arrays, the transforms of ``make_env`` are a few operations each, and what follows
    from other entries (``is_init``, and the entries of a step that the step before it has already)
    is filled in once for all steps.

    :meth:`of` makes one, if the environment is nothing but simulators of this process with the
    transforms of ``make_env``. Other environments, or those with further transforms, have to be
    stepped by TorchRL.

    Examples:
        >>> from minerva_torchrl.envs import make_env
        >>> env = make_env("cartpole-swingup", num_envs=2, seed=0)
        >>> actions = np.zeros((2, 1), np.float32)
        >>> batch, last = ArrayRollout.of(env).rollout(env.reset(), 5, lambda observation: actions)
        >>> batch["next", "observation"].shape, last["observation"].shape
        (torch.Size([2, 5, 5]), torch.Size([2, 5]))
        >>> batch["next", "step_count"][0].flatten()
        tensor([1, 2, 3, 4, 5])
    """

    def __init__(self, env: BatchedEnv, transforms: list[Transform]) -> None:
        self.env = env
        self.max_steps: int | None = transforms[1].max_steps
        found = {type(transform): transform for transform in transforms}
        self.staggering: StaggeredEpisodes | None = found.get(StaggeredEpisodes)
        self.norm: RunningObservationNorm | None = found.get(RunningObservationNorm)
        self.scaling: ReturnStdScaling | None = found.get(ReturnStdScaling)

    @classmethod
    def of(cls, env: EnvBase) -> ArrayRollout | None:
        """Rollouts of an environment; ``None`` if it has anything that is not known here.

        Args:
            env (EnvBase): any environment.
        """
        if type(env) is not TransformedEnv or not isinstance(env.transform, Compose):
            return None
        transforms = list(env.transform)
        classes = tuple(map(type, transforms))
        expected = (*_FIRST, *(kind for kind in _OPTIONAL if kind in classes))
        known = classes == expected and isinstance(env.base_env, BatchedEnv)
        known = known and env.device in (None, torch.device("cpu"))
        return cls(env.base_env, transforms) if known and _usual(transforms) else None

    def rollout(
        self,
        start: TensorDictBase,
        steps: int,
        act: Callable[[Tensor], Any],
    ) -> tuple[TensorDict, TensorDict]:
        """Steps of all copies. Episodes that end are followed by new ones.

        Args:
            start (TensorDictBase): what ``env.reset()`` or the last rollout returned, ``[*K]``.
            steps (int): number of steps, ``T``.
            act (callable): actions ``[*K, ...]`` for observations ``[*K, O]``, an array or, of
                actions with parts, a dictionary of arrays.

        Returns:
            All entries ``[*K, T]`` but those of the policy, and what to go on from, ``[*K]``.
        """
        env, scaling = self.env, self.scaling
        shape = tuple(env.batch_size)
        observations = np.empty((steps + 1, *env.observation.shape), np.float32)
        observations[0] = start.get("observation").numpy()
        inputs = torch.from_numpy(observations).unbind()
        next_observations = np.empty_like(observations[1:])
        rewards, raw_rewards, returns = np.empty((3, steps, *shape, 1), np.float32)
        flags = np.empty((steps, 3, *shape, 1), bool)
        counts = np.empty((steps, *shape, 1), np.int64)
        episode_return = start.get("episode_reward").numpy().copy()
        count = start.get("step_count").numpy().copy()
        for t in range(steps):
            # A copy has torch's alignment, on which the last bit of a matrix product depends.
            reward = env.step_copies(env.actions.read(act(inputs[t].clone())))
            count += 1
            episode_return += reward
            counts[t], returns[t] = count, episode_return
            done, terminated, _ = now = flags[t]
            now[:] = env.flags
            self._truncate(now, count)
            observation = env.observation
            if self.norm is not None:
                observation = self.norm.observe(torch.from_numpy(observation)).numpy()
            next_observations[t] = observations[t + 1] = observation
            if scaling is not None:
                raw_rewards[t] = reward
                scaled = scaling.scale(torch.from_numpy(reward), torch.from_numpy(terminated))
                reward = scaled.numpy()
            rewards[t] = reward
            if done.any():
                self._restart(done, observations[t + 1])
                count[done], episode_return[done] = 0, 0.0
        after = {
            "observation": next_observations,
            "reward": rewards,
            "step_count": counts,
            "episode_reward": returns,
        }
        if scaling is not None and scaling.raw_key is not None:
            after["raw_reward"] = raw_rewards
        done, terminated, truncated = (_by_copy(x, shape) for x in flags.swapaxes(0, 1))
        return _tensordicts(
            start,
            _by_copy(observations, shape),
            {name: _by_copy(array, shape) for name, array in after.items()},
            {"done": done, "terminated": terminated, "truncated": truncated},
        )

    def _truncate(self, flags: NDArray[np.bool_], count: NDArray[np.int64]) -> None:
        """End episodes that are long enough, in ``flags``: done, terminated and truncated."""
        cuts: list[Any] = []
        if self.max_steps is not None:
            cuts.append(count >= self.max_steps)
        if self.staggering is not None:
            cut = self.staggering.cut(torch.from_numpy(flags[1]))
            cuts += [] if cut is None else [cut.numpy()]
        for cut in cuts:
            flags[0] |= cut
            flags[2] |= cut

    def _restart(self, done: NDArray[np.bool_], observations: NDArray[np.float32]) -> None:
        """Begin new episodes, and put their first observations in the place of the last ones."""
        copies = np.flatnonzero(done)
        self.env.reset_copies(copies.tolist())
        width = observations.shape[-1]
        fresh = self.env.observation.reshape(-1, width)[copies]
        if self.norm is not None:
            fresh = self.norm.observe(torch.from_numpy(fresh)).numpy()
        observations.reshape(-1, width)[copies] = fresh
        if self.scaling is not None:
            self.scaling.end_episodes(torch.from_numpy(done))


def _usual(transforms: list[Transform]) -> bool:
    """Whether the transforms read and write the entries that they do in ``make_env``."""
    tracker, counter, reward_sum, *rest = transforms
    usual = tracker.init_key == "is_init" and counter.step_count_key == "step_count"
    usual &= counter.truncated_key == "truncated" and bool(counter.update_done)
    usual &= (reward_sum.in_keys, reward_sum.out_keys) == (["reward"], ["episode_reward"])
    for transform in rest:
        if isinstance(transform, RunningObservationNorm):
            usual &= transform.in_keys == transform.out_keys == ["observation"]
        if isinstance(transform, ReturnStdScaling):
            usual &= transform.reward_key == "reward"
            usual &= transform.raw_key in ("raw_reward", None)
    return usual


def _by_copy(array: NDArray[Any], shape: tuple[int, ...]) -> Tensor:
    """From ``[T, *K, ...]`` to ``[*K, T, ...]``."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.transpose(0, 1).contiguous() if shape else tensor


def _tensordicts(
    start: TensorDictBase, observations: Tensor, after: dict[str, Tensor], flags: dict[str, Tensor]
) -> tuple[TensorDict, TensorDict]:
    """The batch of a rollout and what to go on from, which follow from what came after each step.

    Args:
        start (TensorDictBase): before the first step.
        observations (Tensor): one more than steps, ``[*K, T + 1, O]``.
        after (dict): entries after each step, ``[*K, T, ...]``.
        flags (dict): ends of episodes, ``[*K, T, 1]``.
    """
    time, done = start.ndim, flags["done"]
    zeros = torch.zeros_like(done)
    before = {name: torch.zeros_like(flag) for name, flag in flags.items()}
    last = {name: torch.zeros_like(flag.select(time, -1)) for name, flag in flags.items()}
    series = {"is_init": done} | {
        # New episodes start from zero.
        name: entry.masked_fill(done, 0)
        for name, entry in after.items()
        if name not in ("observation", "reward")
    }
    for name, following in series.items():
        first = start.get(name).unsqueeze(time)
        before[name] = torch.cat(
            [first, following.narrow(time, 0, following.shape[time] - 1)], time
        )
        last[name] = following.select(time, -1).clone()
    steps = done.shape[time]
    before["observation"] = observations.narrow(time, 0, steps).contiguous()
    last["observation"] = observations.select(time, steps).clone()
    size, names = [*start.batch_size, steps], [*start.names, "time"]
    following = TensorDict(after | flags | {"is_init": zeros}, size, device="cpu", names=names)
    batch = TensorDict(before | {"next": following}, size, device="cpu", names=names)
    return batch, TensorDict(last, start.batch_size, device="cpu")
