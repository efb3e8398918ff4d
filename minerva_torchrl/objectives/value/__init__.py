"""Value estimators for off-policy sequences."""

from minerva_torchrl.objectives.value.retrace import Retrace

__all__ = ["Retrace"]
