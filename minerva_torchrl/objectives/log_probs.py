"""Where the data has the log-probability of an action, and of actions with several parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor

from minerva_torchrl.objectives.specs import action_place

__all__ = ["joint_log_prob", "joint_log_prob_key", "log_prob_keys"]


def joint_log_prob_key(actor_network: ProbabilisticTensorDictSequential) -> NestedKey:
    """The name of the log-probability of a whole action, be it in the data or not."""
    written: list[NestedKey] = actor_network.log_prob_keys
    if len(written) == 1:
        return written[0]
    place = action_place(actor_network)
    path = place if isinstance(place, tuple) else (place,)
    return unravel_key((*path[:-1], f"{path[-1]}_log_prob"))


def log_prob_keys(
    actor_network: ProbabilisticTensorDictSequential, key: NestedKey
) -> list[NestedKey]:
    """Entries whose sum is the log-probability of a whole action.

    Args:
        actor_network (ProbabilisticTensorDictSequential): the policy.
        key (NestedKey): name of the log-probability in a loss. If it is the one of
            :func:`joint_log_prob_key`, the entries are those that the policy writes for its parts.
    """
    return list(actor_network.log_prob_keys) if key == joint_log_prob_key(actor_network) else [key]


def joint_log_prob(tensordict: TensorDictBase, keys: Sequence[NestedKey]) -> Tensor:
    """The sum of some entries, that of a single one as it is.

    Args:
        tensordict (TensorDictBase): the data, ``[*B]``.
        keys (sequence of NestedKey): from :func:`log_prob_keys`.
    """
    parts = [tensordict.get(key) for key in keys]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
