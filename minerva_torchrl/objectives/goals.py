"""Objectives beside the return: values to be traded off against it, and costs to be limited."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tensordict import NestedKey

from minerva_torchrl.objectives.checks import check_positive

__all__ = ["MAIN_OBJECTIVE", "CostLimit", "Objective", "resolve_objectives"]

MAIN_OBJECTIVE = "value"
"""The return, which every loss has. Its temperature and bound go by the shortest names."""


@dataclass(frozen=True)
class Objective:
    """An objective with a temperature and bound of its own (https://arxiv.org/abs/2005.07513).

    The larger its bound against that of the others, the more it counts; how large its rewards are
    does not matter.
    """

    epsilon: float
    """Bound of the KL divergence of its weights."""
    init_temperature: float = 1.0
    """Initial temperature."""
    reward: NestedKey | None = None
    """Entry of the next state that has its reward ``[*B, 1]``. By default all rewards are in one
    vector, that of the return first."""


@dataclass(frozen=True)
class CostLimit:
    r"""A cost whose discounted sum shall stay below a threshold, :math:`E[Q_c] \le d`.

    Its multiplier is learned on :math:`\lambda (d - E[Q_c])`, and the return's objective becomes
    :math:`Q - \lambda Q_c`.
    """

    threshold: float
    """The largest discounted sum of costs: ``c / (1 - gamma)`` for a cost of ``c`` per step."""
    init_multiplier: float = 1.0
    """Initial multiplier."""
    reward: NestedKey | None = None
    """Entry of the next state that has the cost ``[*B, 1]``, as in :class:`Objective`."""


def resolve_objectives(
    objectives: Mapping[str, float | Objective | CostLimit] | None,
) -> dict[str, Objective | CostLimit]:
    """Checked objectives by name; a number is the bound of one.

    Args:
        objectives (mapping, optional): as the user gave them.
    """
    if not isinstance(objectives, Mapping | None):
        raise TypeError(
            "objectives must be a mapping from names to bounds, as in {'energy': 0.05}, got "
            f"{type(objectives).__name__}."
        )
    resolved: dict[str, Objective | CostLimit] = {}
    for name, given in (objectives or {}).items():
        argument = f"objectives[{name!r}]"
        if not str(name).isidentifier() or name in ("value", "penalty"):
            raise ValueError(
                "names of objectives must be identifiers other than 'value' and 'penalty', "
                f"got {name!r}."
            )
        if given is None:
            raise ValueError(f"{argument} needs a bound: a number, an Objective or a CostLimit.")
        goal = given if isinstance(given, (Objective, CostLimit)) else Objective(given)
        if isinstance(goal, Objective):
            check_positive(f"{argument}.epsilon", goal.epsilon)
            check_positive(f"{argument}.init_temperature", goal.init_temperature)
        else:
            check_positive(f"{argument}.init_multiplier", goal.init_multiplier)
            if not math.isfinite(goal.threshold):
                raise ValueError(f"{argument}.threshold must be finite, got {goal.threshold}.")
        resolved[name] = goal
    keys = [goal.reward for goal in resolved.values()]
    if None in keys and any(key is not None for key in keys):
        raise ValueError(
            "either all objectives have a reward entry or none has, and then the reward is a "
            f"vector; got {keys}."
        )
    return resolved
