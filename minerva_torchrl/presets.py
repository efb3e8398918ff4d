"""Named settings: the package's own defaults and those of other implementations.

A preset says how the loss, the optimisers and their order differ from the defaults, and how a
training run does. It has what the implementation that it is named after fixes for all its tasks.
Each is written in the file of its algorithm, in :mod:`minerva_torchrl.algorithms`.
"""

from __future__ import annotations

from minerva_torchrl.algorithms import ALGORITHMS, Preset
from minerva_torchrl.objectives.checks import check_choice

__all__ = ["PRESETS", "Preset", "mpo_preset", "ppo_preset", "vmpo_preset"]

PRESETS = {name: algorithm.presets for name, algorithm in ALGORITHMS.items()}
"""All presets, by algorithm and name."""


def mpo_preset(name: str) -> Preset:
    """The preset of MPO with a name.

    Args:
        name (str): ``"default"``, ``"minerva-seed"``, ``"acme"``, ``"acme-dmpo"``, ``"acme-mog"``,
            ``"acme-categorical"`` or ``"tonic"``.

    Examples:
        >>> mpo_preset("minerva-seed").adam
        {'eps': 1e-05}
    """
    return _preset("mpo", name)


def vmpo_preset(name: str) -> Preset:
    """The preset of V-MPO with a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> vmpo_preset("minerva-seed").loss["kl_samples"]
        'selected'
    """
    return _preset("vmpo", name)


def ppo_preset(name: str) -> Preset:
    """The preset of PPO with a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> ppo_preset("minerva-seed").loss["truncation_is_terminal"]
        True
    """
    return _preset("ppo", name)


def _preset(algo: str, name: str) -> Preset:
    check_choice("name", name, PRESETS[algo])
    return PRESETS[algo][name]
