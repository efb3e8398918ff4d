"""Initialisation of networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from torch import nn
from torch.nn.parameter import UninitializedParameter

from minerva_torchrl.objectives.checks import check_choice

__all__ = ["Initializer", "initialize_", "orthogonal_init_"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Initializer = Literal[
    "small_heads", "pytorch", "kaiming_mean", "xavier_heads", "fan_out", "orthogonal"
]
"""Names of ways to initialise the networks of a policy and a critic."""


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


def initialize_(
    network: ModuleT, part: Literal["hidden", "loc", "scale", "value"], initializer: Initializer
) -> ModuleT:
    r"""Initialise the linear layers of a part of a policy or critic, in place.

    With ``n`` inputs and ``m`` outputs of a layer:

    ================  ================  ======================  ==============  ====================
    ``initializer``   ``hidden``        ``loc``                 ``scale``       ``value``
    ================  ================  ======================  ==============  ====================
    ``small_heads``   PyTorch's         normal, 0.01 / √n       like ``loc``    truncated, 0.01
    ``pytorch``       PyTorch's         PyTorch's               PyTorch's       PyTorch's
    ``kaiming_mean``  PyTorch's         normal, 1 / √n          PyTorch's       truncated, 0.01
    ``xavier_heads``  PyTorch's         uniform, √(6 / (n+m))   like ``loc``    like ``loc``
    ``fan_out``       uniform, 1 / √m   normal, 0.01 / √n       like ``loc``    like ``loc``
    ``orthogonal``    gain √2           gain 0.01               gain 0.01       gain 1
    ================  ================  ======================  ==============  ====================

    The numbers are standard deviations of normal and bounds of uniform distributions. Biases become
    zero wherever a layer is not left as PyTorch made it.

    Args:
        network (nn.Module): its linear layers are initialised.
        part (str): what it is: hidden layers, or the head of means, of standard deviations or of
            values.
        initializer (str): a row of the table.

    Returns:
        ``network`` itself.

    Examples:
        >>> head = initialize_(nn.Linear(64, 2), "loc", "small_heads")
        >>> head.weight.abs().max().item() < 0.01, head.bias.tolist()
        (True, [0.0, 0.0])
    """
    check_choice("initializer", initializer, _SCHEMES)
    fill = _SCHEMES[initializer][part]
    for layer in network.modules():
        if isinstance(layer, nn.Linear) and fill is not None:
            fill(layer)
            nn.init.zeros_(layer.bias)
    return network


def _normal(layer: nn.Linear, std: float) -> None:
    nn.init.normal_(layer.weight, std=std / math.sqrt(layer.in_features))


def _truncated_normal(layer: nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight, std=0.01)


def _xavier_uniform(layer: nn.Linear) -> None:
    nn.init.xavier_uniform_(layer.weight)


def _fan_out_uniform(layer: nn.Linear) -> None:
    bound = 1 / math.sqrt(layer.out_features)
    nn.init.uniform_(layer.weight, -bound, bound)


def _orthogonal(layer: nn.Linear, gain: float) -> None:
    nn.init.orthogonal_(layer.weight, gain)


def _scheme(
    hidden: _Fill | None, loc: _Fill | None, scale: _Fill | None, value: _Fill | None
) -> dict[str, _Fill | None]:
    return {"hidden": hidden, "loc": loc, "scale": scale, "value": value}


_Fill = Callable[[nn.Linear], None]
_SMALL: _Fill = partial(_normal, std=0.01)
_SCHEMES: dict[str, dict[str, _Fill | None]] = {
    "small_heads": _scheme(None, _SMALL, _SMALL, _truncated_normal),
    "pytorch": _scheme(None, None, None, None),
    "kaiming_mean": _scheme(None, partial(_normal, std=1.0), None, _truncated_normal),
    "xavier_heads": _scheme(None, _xavier_uniform, _xavier_uniform, _xavier_uniform),
    "fan_out": _scheme(_fan_out_uniform, _SMALL, _SMALL, _SMALL),
    "orthogonal": _scheme(
        partial(_orthogonal, gain=math.sqrt(2)),
        partial(_orthogonal, gain=0.01),
        partial(_orthogonal, gain=0.01),
        partial(_orthogonal, gain=1.0),
    ),
}
