"""Losses and value estimators: what a TorchRL pipeline plugs in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minerva_torchrl.objectives.duals import Constraint, DualVariable, Temperature
from minerva_torchrl.objectives.goals import CostLimit, Objective
from minerva_torchrl.objectives.mpo import MPOLoss
from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss
from minerva_torchrl.objectives.value import Retrace
from minerva_torchrl.objectives.vmpo import VMPOLoss

if TYPE_CHECKING:
    from minerva_torchrl.modules.popart import PopArtClipPPOLoss, PopArtHead, popart_update_

__all__ = [
    "Constraint",
    "CostLimit",
    "DualVariable",
    "MPOLoss",
    "Objective",
    "PopArtClipPPOLoss",
    "PopArtHead",
    "Retrace",
    "Temperature",
    "VMPOLoss",
    "estimate_advantage",
    "make_ppo_loss",
    "popart_update_",
]


def __getattr__(name: str) -> Any:
    """PopArt is a matter of networks, and imported from there when it is asked for."""
    if name in ("PopArtClipPPOLoss", "PopArtHead", "popart_update_"):
        from minerva_torchrl.modules import popart

        return getattr(popart, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
