"""Building blocks of networks."""

from minerva_torchrl.modules.activations import ELU, Tanh
from minerva_torchrl.modules.direct import DirectModule
from minerva_torchrl.modules.gaussian import StateIndependentScale
from minerva_torchrl.modules.init import orthogonal_init_
from minerva_torchrl.modules.networks import ControlTorso, GaussianPolicy, StateActionCritic

__all__ = [
    "ELU",
    "ControlTorso",
    "DirectModule",
    "GaussianPolicy",
    "StateActionCritic",
    "StateIndependentScale",
    "Tanh",
    "orthogonal_init_",
]
