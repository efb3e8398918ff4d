"""Critic networks of several objectives, each with parameters of its own, as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from minerva_torchrl.objectives.critics.ensembles import check_width

__all__ = ["SideBySide", "side_by_side"]


class SideBySide(TensorDictModuleBase):
    """Writes what several networks say of an action side by side, as one of several outputs does.

    Args:
        networks (sequence of TensorDictModule): one for each objective. All write the same entry:
            ``[*B, P]`` for an action, or ``[*B, A * P]`` for all of them.
        width (int): outputs ``P`` that describe one value.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> networks = [
        ...     TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_action_value"])
        ...     for _ in range(2)
        ... ]
        >>> data = SideBySide(networks, 1)(TensorDict({"observation": torch.ones(5, 3)}, [5]))
        >>> data["state_action_value"].shape
        torch.Size([5, 2])
    """

    def __init__(self, networks: Sequence[TensorDictModuleBase], width: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.width = width
        self.in_keys = list(dict.fromkeys(key for net in networks for key in net.in_keys))
        self.out_keys = [networks[0].out_keys[0]]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call all networks, and write their outputs in order."""
        key = self.out_keys[0]
        outputs = [network(tensordict.copy()).get(key) for network in self.networks]
        for output in outputs:
            if output.shape != outputs[0].shape or output.shape[-1] % self.width:
                shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
                raise ValueError(
                    f"the networks of all objectives must write {key!r} with {self.width} outputs "
                    f"for one value, got the shapes {shapes}."
                )
        by_action = [output.unflatten(-1, (-1, self.width)) for output in outputs]
        return tensordict.set(key, torch.stack(by_action, -2).flatten(-3))


def side_by_side(qvalue_network: Any, objectives: Sequence[str], width: int) -> Any:
    """Mappings of networks, one for each objective, as one network; anything else as it is.

    Args:
        qvalue_network (TensorDictModule, mapping or sequence): as the user gave it; members of an
            ensemble may be mappings.
        objectives (sequence of str): their names, that of the return first.
        width (int): outputs that describe one value.

    Returns:
        A network, or a list of them.

    Examples:
        See :class:`SideBySide`, which it makes of a mapping.
    """
    if isinstance(qvalue_network, Sequence) and not isinstance(qvalue_network, str):
        return [side_by_side(member, objectives, width) for member in qvalue_network]
    if not isinstance(qvalue_network, Mapping):
        return qvalue_network
    if qvalue_network.keys() != set(objectives):
        raise ValueError(
            "a mapping as qvalue_network must have a network for the return ('value') and for each "
            f"of the objectives, {list(objectives)}; got {list(qvalue_network)}."
        )
    networks = [qvalue_network[name] for name in objectives]
    seen: set[nn.Parameter] = set()
    for name, network in zip(objectives, networks, strict=True):
        if not isinstance(network, TensorDictModuleBase):
            kind = type(network).__name__
            raise TypeError(f"qvalue_network[{name!r}] must be a TensorDictModule, got {kind}.")
        if network.out_keys[0] != networks[0].out_keys[0]:
            raise ValueError(
                f"the networks of all objectives must write {networks[0].out_keys[0]!r}, but "
                f"qvalue_network[{name!r}] writes {network.out_keys[0]!r}."
            )
        if not seen.isdisjoint(network.parameters()):
            raise ValueError(
                f"qvalue_network[{name!r}] shares parameters with another one; use a single "
                "network with the outputs of all objectives for that."
            )
        seen.update(network.parameters())
        check_width([network], f"qvalue_network[{name!r}]", width, "one objective", values=None)
    return SideBySide(networks, width)
