"""A network with the parameters that a loss holds for it, for the time of a call."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torchrl._utils import is_compiling

__all__ = ["using"]

_SETS_PER_NETWORK = 8  # online and target parameters, and a few temporary ones


def using(network: nn.Module, params: Any) -> AbstractContextManager[Any]:
    """A context in which a network has the given parameters.

    It is ``params.to_module(network)``, which takes as long as a call of a small network, because
    it walks through both trees. Here the places of the tensors are looked up once and kept.
    Networks with buffers, and parameters inside ``vmap`` or ``torch.compile``, take the usual way.

    Args:
        network (nn.Module): a network of a loss.
        params (TensorDictParams): the parameters that the loss holds for it.

    Examples:
        >>> import torch
        >>> from tensordict import from_module
        >>> network = nn.Linear(1, 1, bias=False)
        >>> params = TensorDictParams(from_module(network).data * 0, no_convert=True)
        >>> with using(network, params):
        ...     network(torch.ones(1))
        tensor([0.])
    """
    if isinstance(params, TensorDictParams) and not is_compiling():
        sets = _known.setdefault(network, {})
        known = sets.get(id(params))
        if known is None or not known.holds(params):
            if len(sets) >= _SETS_PER_NETWORK:
                sets.clear()
            known = sets[id(params)] = _Places(network, params)
        if known.complete:
            return _Exchange(known.places)
    return params.to_module(network, preserve_module_state=False)


_Place = tuple[dict[str, Any], str, Tensor]  # parameters of a module, name of one, its replacement


class _Places:
    """Where in a network the tensors of a set belong."""

    def __init__(self, network: nn.Module, params: TensorDictParams) -> None:
        self._tensors = _tensors(params)
        own = sum(len(_own(module._parameters)) for module in network.modules())
        has_buffers = any(module._buffers for module in network.modules())
        self.places: list[_Place] = []
        for key, tensor in params.items(True, True):
            *path, name = (key,) if isinstance(key, str) else key
            self.places.append((network.get_submodule(".".join(path))._parameters, name, tensor))
        found = all(parameters.get(name) is not None for parameters, name, _ in self.places)
        same = {id(tensor) for _, _, tensor in self.places} == set(map(id, self._tensors))
        # Modules that appear twice in a network have one name of several.
        self.complete = found and same and not has_buffers and own == len(self.places) > 0

    def holds(self, params: TensorDictParams) -> bool:
        """Whether the set still consists of the same tensors."""
        tensors = _tensors(params)
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))


class _Exchange:
    """Puts tensors into their places, and back what was there."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [parameters[name] for parameters, name, _ in self._places]
        for parameters, name, tensor in self._places:
            parameters[name] = tensor

    def __exit__(self, *error: object) -> None:
        for (parameters, name, _), before in zip(self._places, self._before, strict=True):
            parameters[name] = before


def _tensors(params: TensorDictParams) -> list[Any]:
    # Those that it holds itself; with others inside, the places are not complete.
    return [*params._parameters.values(), *params._buffers.values()]


def _own(parameters: dict[str, nn.Parameter | None]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters.values() if parameter is not None]


_known: WeakKeyDictionary[nn.Module, dict[int, _Places]] = WeakKeyDictionary()
