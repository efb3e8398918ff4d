"""MPO, V-MPO, Retrace and a matching PPO as plug-ins for TorchRL."""

from minerva_torchrl.objectives import MPOLoss, Retrace, VMPOLoss, make_ppo_loss
from minerva_torchrl.trainers import MPOOptimizationStepper, VMPOOptimizationStepper

__version__ = "0.1.0"

__all__ = [
    "MPOLoss",
    "MPOOptimizationStepper",
    "Retrace",
    "VMPOLoss",
    "VMPOOptimizationStepper",
    "__version__",
    "make_ppo_loss",
]
