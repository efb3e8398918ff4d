"""Training runs: settings, evaluation, records and checkpoints."""

from minerva_torchrl.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    open_checkpoint,
)
from minerva_torchrl.runs.cli import train
from minerva_torchrl.runs.config import MPOConfig, PPOConfig, RunConfig, VMPOConfig
from minerva_torchrl.runs.evaluation import Evaluation, evaluate
from minerva_torchrl.runs.load import TrainedPolicy, load_policy
from minerva_torchrl.runs.run import Run
from minerva_torchrl.runs.settings import (
    check_overrides,
    load_config,
    parse_config,
    register_configs,
)
from minerva_torchrl.runs.strict import ConfigError

__all__ = [
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
