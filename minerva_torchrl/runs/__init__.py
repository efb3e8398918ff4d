"""Training runs: settings, evaluation, records and checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minerva_torchrl.algorithms import RunConfig
    from minerva_torchrl.algorithms.mpo import MPOConfig
    from minerva_torchrl.algorithms.ppo import PPOConfig
    from minerva_torchrl.algorithms.vmpo import VMPOConfig
    from minerva_torchrl.runs.callbacks import Callback
    from minerva_torchrl.runs.checkpoints import Checkpoint, CheckpointStore, open_checkpoint
    from minerva_torchrl.runs.cli import train
    from minerva_torchrl.runs.distributed import WorkersLost
    from minerva_torchrl.runs.evaluation import Evaluation, evaluate
    from minerva_torchrl.runs.load import TrainedPolicy, load_policy
    from minerva_torchrl.runs.manifest import CheckpointError
    from minerva_torchrl.runs.run import Run, resume_run
    from minerva_torchrl.runs.settings import (
        check_overrides,
        load_config,
        parse_config,
        register_configs,
    )
    from minerva_torchrl.runs.start import evaluate_main, train_main
    from minerva_torchrl.runs.strict import ConfigError

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
    "WorkersLost",
    "check_overrides",
    "evaluate",
    "evaluate_main",
    "load_config",
    "load_policy",
    "open_checkpoint",
    "parse_config",
    "register_configs",
    "resume_run",
    "train",
    "train_main",
]

_PLACES = {
    "algorithms": ("RunConfig",),
    "algorithms.mpo": ("MPOConfig",),
    "algorithms.ppo": ("PPOConfig",),
    "algorithms.vmpo": ("VMPOConfig",),
    "runs.callbacks": ("Callback",),
    "runs.checkpoints": ("Checkpoint", "CheckpointStore", "open_checkpoint"),
    "runs.cli": ("train",),
    "runs.distributed": ("WorkersLost",),
    "runs.evaluation": ("Evaluation", "evaluate"),
    "runs.load": ("TrainedPolicy", "load_policy"),
    "runs.manifest": ("CheckpointError",),
    "runs.run": ("Run", "resume_run"),
    "runs.settings": ("check_overrides", "load_config", "parse_config", "register_configs"),
    "runs.start": ("evaluate_main", "train_main"),
    "runs.strict": ("ConfigError",),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: settings and records need no simulators, names no PyTorch."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"minerva_torchrl.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
