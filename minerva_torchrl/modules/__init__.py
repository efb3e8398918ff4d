"""Building blocks of networks."""

from minerva_torchrl.modules.gaussian import StateIndependentScale
from minerva_torchrl.modules.init import orthogonal_init_

__all__ = ["StateIndependentScale", "orthogonal_init_"]
