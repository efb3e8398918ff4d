"""Steps and states of the data that the losses are given."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["blank", "time_dim"]


def blank(x: Tensor, where: Tensor) -> Tensor:
    """``x`` ``[*B, ...]`` with zeros where ``where`` ``[*B]`` holds, as it may be NaN there."""
    features = [1] * (x.ndim - where.ndim)
    return torch.where(where.reshape(*where.shape, *features), 0, x)


def time_dim(tensordict: TensorDictBase) -> int | None:
    """Batch dimension of time; ``None`` for transitions, which have none."""
    if tensordict._has_names() and "time" in tensordict.names:
        return tensordict.names.index("time")
    return tensordict.ndim - 1 if tensordict.ndim > 1 else None
