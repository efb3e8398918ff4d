"""The whole state of a run as plain data, and back: what a checkpoint is made of.

Four parts: ``model`` (networks, targets, duals, statistics of the observations: what acting needs),
``training`` (optimisers, schedules, counters, callbacks, random generators), ``environment``
(simulators, and where the collector is in its episodes) and ``replay`` (the replay buffer).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.objectives.common import LossModule

from minerva_torchrl.envs import ReturnStdScaling
from minerva_torchrl.runs.assemble import Assembly
from minerva_torchrl.runs.callbacks import Callback
from minerva_torchrl.runs.checkpoints import Checkpoint, CheckpointError
from minerva_torchrl.runs.fitting import (
    KNOWN_TRANSFORMS,
    check_callbacks,
    check_environments,
    check_networks,
    check_structure,
)
from minerva_torchrl.runs.metrics import MetricsBuffer

__all__ = [
    "capture",
    "capture_replay",
    "cut_episodes",
    "not_finite",
    "restore",
    "restore_model",
    "restore_replay",
    "state_is_exact",
]


def capture(
    assembly: Assembly,
    callbacks: Sequence[Callback] = (),
    *,
    metrics: MetricsBuffer | None = None,
    replay_buffer: bool = True,
    episodes: bool = True,
) -> dict[str, Any]:
    """The state between two batches, by part.

    Args:
        assembly (Assembly): what the run trains with.
        callbacks (sequence of Callback): those of the run. Defaults to none.

    Keyword Args:
        metrics (MetricsBuffer, optional): what the run has not written down yet.
        replay_buffer (bool): include the replay buffer, if there is one. Defaults to ``True``.
        episodes (bool): include the simulators. Without them, for example because they failed, new
            episodes begin when the state is restored. Defaults to ``True``.
    """
    parts = {
        "model": {
            "loss": _plain(assembly.loss.state_dict()),
            "transforms": _plain(assembly.env.state_dict()),
        },
        "training": _capture_training(assembly, callbacks, metrics or MetricsBuffer()),
        "environment": _capture_environment(assembly, episodes),
    }
    if replay_buffer and assembly.replay_buffer is not None:
        buffer: Any = assembly.replay_buffer
        elsewhere = hasattr(buffer, "capture")  # in another process
        parts["replay"] = buffer.capture() if elsewhere else capture_replay(buffer)
    return parts


def not_finite(parts: Mapping[str, Any]) -> str | None:
    """Which parameter, state of an optimiser or statistic is not finite; ``None`` if all are.

    Args:
        parts (mapping): from :func:`capture`.
    """
    checked = {
        "model": parts["model"],
        "training": parts["training"]["hooks"],
        "environment": parts["environment"]["discounted_returns"],
        "noise": parts["environment"].get("noise"),
    }
    return _find_not_finite(checked, "")


def _find_not_finite(value: Any, path: str) -> str | None:
    if isinstance(value, Tensor):
        bad = value.is_floating_point() and not value.isfinite().all()
        return path if bad else None
    if isinstance(value, Mapping):
        entries: Any = value.items()
    else:
        entries = enumerate(value) if isinstance(value, (list, tuple)) else ()
    paths = (_find_not_finite(item, f"{path}/{name}".lstrip("/")) for name, item in entries)
    return next(filter(None, paths), None)


def restore(
    assembly: Assembly,
    checkpoint: Checkpoint,
    callbacks: Sequence[Callback] = (),
    metrics: MetricsBuffer | None = None,
) -> None:
    """Put a run into the state of a checkpoint, from which it goes on as it would have.

    Everything is read and compared with the run before anything is changed.

    Args:
        assembly (Assembly): made with the same settings, and not used yet.
        checkpoint (Checkpoint): has the parts of :func:`capture`.
        callbacks (sequence of Callback): of the same classes as in the run that was saved.
            Defaults to none.
        metrics (MetricsBuffer, optional): goes on with what was not written down yet.
    """
    parts = {name: checkpoint.load(name) for name in checkpoint.parts}
    missing = {"model", "training", "environment"} - parts.keys()
    missing |= {name for name, part in parts.items() if not part}
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} is not a checkpoint to resume from: it has no "
            f"{', '.join(sorted(missing))}."
        )
    with _explained(checkpoint):
        check_networks(assembly.loss, parts["model"]["loss"], checkpoint)
        check_environments(assembly, parts["environment"], checkpoint)
        check_callbacks(callbacks, parts["training"], checkpoint)
        template = capture(assembly, episodes=parts["environment"]["simulators"] is not None)
        check_structure(assembly, parts, template, checkpoint)
        bad = not_finite(parts)
        if bad is not None:
            raise CheckpointError(f"{checkpoint.path} can't be resumed from: {bad} is not finite.")
        _restore_model(assembly.loss, assembly.env, parts["model"])
        if "replay" in parts and assembly.replay_buffer is not None:
            buffer: Any = assembly.replay_buffer
            if hasattr(buffer, "restore"):
                buffer.restore(parts["replay"])
            else:
                restore_replay(buffer, parts["replay"])
        _restore_environment(assembly, parts["environment"])
        # Last, because anything above may have drawn random numbers.
        _restore_training(assembly, callbacks, parts["training"])
        if metrics is not None and "metrics" in parts["training"]:
            device = next(assembly.loss.parameters()).device
            metrics.load_state_dict(parts["training"]["metrics"], device)


def restore_model(loss: LossModule, env: TransformedEnv, checkpoint: Checkpoint) -> None:
    """Load the networks and the statistics of the observations only, for acting.

    Args:
        loss (LossModule): has the networks.
        env (TransformedEnv): made as for training.
        checkpoint (Checkpoint): has a part ``model``.
    """
    model = checkpoint.load("model")
    with _explained(checkpoint):
        check_networks(loss, model["loss"], checkpoint)
        _restore_model(loss, env, model)


def state_is_exact(assembly: Assembly) -> bool:
    """Whether the environments can be restored in the middle of an episode."""
    known = all(type(transform) in KNOWN_TRANSFORMS for transform in assembly.env.transform)
    return known and bool(assembly.env.base_env.exact_state)


def cut_episodes(assembly: Assembly) -> None:
    """Begin new episodes everywhere, as new trajectories.

    For simulators that can't be restored in the middle of an episode: done right after saving and
    right after loading, it makes both go on alike.
    """
    collector = assembly.collector
    memory = getattr(assembly.trainer, "memory", None)
    if memory is not None:  # nothing stored may reach from the old episodes into the new ones
        memory.leave_gap()
    collector._carrier = collector.env.reset()
    ids = collector._traj_pool.get_traj_and_increment(collector.n_env, device="cpu")
    ids = ids.view(collector.env.batch_size)
    collector._carrier.set(("collector", "traj_ids"), ids)


# Parts -------------------------------------------------------------------------------------------


@contextmanager
def _explained(checkpoint: Checkpoint) -> Iterator[None]:
    """Say in one line that a checkpoint has other content than it should have."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of any kind, because the content can be anything
        reason = " ".join(str(error).split())[:300]
        kind = "" if type(error) is ValueError else f"{type(error).__name__}, "
        raise CheckpointError(f"{checkpoint.path} does not fit the run: {kind}{reason}") from error


def _restore_model(loss: LossModule, env: TransformedEnv, state: Mapping[str, Any]) -> None:
    loss.load_state_dict(state["loss"])
    env.load_state_dict(state["transforms"])


def _capture_training(
    assembly: Assembly, callbacks: Sequence[Callback], metrics: MetricsBuffer
) -> dict[str, Any]:
    trainer = assembly.trainer
    return {
        "frames": trainer.collected_frames,
        "updates": trainer._optim_count,
        "hooks": {name: _plain(hook.state_dict()) for name, hook in trainer._modules.items()},
        "callbacks": [
            {"class": type(callback).__qualname__, "state": _plain(callback.state_dict())}
            for callback in callbacks
        ],
        "metrics": metrics.state_dict(),
        "random": _capture_random(),
    }


def _restore_training(
    assembly: Assembly, callbacks: Sequence[Callback], state: Mapping[str, Any]
) -> None:
    trainer = assembly.trainer
    trainer.collected_frames = state["frames"]
    trainer._optim_count = state["updates"]
    for name, hook in trainer._modules.items():
        hook.load_state_dict(state["hooks"][name])
        if isinstance(hook, LambdaLR):  # its end may have moved
            groups = hook.optimizer.param_groups
            for group, base, factor in zip(groups, hook.base_lrs, hook.lr_lambdas, strict=True):
                group["lr"] = base * factor(hook.last_epoch)
    for callback, entry in zip(callbacks, state.get("callbacks", []), strict=True):
        callback.load_state_dict(entry["state"])
    _restore_random(state["random"])


def _capture_environment(assembly: Assembly, episodes: bool) -> dict[str, Any]:
    collector = assembly.collector
    state = {
        "simulators": None,
        "discounted_returns": [],
        "carrier": {"batch_size": list(assembly.env.batch_size)},
        "frames": collector._frames,
        "iterations": collector._iter,
        "trajectories": _plain(collector._traj_pool.state_dict()),
        "noise": _plain(collector.noise),
    }
    if episodes:
        returns = [t._discounted_return for t in assembly.env.transform if _follows_returns(t)]
        state["simulators"] = _plain(assembly.env.base_env.state_dict())
        state["discounted_returns"] = [None if r is None else r.clone() for r in returns]
        state["carrier"] = _plain_tensordict(collector._carrier)
    return state


def _restore_environment(assembly: Assembly, state: Mapping[str, Any]) -> None:
    collector = assembly.collector
    collector._frames, collector._iter = state["frames"], state["iterations"]
    collector._traj_pool.load_state_dict(state["trajectories"])
    collector.noise = state.get("noise")
    if state["simulators"] is None:
        cut_episodes(assembly)
        return
    assembly.env.base_env.load_state_dict(state["simulators"])
    transforms = [t for t in assembly.env.transform if _follows_returns(t)]
    for transform, returns in zip(transforms, state["discounted_returns"], strict=True):
        transform._discounted_return = returns
    collector._carrier = _tensordict(state["carrier"])


def _follows_returns(transform: object) -> bool:
    return isinstance(transform, ReturnStdScaling)


def capture_replay(buffer: TensorDictReplayBuffer) -> dict[str, Any]:
    """What checkpoints keep of a replay buffer."""
    count = len(buffer)
    data = None if count == 0 else _plain_tensordict(buffer.storage.get(slice(0, count)))
    return {"data": data, "writer": _plain(buffer.writer.state_dict())}


def restore_replay(buffer: TensorDictReplayBuffer, state: Mapping[str, Any]) -> None:
    """Fill a replay buffer with what :func:`capture_replay` returned."""
    buffer.empty()
    if state["data"] is not None:
        data = _tensordict(state["data"])
        buffer.storage.set(slice(0, len(data)), data)
    buffer.writer.load_state_dict(state["writer"])
    # Where the newest step is: trajectories end there once the buffer has gone round.
    cursor = int(buffer.writer._cursor) - 1
    buffer.storage._set_last_cursor(cursor % buffer.storage.max_size if len(buffer) else None)


def _capture_random() -> dict[str, Any]:
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = legacy
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def _restore_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate(state["python"])


# Plain data --------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Copies of tensors, in dictionaries and lists that can be saved and loaded safely."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, TensorDictBase):
        return _plain_tensordict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def _plain_tensordict(data: TensorDictBase) -> dict[str, Any]:
    return {
        "entries": _plain(data.to_dict()),
        "batch_size": list(data.batch_size),
        "names": list(data.names),
    }


def _tensordict(state: Mapping[str, Any]) -> TensorDict:
    return TensorDict(
        state["entries"], batch_size=state["batch_size"], names=state["names"], device="cpu"
    )
