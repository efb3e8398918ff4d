"""Environments and the transforms they need."""

from minerva_torchrl.envs.transforms import ReturnStdScaling, RunningObservationNorm

__all__ = ["ReturnStdScaling", "RunningObservationNorm"]
