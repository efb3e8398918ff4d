"""MPO, V-MPO, Retrace and a matching PPO as plug-ins for TorchRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minerva_torchrl.objectives import MPOLoss, Retrace, VMPOLoss, make_ppo_loss
from minerva_torchrl.trainers import (
    MPOOptimizationStepper,
    MPOTrainer,
    VMPOOptimizationStepper,
    VMPOTrainer,
)

if TYPE_CHECKING:
    from minerva_torchrl.envs import make_env

__version__ = "0.1.0"

__all__ = [
    "MPOLoss",
    "MPOOptimizationStepper",
    "MPOTrainer",
    "Retrace",
    "VMPOLoss",
    "VMPOOptimizationStepper",
    "VMPOTrainer",
    "__version__",
    "make_env",
    "make_ppo_loss",
]


def __getattr__(name: str) -> Any:
    """Import simulators only when an environment is asked for: the losses need none."""
    if name == "make_env":
        from minerva_torchrl.envs import make_env

        return make_env
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
