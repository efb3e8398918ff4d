"""What the losses ask of a policy, by the family of its distribution.

A family proposes candidates for the E-step, scores a new policy on the weighted candidates, and
measures how far it has moved, one divergence for each constraint. The losses know nothing else of
a policy: a new distribution is a new class here, and a line in :func:`policy_family`.
"""

from minerva_torchrl.objectives.policies.categorical import Categorical
from minerva_torchrl.objectives.policies.composite import CompositePolicy
from minerva_torchrl.objectives.policies.family import (
    Candidates,
    PolicyFamily,
    leaf_distribution,
)
from minerva_torchrl.objectives.policies.gaussian import (
    DiagonalGaussian,
    FullGaussian,
    TanhGaussian,
)
from minerva_torchrl.objectives.policies.of_actor import policy_family, resolve_penalization

__all__ = [
    "Candidates",
    "Categorical",
    "CompositePolicy",
    "DiagonalGaussian",
    "FullGaussian",
    "PolicyFamily",
    "TanhGaussian",
    "leaf_distribution",
    "policy_family",
    "resolve_penalization",
]
