"""Initialisation of networks."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn
from torch.nn.parameter import UninitializedParameter

__all__ = ["orthogonal_init_"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def orthogonal_init_(
    network: ModuleT, *, hidden_gain: float = math.sqrt(2.0), last_gain: float = 1.0
) -> ModuleT:
    r"""Orthogonal weights and zero biases, in place, with a gain of its own for the last layer.

    A weight :math:`W` of shape ``[n, m]`` becomes ``gain`` times a matrix with orthonormal rows or
    columns, whichever are fewer. A small gain on the last layer of a policy makes its first actions
    nearly independent of the state; a critic usually keeps 1.

    Args:
        network (nn.Module): its :class:`~torch.nn.Linear` layers, in the order in which they were
            registered, are initialised; other layers stay as they are.

    Keyword Args:
        hidden_gain (float): gain of every layer but the last. Defaults to :math:`\sqrt 2`.
        last_gain (float): gain of the last layer. Defaults to 1.

    Returns:
        ``network`` itself.

    Examples:
        >>> import torch
        >>> network = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2))
        >>> network = orthogonal_init_(network, last_gain=0.01)
        >>> weight = network[-1].weight  # [2, 64]: two orthogonal rows of length 0.01
        >>> torch.allclose(weight @ weight.T, 0.01**2 * torch.eye(2), atol=1e-9)
        True
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ValueError(
            f"network must contain at least one nn.Linear, got {type(network).__name__} without."
        )
    if any(isinstance(layer.weight, UninitializedParameter) for layer in layers):
        raise ValueError(
            "network must not contain lazy layers whose shape is still unknown; "
            "run it once before initialising it."
        )
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else hidden_gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return network
