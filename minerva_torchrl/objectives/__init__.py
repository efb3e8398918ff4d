"""Losses and value estimators: what a TorchRL pipeline plugs in."""

from minerva_torchrl.objectives.duals import DualVariable
from minerva_torchrl.objectives.mpo import MPOLoss
from minerva_torchrl.objectives.popart import PopArtClipPPOLoss, PopArtHead, popart_update_
from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss
from minerva_torchrl.objectives.value import Retrace
from minerva_torchrl.objectives.vmpo import VMPOLoss

__all__ = [
    "DualVariable",
    "MPOLoss",
    "PopArtClipPPOLoss",
    "PopArtHead",
    "Retrace",
    "VMPOLoss",
    "estimate_advantage",
    "make_ppo_loss",
    "popart_update_",
]
