"""The order of updates, and everything around a run."""

from minerva_torchrl.trainers.ppo import KLEarlyStop, linear_lr_annealing
from minerva_torchrl.trainers.steppers import MPOOptimizationStepper, VMPOOptimizationStepper

__all__ = [
    "KLEarlyStop",
    "MPOOptimizationStepper",
    "VMPOOptimizationStepper",
    "linear_lr_annealing",
]
