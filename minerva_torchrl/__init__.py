"""MPO, V-MPO, Retrace and a matching PPO as plug-ins for TorchRL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minerva_torchrl.envs import make_env
    from minerva_torchrl.objectives import MPOLoss, Retrace, VMPOLoss, make_ppo_loss
    from minerva_torchrl.trainers import (
        MPOOptimizationStepper,
        MPOTrainer,
        VMPOOptimizationStepper,
        VMPOTrainer,
    )

__version__ = "0.2.0"

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

_PLACES = {
    "MPOLoss": "objectives",
    "MPOOptimizationStepper": "trainers",
    "MPOTrainer": "trainers",
    "Retrace": "objectives",
    "VMPOLoss": "objectives",
    "VMPOOptimizationStepper": "trainers",
    "VMPOTrainer": "trainers",
    "make_env": "envs",
    "make_ppo_loss": "objectives",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: PyTorch takes seconds, and the losses need no simulators."""
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
