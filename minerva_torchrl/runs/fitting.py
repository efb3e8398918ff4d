"""Whether a checkpoint fits the run that is to go on with it, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torchrl.envs import InitTracker, RewardSum, StepCounter
from torchrl.objectives.common import LossModule

from minerva_torchrl.envs import ReturnStdScaling, RunningObservationNorm, StaggeredEpisodes
from minerva_torchrl.runs.assemble import Assembly
from minerva_torchrl.runs.callbacks import Callback
from minerva_torchrl.runs.checkpoints import Checkpoint, CheckpointError
from minerva_torchrl.runs.structure import check_like, check_optimizer, check_rows

__all__ = [
    "KNOWN_TRANSFORMS",
    "check_callbacks",
    "check_environments",
    "check_networks",
    "check_structure",
]

# Those of others may have a state that is not known here.
KNOWN_TRANSFORMS = (
    InitTracker,
    StepCounter,
    RewardSum,
    StaggeredEpisodes,
    RunningObservationNorm,
    ReturnStdScaling,
)
# What a replay buffer has of each step at least, besides the action.
_STORED = (
    "observation",
    "next.observation",
    "next.reward",
    "next.done",
    "next.terminated",
    "next.truncated",
    "collector.traj_ids",
)


def check_networks(loss: LossModule, state: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Compare the networks. Of these, ``load_state_dict`` would not notice if one is missing."""
    shapes, saved = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items() if "_params." in name}
        for tensors in (loss.state_dict(), state)
    )
    if shapes != saved:
        names = sorted(name for name in shapes | saved if shapes.get(name) != saved.get(name))
        raise CheckpointError(
            f"{checkpoint.path} is from other networks: {len(names)} tensors differ, for example "
            f"{names[0]} with shape {saved.get(names[0])} instead of {shapes.get(names[0])}."
        )


def check_environments(
    assembly: Assembly, state: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    """Compare how many copies of the task there are."""
    saved, wanted = state["carrier"]["batch_size"], list(assembly.env.batch_size)
    if saved != wanted:
        raise CheckpointError(
            f"{checkpoint.path} is from other environments: their shape is {saved} instead of "
            f"{wanted}."
        )


def check_callbacks(
    callbacks: Sequence[Callback], state: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    """Compare the classes of the callbacks, in their order."""
    saved = [entry["class"] for entry in state.get("callbacks", [])]
    given = [type(callback).__qualname__ for callback in callbacks]
    if saved != given:
        raise CheckpointError(
            f"{checkpoint.path} is from a run with other callbacks: {', '.join(saved) or 'none'} "
            f"instead of {', '.join(given) or 'none'}."
        )


def check_structure(
    assembly: Assembly,
    parts: Mapping[str, Any],
    template: Mapping[str, Any],
    checkpoint: Checkpoint,
) -> None:
    """Compare names, types and shapes with those of a run that has just been made."""
    if parts["training"].get("frames") != checkpoint.frames:
        raise ValueError(f"training.frames is not that of the checkpoint, {checkpoint.frames}")
    copies = tuple(assembly.env.batch_size)
    waiting = template["environment"]["carrier"].get("entries", {})

    def check_carrier(entries: Any) -> None:
        path = "environment.carrier.entries"
        check_rows(entries, path, rows=copies[0] if copies else 1, names=())
        check_like({name: entries[name] for name in waiting}, waiting, path)

    def check_return(value: Any) -> None:
        if value is not None:
            path = "environment.discounted_returns"
            check_like(value, torch.zeros(*copies, 1, dtype=torch.float64), path)

    def check_noise(value: Any) -> None:
        if value is not None:
            like = torch.zeros(len(value), *assembly.env.action_spec.shape)
            check_like(value, like, "environment.noise")

    free: dict[str, Callable[[Any], None]] = {
        "environment.simulators": _anything,
        "environment.carrier.entries": check_carrier,
        "environment.noise": check_noise,
        "training.callbacks": _anything,
        "training.random": _anything,
        "training.metrics": _check_metrics,
        "replay.data": partial(_check_replay, assembly),
        "training.hooks.replay_memory": partial(_check_memory, assembly),
    }
    for index in range(len(template["environment"]["discounted_returns"])):
        free[f"environment.discounted_returns.{index}"] = check_return
    if not all(type(transform) in KNOWN_TRANSFORMS for transform in assembly.env.transform):
        free["model.transforms"] = _anything
    for name, hook in assembly.trainer._modules.items():
        path = f"training.hooks.{name}"
        if type(hook).__module__.partition(".")[0] not in ("minerva_torchrl", "torch", "torchrl"):
            free[path] = _anything
        for title, optimizer in getattr(hook, "_optimizers", {}).items():
            inside = f"{path}.{title}.state"
            free[inside] = partial(check_optimizer, optimizer=optimizer, path=inside)
    # Other versions of PyTorch may save other things.
    same_names = bool(checkpoint.versions) and not checkpoint.other_versions()
    for part in parts.keys() & template.keys():
        check_like(parts[part], template[part], part, free=free, same_names=same_names)


def _anything(value: Any) -> None:
    """What it is for will refuse what it can't use."""


def _check_metrics(state: Any) -> None:
    losses = state["losses"]
    if losses is not None:
        rows = len(next(iter(losses.values())))
        check_rows(losses, "training.metrics.losses", rows=rows, names=())
    for name in ("returns", "lengths"):
        check_like(state[name], [-math.inf] * len(state[name]), f"training.metrics.{name}")
    if state["episode_return"] is not None:
        check_like(state["episode_return"], -math.inf, "training.metrics.episode_return")


def _check_replay(assembly: Assembly, data: Any) -> None:
    buffer: Any = assembly.replay_buffer
    if data is None or buffer is None:
        return
    if data.keys() != {"entries", "batch_size", "names"}:
        raise ValueError(f"replay.data has {', '.join(map(str, data))[:80]}")
    (rows,) = data["batch_size"]
    if type(rows) is not int or not 0 < rows <= _max_size(buffer):
        raise ValueError(f"replay.data.batch_size is {str(data['batch_size'])[:40]}")
    names = (*_stored(assembly), "index")
    if getattr(getattr(assembly.trainer, "memory", None), "_multi_step", None) is not None:
        names += ("steps_to_next_obs",)
    check_rows(data["entries"], "replay.data.entries", rows=rows, names=names)
    size = assembly.env.observation_spec["observation"].shape[-1]
    for entries in (data["entries"], data["entries"]["next"]):
        observation = entries["observation"]
        if observation.shape != (rows, size) or observation.dtype != torch.float32:
            raise ValueError(f"replay.data has observations of shape {list(observation.shape)}")


def _stored(assembly: Assembly) -> tuple[str, ...]:
    """Names of what is stored of each step at least, with dots between those of dictionaries."""
    keys = (key if isinstance(key, tuple) else (key,) for key in assembly.env.action_keys)
    return (*_STORED, *map(".".join, keys))


def _max_size(buffer: Any) -> int:
    return int(buffer.max_size if hasattr(buffer, "max_size") else buffer.storage.max_size)


def _check_memory(assembly: Assembly, state: Any) -> None:
    check_like(state["gaps"], 0, "training.hooks.replay_memory.gaps")
    if state.get("waiting") is not None:
        rows = state["batch_size"][0]
        check_rows(
            state["waiting"], "training.hooks.replay_memory", rows=rows, names=_stored(assembly)
        )
