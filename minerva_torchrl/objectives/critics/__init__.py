"""What a loss asks of a critic: how its networks are asked, and what their outputs mean.

A critic knows the mean value, how a target is made from the distributions at the next state, and
its loss. The losses know nothing else of it: another kind of value is a new class here.
"""

from minerva_torchrl.objectives.critics.distributions import (
    CategoricalCritic,
    GaussianMixtureCritic,
    QuantileCritic,
)
from minerva_torchrl.objectives.critics.ensembles import (
    ActionValueCritic,
    AllActionsCritic,
    Evaluate,
    SingleActionCritic,
    check_width,
    make_ensemble,
)
from minerva_torchrl.objectives.critics.side_by_side import side_by_side
from minerva_torchrl.objectives.critics.values import (
    Critic,
    HLGaussCritic,
    ScalarCritic,
    TwoHotCritic,
    expectation,
    resolve_critic,
)

__all__ = [
    "CRITICS",
    "ActionValueCritic",
    "AllActionsCritic",
    "CategoricalCritic",
    "Critic",
    "Evaluate",
    "GaussianMixtureCritic",
    "HLGaussCritic",
    "QuantileCritic",
    "ScalarCritic",
    "SingleActionCritic",
    "TwoHotCritic",
    "check_width",
    "expectation",
    "make_ensemble",
    "resolve_critic",
    "side_by_side",
]

CRITICS: dict[str, type[Critic]] = {
    "scalar": ScalarCritic,
    "categorical": CategoricalCritic,
    "two_hot": TwoHotCritic,
    "hl_gauss": HLGaussCritic,
    "quantile": QuantileCritic,
    "gaussian_mixture": GaussianMixtureCritic,
}
"""Critics by name: what ``network.critic`` of a run takes, and the nodes of Hydra's configs."""
