"""What the spec of an action says: its size and its bounds."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torchrl.data.tensor_specs import Composite, TensorSpec

__all__ = ["action_bounds", "resolve_action_spec"]


def resolve_action_spec(
    action_spec: TensorSpec | None,
    actor_network: ProbabilisticTensorDictSequential | None,
    action_key: NestedKey,
) -> TensorSpec | None:
    """The spec of the action: the given one, or the one that the actor carries, or ``None``."""
    spec = action_spec if action_spec is not None else getattr(actor_network, "spec", None)
    if isinstance(spec, Composite):
        spec = spec.get(action_key, None)
    return spec


def action_bounds(action_spec: TensorSpec | None) -> tuple[Tensor, Tensor] | None:
    """Lower and upper bounds ``[D]`` of a bounded spec, ``None`` for any other.

    The leading dimensions of the spec of a batch of environments are dropped. Bounds at the limits
    of the floating-point range, which transforms write for "none", count as infinite.
    """
    space: Any = getattr(action_spec, "space", None)
    if action_spec is None or not hasattr(space, "low") or not action_spec.dtype.is_floating_point:
        return None
    dim = action_spec.shape[-1] if action_spec.shape else 1
    low, high = (
        torch.as_tensor(bound).broadcast_to(action_spec.shape).reshape(-1, dim)[0].clone()
        for bound in (space.low, space.high)
    )
    limits = torch.finfo(low.dtype)
    low = low.masked_fill(low <= limits.min, -torch.inf)
    high = high.masked_fill(high >= limits.max, torch.inf)
    if not low.is_meta and low.isinf().all() and high.isinf().all():
        return None
    return low, high
