"""Steps and states of the data that the losses are given."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["blank_terminal_states", "time_dim"]


def blank_terminal_states(states: TensorDictBase, terminated: Tensor) -> TensorDictBase:
    """Zeros where ``terminated`` ``[*B]`` holds, as terminal observations may be NaN."""

    def blank(x: Tensor) -> Tensor:
        features = [1] * (x.ndim - terminated.ndim)
        return torch.where(terminated.reshape(*terminated.shape, *features), 0, x)

    return states.apply(blank)


def time_dim(tensordict: TensorDictBase) -> int | None:
    """Batch dimension of time; ``None`` for transitions, which have none."""
    if tensordict._has_names() and "time" in tensordict.names:
        return tensordict.names.index("time")
    return tensordict.ndim - 1 if tensordict.ndim > 1 else None
