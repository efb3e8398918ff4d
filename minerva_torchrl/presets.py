"""Named settings: the package's own defaults and those of other implementations.

A preset says how the loss, the optimisers and their order differ from the defaults. What belongs to
a task (number of samples, learning rates, discount) is not part of it unless the implementation
that it is named after fixes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minerva_torchrl.objectives._checks import check_choice

__all__ = ["Preset", "mpo_preset", "ppo_preset", "vmpo_preset"]


@dataclass(frozen=True)
class Preset:
    """Keyword arguments by the object that takes them."""

    loss: dict[str, Any] = field(default_factory=dict)
    """Of the loss (``MPOLoss``, ``VMPOLoss``, ``make_ppo_loss``)."""
    stepper: dict[str, Any] = field(default_factory=dict)
    """Of the optimisation stepper."""
    adam: dict[str, Any] = field(default_factory=dict)
    """Of every ``torch.optim.Adam``."""


_MPO_PRESETS = {
    "default": Preset(),
    # The reference agent (Minerva): policy trained at the current states with samples of its own,
    # one bound for mean and standard deviation, no action penalty, only the first step of a
    # sequence, multipliers stepped before the policy, gradients clipped at one everywhere.
    "minerva-seed": Preset(
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


_VMPO_PRESETS = {
    "default": Preset(),
    # The reference agent (Minerva): temperature learned by one step per rollout, KL divergences
    # over the selected samples only, learning rates as they are for any number of policy steps.
    "minerva-seed": Preset(
        loss={
            "top_k_fraction": 0.7,
            "epsilon_eta": 0.15,
            "epsilon_mean": 0.05,
            "epsilon_stddev": 1e-3,
            "init_temperature": 5.0,
            "init_alpha_mean": 1.0,
            "init_alpha_stddev": 1.0,
            "temperature_update": "gradient",
            "kl_samples": "selected",
        },
        stepper={"num_policy_steps": 64, "clip": 0.5, "lr_scaling": None},
        adam={"eps": 1e-5},
    ),
}


_PPO_PRESETS = {
    "default": Preset(adam={"eps": 1e-5}),
    # The reference agent (Minerva), which among other things ends the return at a time limit.
    "minerva-seed": Preset(
        loss={"gamma": 0.98, "lmbda": 0.92, "truncation_is_terminal": True},
        adam={"eps": 1e-5},
    ),
}


def mpo_preset(name: str) -> Preset:
    """The preset of MPO with a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> mpo_preset("minerva-seed").adam
        {'eps': 1e-05}
    """
    check_choice("name", name, _MPO_PRESETS)
    return _MPO_PRESETS[name]


def vmpo_preset(name: str) -> Preset:
    """The preset of V-MPO with a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> vmpo_preset("minerva-seed").loss["kl_samples"]
        'selected'
    """
    check_choice("name", name, _VMPO_PRESETS)
    return _VMPO_PRESETS[name]


def ppo_preset(name: str) -> Preset:
    """The preset of PPO with a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> ppo_preset("minerva-seed").loss["truncation_is_terminal"]
        True
    """
    check_choice("name", name, _PPO_PRESETS)
    return _PPO_PRESETS[name]
