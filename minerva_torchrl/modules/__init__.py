"""Building blocks of networks."""

from minerva_torchrl.modules.activations import ELU, Tanh
from minerva_torchrl.modules.binned_ppo import BinnedClipPPOLoss
from minerva_torchrl.modules.clip_ppo import DirectClipPPOLoss
from minerva_torchrl.modules.direct import DirectModule
from minerva_torchrl.modules.exploration import PinkNoiseActor
from minerva_torchrl.modules.gaussian import StateIndependentScale
from minerva_torchrl.modules.init import initialize_, orthogonal_init_
from minerva_torchrl.modules.memory import keep_freed_memory
from minerva_torchrl.modules.networks import (
    CholeskyPolicy,
    ControlTorso,
    GaussianPolicy,
    PartedPolicy,
    StateActionCritic,
    TanhInterval,
)
from minerva_torchrl.modules.popart import (
    PopArtClipPPOLoss,
    PopArtHead,
    PopArtVMPOLoss,
    popart_update_,
)

__all__ = [
    "ELU",
    "BinnedClipPPOLoss",
    "CholeskyPolicy",
    "ControlTorso",
    "DirectClipPPOLoss",
    "DirectModule",
    "GaussianPolicy",
    "PartedPolicy",
    "PinkNoiseActor",
    "PopArtClipPPOLoss",
    "PopArtHead",
    "PopArtVMPOLoss",
    "StateActionCritic",
    "StateIndependentScale",
    "Tanh",
    "TanhInterval",
    "initialize_",
    "keep_freed_memory",
    "orthogonal_init_",
    "popart_update_",
]
