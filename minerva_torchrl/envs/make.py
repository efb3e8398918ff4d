"""Environments by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torchrl.envs import (
    Compose,
    InitTracker,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)

from minerva_torchrl.envs._names import unknown_name
from minerva_torchrl.envs.batched import BatchedEnv, copy_seeds
from minerva_torchrl.envs.gym import GymnasiumEnv, gymnasium_names
from minerva_torchrl.envs.staggering import StaggeredEpisodes
from minerva_torchrl.envs.suite import SuiteEnv, suite_names
from minerva_torchrl.envs.transforms import RunningObservationNorm
from minerva_torchrl.envs.workers import Workers
from minerva_torchrl.objectives.checks import check_count

__all__ = ["list_envs", "make_env"]

_GYM = "gym:"


def list_envs() -> list[str]:
    """All names that :func:`make_env` knows: DM Control, then what Gymnasium has registered.

    Some Gymnasium environments need further packages, or have spaces that :class:`GymnasiumEnv`
    refuses. The list does not tell.

    Returns:
        The names, such as ``"cheetah-run"`` and ``"gym:HalfCheetah-v5"``.

    Examples:
        >>> names = list_envs()
        >>> "cheetah-run" in names, "gym:HalfCheetah-v5" in names
        (True, True)
    """
    return suite_names() + [_GYM + name for name in gymnasium_names()]


def make_env(
    name: str | Callable[..., Any],
    *,
    num_envs: int | None = None,
    num_workers: int = 0,
    seed: int | None = None,
    frame_skip: int = 1,
    max_episode_steps: int | None = None,
    canonical_actions: bool = True,
    wrappers: Sequence[Callable[..., Any]] = (),
    staggered: bool = False,
    observation_norm: bool | RunningObservationNorm = False,
    device: torch.device | str | None = None,
    max_skipped: int = 10,
    **kwargs: Any,
) -> TransformedEnv:
    """An environment that is ready for a collector.

    The data has ``observation`` (flat, float32), ``action``, ``reward``, ``done``, ``terminated``
    and ``truncated``, and besides them ``is_init``, ``step_count`` (steps of the episode so far)
    and ``episode_reward`` (sum of its rewards so far).

    ``env.state_dict()`` has the state of the transforms, which is that of ``observation_norm``.
    ``env.base_env.state_dict()`` has the state of the simulators.

    Args:
        name (str or callable): ``"domain-task"`` for a DM Control task, for example
            ``"ball_in_cup-catch"``, or ``"gym:"`` and the name of a Gymnasium environment, for
            example ``"gym:HalfCheetah-v5"``. :func:`list_envs` lists all. Or what makes a single
            environment of your own: a subclass of :class:`gymnasium.Env`, or a function that
            returns an environment of Gymnasium or TorchRL. It is called once for each copy, and
            copies are seeded when they are reset.

    Keyword Args:
        num_envs (int, optional): number of copies. The batch size is ``[num_envs]``, or ``[]`` if
            it is ``None`` (default).
        num_workers (int): number of processes to spread the copies over. With more than one the
            batch size is ``[num_workers, num_envs // num_workers]``, and ``[num_workers]`` if each
            process has one copy only (``num_envs`` equal to it or ``None``). Processes pay off for
            slow simulators; fast ones are faster with several copies in each worker of a
            :class:`~torchrl.collectors.MultiSyncCollector`. Defaults to ``0``: this process only.
        seed (int, optional): seed of the first copy; the others follow from it. Without it every
            environment is different.
        frame_skip (int): steps that each action is repeated for. Defaults to ``1``.
        max_episode_steps (int, optional): steps, each of them ``frame_skip`` frames, after which an
            episode is truncated if it has not ended before. Defaults to the task's own limit only.
        canonical_actions (bool): continuous actions with bounds are between -1 and 1, whatever the
            bounds of the task, and are scaled to these on their way to the simulator. So an
            initial policy explores any of them alike. Defaults to ``True``.
        wrappers (sequence of callables): Gymnasium wrappers, each called with an environment, and
            after them transforms of TorchRL, each a class or function that is called with nothing.
            What comes out of them is the task: rewards, returns and observations are theirs.
            Defaults to none.
        staggered (bool): spread the copies over the length of an episode at first, see
            :class:`StaggeredEpisodes`. Tasks without a limit are left alone. Defaults to ``False``.
        observation_norm (bool or RunningObservationNorm): normalise observations with running
            statistics, or with a given transform. For evaluation that is the ``frozen_view()`` of
            the one in training. Defaults to ``False``.
        device (torch.device, optional): device of the data.
        max_skipped (int): steps in a row that a copy may lose because an observation or a reward is
            not finite, see :class:`BatchedEnv`. Defaults to ``10``.
        **kwargs: go to the environment itself: arguments of :func:`gymnasium.make`, for example
            ``render_mode="rgb_array"``, of the task of DM Control, or of what makes it.

    Returns:
        The environment, of batch size ``[num_envs]``, or ``[]`` without that.

    Examples:
        >>> env = make_env("cartpole-swingup", num_envs=4, seed=0, max_episode_steps=100)
        >>> rollout = env.rollout(200)
        >>> rollout["next", "step_count"][:, -1].flatten()
        tensor([100, 100, 100, 100])
        >>> make_env("cheeta-run")
        Traceback (most recent call last):
        ...
        ValueError: there is no environment 'cheeta-run'. Did you mean 'cheetah-run'? ...
    """
    check_count("max_episode_steps", max_episode_steps, optional=True)
    if num_workers != 0:
        check_count("num_workers", num_workers)
    if not isinstance(observation_norm, (bool, RunningObservationNorm)):
        raise TypeError(
            "observation_norm must be a bool or a RunningObservationNorm, "
            f"got {type(observation_norm).__name__}."
        )
    wrappers, own_transforms = _split_wrappers(wrappers)
    make_copies = partial(
        _make_base_env,
        name,
        wrappers=wrappers,
        frame_skip=frame_skip,
        canonical_actions=canonical_actions,
        max_skipped=max_skipped,
        **kwargs,
    )
    env: BatchedEnv | Workers
    if num_workers > 1:
        env = _in_processes(make_copies, num_envs, num_workers, seed, device)
    else:
        env = make_copies(num_envs=num_envs, seed=seed, device=device)
    transforms: list[Transform] = [
        *own_transforms,
        InitTracker(),
        StepCounter(max_steps=max_episode_steps),
        RewardSum(in_keys=["reward"], out_keys=["episode_reward"]),
    ]
    if staggered:
        limits = [limit for limit in (max_episode_steps, env.step_limit) if limit is not None]
        if limits:
            transforms.append(StaggeredEpisodes(min(limits)))
    if isinstance(observation_norm, RunningObservationNorm):
        transforms.append(observation_norm)
    elif observation_norm:
        transforms.append(RunningObservationNorm())
    return TransformedEnv(env, Compose(*transforms))


def _split_wrappers(
    wrappers: Sequence[Callable[..., Any]],
) -> tuple[list[Callable[..., Any]], list[Transform]]:
    """Gymnasium wrappers, which need an environment, and transforms, which are made of nothing."""
    for_gymnasium: list[Callable[..., Any]] = []
    transforms: list[Transform] = []
    for wrapper in wrappers:
        name = getattr(wrapper, "__qualname__", wrapper)
        is_transform = isinstance(wrapper, type) and issubclass(wrapper, Transform)
        if is_transform or not signature(wrapper).parameters:
            transform = wrapper()
            if not isinstance(transform, Transform):
                raise ValueError(
                    f"wrappers: {name} must take an environment, or return a transform of TorchRL; "
                    f"it returned {type(transform).__name__}."
                )
            transforms.append(transform)
        elif transforms:
            raise ValueError(
                f"wrappers: {name} is for a Gymnasium environment, and must come before transforms."
            )
        else:
            for_gymnasium.append(wrapper)
    return for_gymnasium, transforms


def _make_base_env(
    name: str | Callable[..., Any], *, wrappers: Sequence[Callable[..., Any]], **kwargs: Any
) -> BatchedEnv:
    if not isinstance(name, str):
        return GymnasiumEnv(name, wrappers=wrappers, **kwargs)
    if name.startswith(_GYM):
        return GymnasiumEnv(name.removeprefix(_GYM), wrappers=wrappers, **kwargs)
    if name not in suite_names():
        raise unknown_name("environment", name, list_envs())
    if wrappers:
        raise ValueError(
            f"wrappers: {name} is a task of DM Control, which takes transforms of TorchRL only, "
            f"and not {getattr(wrappers[0], '__qualname__', wrappers[0])}."
        )
    domain, _, task = name.partition("-")
    return SuiteEnv(domain, task, **kwargs)


def _in_processes(
    make_copies: partial[BatchedEnv],
    num_envs: int | None,
    num_workers: int,
    seed: int | None,
    device: torch.device | str | None,
) -> Workers:
    check_count("num_envs", num_envs, optional=True)
    total = num_workers if num_envs is None else num_envs
    if total % num_workers:
        raise ValueError(
            f"num_envs must be a multiple of num_workers, got {num_envs} and {num_workers}."
        )
    per_worker = total // num_workers
    seeds = copy_seeds(seed, total)
    copies = per_worker if per_worker > 1 else None
    kwargs = [{"num_envs": copies, "seed": first} for first in seeds[::per_worker]]
    return Workers(make_copies, kwargs, device=device)
