"""Losses and value estimators: what a TorchRL pipeline plugs in."""

from minerva_torchrl.objectives.duals import DualVariable
from minerva_torchrl.objectives.mpo import MPOLoss
from minerva_torchrl.objectives.value import Retrace

__all__ = ["DualVariable", "MPOLoss", "Retrace"]
