"""The order of updates, and everything around a run."""

from minerva_torchrl.trainers.steppers import MPOOptimizationStepper

__all__ = ["MPOOptimizationStepper"]
