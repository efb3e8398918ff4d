"""Training runs: settings, evaluation, records and checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.algorithms.mpo import MPOConfig
from minerva_torchrl.algorithms.ppo import PPOConfig
from minerva_torchrl.algorithms.vmpo import VMPOConfig
from minerva_torchrl.runs.callbacks import Callback
from minerva_torchrl.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    open_checkpoint,
)
from minerva_torchrl.runs.evaluation import Evaluation, evaluate
from minerva_torchrl.runs.settings import (
    check_overrides,
    load_config,
    parse_config,
    register_configs,
)
from minerva_torchrl.runs.strict import ConfigError

if TYPE_CHECKING:
    from minerva_torchrl.runs.cli import evaluate_main, train, train_main
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
    "evaluate_main",
    "load_config",
    "load_policy",
    "open_checkpoint",
    "parse_config",
    "register_configs",
    "train",
    "train_main",
]

_WITH_SIMULATORS = {
    "Run": "run",
    "TrainedPolicy": "load",
    "evaluate_main": "cli",
    "load_policy": "load",
    "train": "cli",
    "train_main": "cli",
}


def __getattr__(name: str) -> Any:
    """Import simulators only for what runs them: settings and records need none."""
    if name in _WITH_SIMULATORS:
        return getattr(import_module(f"{__name__}.{_WITH_SIMULATORS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
