"""Training runs: settings, evaluation, records and checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minerva_torchrl.runs.callbacks import Callback
from minerva_torchrl.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    open_checkpoint,
)
from minerva_torchrl.runs.config import MPOConfig, PPOConfig, RunConfig, VMPOConfig
from minerva_torchrl.runs.evaluation import Evaluation, evaluate
from minerva_torchrl.runs.settings import (
    check_overrides,
    load_config,
    parse_config,
    register_configs,
)
from minerva_torchrl.runs.strict import ConfigError

if TYPE_CHECKING:
    from minerva_torchrl.runs.cli import train
    from minerva_torchrl.runs.load import TrainedPolicy, load_policy
    from minerva_torchrl.runs.run import Run

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "Evaluation",
    "MPOConfig",
    "PPOConfig",
    "Run",
    "RunConfig",
    "TrainedPolicy",
    "VMPOConfig",
    "check_overrides",
    "evaluate",
    "load_config",
    "load_policy",
    "open_checkpoint",
    "parse_config",
    "register_configs",
    "train",
]

_NEED_SIMULATORS = {"Run": "run", "TrainedPolicy": "load", "load_policy": "load", "train": "cli"}


def __getattr__(name: str) -> Any:
    """Import simulators only when something is asked for that uses them: reports do not."""
    if name in _NEED_SIMULATORS:
        return getattr(importlib.import_module(f"{__name__}.{_NEED_SIMULATORS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
