"""Steps and states of the data that the losses are given."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["blank", "time_dim"]


def blank(x: Any, where: Tensor) -> Any:
    """``x`` ``[*B, ...]`` with zeros where ``where`` ``[*B]`` holds, as it may be NaN there.

    Of a TensorDict all entries; what is no floating-point number is left as it is.
    """
    if isinstance(x, TensorDictBase):
        return x.apply(lambda entry: blank(entry, where))
    if not x.is_floating_point():
        return x
    features = [1] * (x.ndim - where.ndim)
    return torch.where(where.reshape(*where.shape, *features), 0, x)


def time_dim(tensordict: TensorDictBase) -> int | None:
    """Batch dimension of time; ``None`` for transitions, which have none."""
    if tensordict._has_names() and "time" in tensordict.names:
        return tensordict.names.index("time")
    return tensordict.ndim - 1 if tensordict.ndim > 1 else None
