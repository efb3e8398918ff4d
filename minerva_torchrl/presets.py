"""Named settings: the package's own defaults and those of other implementations of MPO.

A preset says how the loss, the optimisers and their order differ from the defaults. What belongs to
a task (number of samples, learning rates, discount) is not part of it unless the implementation
that it is named after fixes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minerva_torchrl.objectives._checks import check_choice

__all__ = ["MPOPreset", "mpo_preset"]


@dataclass(frozen=True)
class MPOPreset:
    """Keyword arguments by the object that takes them."""

    loss: dict[str, Any] = field(default_factory=dict)
    """Of :class:`~minerva_torchrl.MPOLoss`."""
    stepper: dict[str, Any] = field(default_factory=dict)
    """Of :class:`~minerva_torchrl.MPOOptimizationStepper`."""
    adam: dict[str, Any] = field(default_factory=dict)
    """Of every ``torch.optim.Adam``."""


_MPO_PRESETS = {
    "default": MPOPreset(),
    # The reference agent (Minerva): policy trained at the current states with samples of its own,
    # one bound for mean and standard deviation, no action penalty, only the first step of a
    # sequence, multipliers stepped before the policy, gradients clipped at one everywhere.
    "minerva-seed": MPOPreset(
        loss={
            "policy_states": "current",
            "sequence_steps": "first",
            "action_penalization": False,
            "epsilon_mean": 2.5e-3,
            "epsilon_stddev": 2.5e-3,
            "init_temperature": 10.0,
            "init_alpha_mean": 10.0,
            "init_alpha_stddev": 1000.0,
            "num_action_samples": 64,
        },
        stepper={
            "dual_order": "dual_first",
            "clip_critic": 1.0,
            "clip_actor": 1.0,
            "clip_dual": 1.0,
        },
        adam={"eps": 1e-5},
    ),
}


def mpo_preset(name: str) -> MPOPreset:
    """The preset of a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> mpo_preset("minerva-seed").adam
        {'eps': 1e-05}
    """
    check_choice("name", name, _MPO_PRESETS)
    return _MPO_PRESETS[name]
