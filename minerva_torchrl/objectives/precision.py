"""Networks in the precision of autocast, equations in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["full_precision", "in_full_precision"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_full_precision(method: _Method) -> _Method:
    """Make a method of a loss evaluate its equations in float32 under autocast.

    Only the networks run in the lower precision. What they return is float32 from there on.
    """

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = self._device_type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return method(self, *args, **kwargs)
        self._network_dtype = torch.get_autocast_dtype(device)
        try:
            with torch.autocast(device, enabled=False):
                return method(self, *args, **kwargs)
        finally:
            self._network_dtype = None

    return wrapped  # type: ignore[return-value]


def full_precision(x: Tensor) -> Tensor:
    """A tensor of half precision in float32, any other as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
