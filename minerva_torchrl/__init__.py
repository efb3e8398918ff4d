"""MPO, V-MPO, Retrace and a matching PPO as plug-ins for TorchRL."""

from minerva_torchrl.objectives import MPOLoss, Retrace
from minerva_torchrl.trainers import MPOOptimizationStepper

__version__ = "0.1.0"

__all__ = ["MPOLoss", "MPOOptimizationStepper", "Retrace", "__version__"]
