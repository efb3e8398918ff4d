"""How a loss asks the networks of an action-value critic, by what they read and write."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from minerva_torchrl.objectives.checks import check_count

__all__ = [
    "ActionValueCritic",
    "AllActionsCritic",
    "Evaluate",
    "SingleActionCritic",
    "check_width",
    "make_ensemble",
]

Evaluate = Callable[[TensorDictBase], Tensor]
"""What the ``K`` networks of an ensemble write for some inputs, ``[K, ...]``."""


class ActionValueCritic(ABC):
    """Values of actions at states, by an ensemble of ``K`` networks.

    Args:
        value_key (NestedKey): where the network writes values.
        features (tuple of int): shape ``*F`` of what describes a value, ``()`` (default) for the
            value itself.
    """

    def __init__(self, value_key: NestedKey, features: tuple[int, ...] = ()) -> None:
        self.value_key = value_key
        self.features = features

    @abstractmethod
    def of_action(self, evaluate: Evaluate, states: TensorDictBase, action: Any) -> Tensor:
        """Value of one action at each state, ``[K, *B, *F]``, for states ``[*B]``."""

    @abstractmethod
    def of_candidates(self, evaluate: Evaluate, states: TensorDictBase, action: Any) -> Tensor:
        """Values of ``N`` actions ``[N, *B, ...]`` at each state, ``[K, N, *B, *F]``."""

    def _unflattened(self, value: Tensor, shape: tuple[int, ...], values: int) -> Tensor:
        """What describes ``values`` values, ``[K, *shape, values, *F]``."""
        shape = (*shape, values * math.prod(self.features))
        if value.shape[1:] != shape:
            raise ValueError(
                f"qvalue_network must write {self.value_key!r} of shape {shape}, "
                f"got {tuple(value.shape[1:])}."
            )
        return value.reshape(*value.shape[:-1], values, *self.features)


class SingleActionCritic(ActionValueCritic):
    """A network that reads observation and action and writes one value, ``[*B, 1]``.

    Args:
        value_key (NestedKey): where the network writes the value.
        action_key (NestedKey): where it reads the action.
        features (tuple of int): as in :class:`ActionValueCritic`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> critic = SingleActionCritic("state_action_value", "action")
        >>> states = TensorDict({"observation": torch.zeros(5, 3)}, [5])
        >>> sum_of_all = lambda data: (
        ...     data["action"].sum(-1, keepdim=True).unsqueeze(0)
        ... )  # one network
        >>> critic.of_candidates(sum_of_all, states, torch.ones(7, 5, 2)).shape
        torch.Size([1, 7, 5])
    """

    def __init__(
        self, value_key: NestedKey, action_key: NestedKey, features: tuple[int, ...] = ()
    ) -> None:
        super().__init__(value_key, features)
        self.action_key = action_key

    def of_action(self, evaluate: Evaluate, states: TensorDictBase, action: Any) -> Tensor:
        """One call with the action among the inputs."""
        value = evaluate(states.copy().set(self.action_key, action))
        return self._unflattened(value, states.shape, 1).squeeze(1 + states.ndim)

    def of_candidates(self, evaluate: Evaluate, states: TensorDictBase, action: Any) -> Tensor:
        """One call; the states are an expanded view, so that no network need see them twice."""
        return self.of_action(evaluate, states.expand(len(action), *states.shape), action)


class AllActionsCritic(ActionValueCritic):
    """A network that reads the observation and writes the values of all actions, ``[*B, A]``.

    Takes the arguments of :class:`ActionValueCritic`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> critic = AllActionsCritic("action_value")
        >>> states = TensorDict({"observation": torch.zeros(5, 3)}, [5])
        >>> values = lambda data: torch.tensor([1.0, 2.0]).expand(
        ...     1, 5, 2
        ... )  # one network, two actions
        >>> critic.of_action(values, states, torch.ones(5, dtype=torch.long))
        tensor([[2., 2., 2., 2., 2.]])
    """

    def of_action(self, evaluate: Evaluate, states: TensorDictBase, action: Any) -> Tensor:
        """The value at the action's place."""
        values = evaluate(states)
        values = values.reshape(*values.shape[:-1], -1, *self.features)
        one_hot = action.ndim > states.ndim
        index = action.long().argmax(-1) if one_hot else action.long()
        dim = 1 + states.ndim
        index = index.reshape(1, *states.shape, 1, *[1] * len(self.features))
        index = index.expand(*values.shape[:dim], 1, *self.features)
        return values.gather(dim, index).squeeze(dim)

    def of_candidates(self, evaluate: Evaluate, states: TensorDictBase, action: Any) -> Tensor:
        """The candidates are all actions in their order."""
        values = self._unflattened(evaluate(states), states.shape, len(action))
        return values.movedim(1 + states.ndim, 1)


def make_ensemble(
    qvalue_network: TensorDictModule | Sequence[TensorDictModule],
    num_qvalue_nets: int,
    of_actor: Iterable[nn.Parameter] = (),
) -> list[TensorDictModule]:
    """The members of a critic ensemble, with the weights of the given modules untouched.

    Args:
        qvalue_network (TensorDictModule or sequence of them): a critic, or all members.
        num_qvalue_nets (int): size of the ensemble that is made from a single critic.
        of_actor (iterable of Parameter): the actor's parameters, which the members may share.

    Returns:
        All members, the given ones first.

    Examples:
        >>> from torchrl.modules import ValueOperator
        >>> critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
        >>> len(make_ensemble(critic, 2))
        2
    """
    check_count("num_qvalue_nets", num_qvalue_nets)
    if isinstance(qvalue_network, Sequence):
        critics = list(qvalue_network)
        if num_qvalue_nets not in (1, len(critics)):
            raise ValueError(
                f"num_qvalue_nets={num_qvalue_nets} contradicts a list of {len(critics)} critics. "
                "Leave it out when a list is given."
            )
    else:
        critics = [qvalue_network]
        critics += [_fresh_copy(qvalue_network) for _ in range(num_qvalue_nets - 1)]
    for critic in critics:
        if not isinstance(critic, TensorDictModuleBase):
            raise TypeError(
                "qvalue_network must be a TensorDictModule or a list of them, or with objectives a "
                "mapping of their networks, "
                f"got {type(critic).__name__}."
            )
    if not critics:
        raise ValueError("qvalue_network must not be an empty list.")
    elsewhere = set(of_actor)
    for critic in critics[1:]:
        for name, parameter in critic.named_parameters():
            if parameter in set(critics[0].parameters()) - elsewhere:
                raise ValueError(
                    f"critics of a list must not share parameters with each other, got {name!r} "
                    "twice: TorchRL would not list it among the parameters of the loss."
                )
    return critics


def _fresh_copy(critic: TensorDictModule) -> TensorDictModule:
    """A copy with weights of its own, drawn as the layers draw them when they are made."""
    copy = deepcopy(critic)
    for name, module in copy.named_modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"num_qvalue_nets > 1 needs to initialise copies of the critic, but its module "
                f"{name!r} ({type(module).__name__}) has no reset_parameters(). Pass a list of "
                "critics instead."
            )
    return copy


def check_width(
    networks: Iterable[nn.Module], name: str, width: int, what: str, *, values: int | None = 1
) -> None:
    """Raise if the last layer of a network can't write what describes its values.

    Only a network that says how wide it is, or ends in a layer that does, can be checked here;
    others are when they are first called.

    Args:
        networks (iterable of Module): the networks.
        name (str): what the user calls them.
        width (int): outputs for one value.
        what (str): why there are so many.

    Keyword Args:
        values (int, optional): values that a network writes, ``None`` for any number of actions.
            Defaults to ``1``.

    Examples:
        >>> check_width([nn.Linear(3, 51)], "qvalue_network", 51, "a CategoricalCritic")
    """
    for network in networks:
        found = _output_width(network)
        if found is not None and (found % width if values is None else found != values * width):
            times = "" if values in (None, 1) else f"{values} actions x "
            raise ValueError(
                f"{name} must write {times}{width} outputs for {what}, got a last layer of {found}."
            )


def _output_width(module: nn.Module) -> int | None:
    """How many outputs a module has, if it is plain to see."""
    inner = getattr(module, "module", None)
    if isinstance(module, TensorDictModule) and isinstance(inner, nn.Module):
        return _output_width(inner)
    if isinstance(module, nn.Sequential) and len(module):
        return _output_width(module[-1])
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return None
    width = getattr(module, "out_features", None)
    return width if isinstance(width, int) else None
