"""Policies to pass on: weights, settings and a card, without what only training needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torchrl.envs import TransformedEnv
from torchrl.objectives.common import LossModule

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.envs import RunningObservationNorm
from minerva_torchrl.runs.atomic import read_file, replace_file
from minerva_torchrl.runs.folder import plain_settings
from minerva_torchrl.runs.manifest import CheckpointError, is_count, package_versions
from minerva_torchrl.runs.structure import check_like

__all__ = ["is_published", "publish", "published_frames", "restore_published"]

_WEIGHTS, _CARD = "policy.safetensors", "card.json"
_ACTOR, _STATISTICS = "actor_network_params.", "observation_norm."
_LARGEST_CARD, _LARGEST_WEIGHTS = 1 << 20, 1 << 30  # bytes


def publish(
    folder: Path,
    config: RunConfig,
    loss: LossModule,
    env: TransformedEnv,
    card: Mapping[str, Any],
) -> None:
    """Write a policy to a folder of its own.

    Args:
        folder (Path): a new or an empty one.
        config (RunConfig): settings that the policy was trained with.
        loss (LossModule): has the policy.
        env (TransformedEnv): has the statistics of its observations.
        card (mapping): what is to be known about it, ``frames`` among it, as JSON can hold it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    # Where the run was, and where its updates were computed, says nothing about the policy.
    settings = {**plain_settings(replace(config, device="cpu"), folder), "run_dir": None}
    content = {
        "config.yaml": OmegaConf.to_yaml(OmegaConf.create(settings)).encode(),
        _WEIGHTS: save(_tensors(loss, env)),
        _CARD: (json.dumps({**card, "versions": package_versions()}, indent=2) + "\n").encode(),
    }
    for name, data in content.items():
        with replace_file(folder / name) as file:
            file.write(data)


def is_published(path: Path) -> bool:
    """Whether a folder is that of a published policy."""
    return (path / _WEIGHTS).is_file()


def published_frames(path: Path) -> int:
    """How long a published policy was trained, as its card has it."""
    try:
        frames = json.loads(read_file(path / _CARD, limit=_LARGEST_CARD))["frames"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        frames = None
    if not is_count(frames):
        raise CheckpointError(f"{path / _CARD} has no number of frames.")
    return int(frames)


def restore_published(loss: LossModule, env: TransformedEnv, path: Path) -> None:
    """Put a published policy in the place of an untrained one.

    Args:
        loss (LossModule): has the policy.
        env (TransformedEnv): made as for training, gets the statistics of the observations.
        path (Path): folder of the published policy.
    """
    try:
        saved = load(read_file(path / _WEIGHTS, limit=_LARGEST_WEIGHTS))
        check_like(saved, _tensors(loss, env), _WEIGHTS)
    except OSError as error:
        raise CheckpointError(f"{path / _WEIGHTS} can't be read: {error.strerror}.") from None
    except (SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path} is no policy of its settings: {reason}.") from None
    actor = {name: x for name, x in saved.items() if name.startswith(_ACTOR)}
    loss.load_state_dict({**loss.state_dict(), **actor})
    norm = _norm(env)
    if norm is not None:
        statistics = {name: saved[f"{_STATISTICS}{name}"] for name in norm.get_extra_state()}
        norm.set_extra_state(statistics)


def _tensors(loss: LossModule, env: TransformedEnv) -> dict[str, Tensor]:
    """All that acting needs, by name."""
    state = loss.state_dict()
    tensors = {name: state[name] for name in state if name.startswith(_ACTOR)}
    tensors = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    norm = _norm(env)
    if norm is not None:
        tensors |= {f"{_STATISTICS}{name}": x for name, x in norm.get_extra_state().items()}
    return {name: torch.clone(x).contiguous() for name, x in tensors.items()}


def _norm(env: TransformedEnv) -> RunningObservationNorm | None:
    return next((t for t in env.transform if isinstance(t, RunningObservationNorm)), None)
