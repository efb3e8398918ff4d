"""Calls of TensorDict modules without what they cost besides the network."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch.distributions as D
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictParams,
)
from torch import nn
from torchrl._utils import is_compiling

__all__ = ["call_module", "get_dist", "is_plain", "using"]


def call_module(module: Any, data: TensorDictBase) -> TensorDictBase:
    """``module(data)``, written into ``data`` itself.

    A TensorDictModule looks for an optional package with every output that it writes, which takes
    longer than a small layer. Where a module is a plain one, without hooks, special arguments or
    a ``forward`` of its own, the network inside it is called directly.
    """
    if not is_plain(module):
        return module(data)
    outputs = module.module(*(data.get(key) for key in module.in_keys))
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    if len(outputs) != len(module.out_keys):  # let the module say what is wrong
        return module(data)
    for key, output in zip(module.out_keys, outputs, strict=True):
        data.set(key, output)
    return data


def using(module: nn.Module, params: Any) -> Any:
    """A context in which a module has the given parameters; none if it holds them already."""
    if isinstance(params, TensorDictParams) and not is_compiling() and _holds(module, params):
        return nullcontext()
    return params.to_module(module, preserve_module_state=False)


def _holds(module: nn.Module, params: TensorDictParams) -> bool:
    """Whether the parameters of a module are the given ones, and it has no buffers."""
    own: list[nn.Parameter | None] = []
    for child in module.modules():
        if child._buffers:
            return False
        own += child._parameters.values()
    own, given = [parameter for parameter in own if parameter is not None], [*params.parameters()]
    return len(own) == len(given) > 0 and all(map(operator.is_, own, given))


def get_dist(actor: ProbabilisticTensorDictSequential, data: TensorDictBase) -> D.Distribution:
    """``actor.get_dist(data)`` through :func:`call_module`; writes into ``data``."""
    modules: Any = actor.module
    if actor._forward_hooks or actor._forward_pre_hooks or not all(map(is_plain, modules[:-1])):
        return actor.get_dist(data)
    for module in modules[:-1]:
        data = call_module(module, data)
    return modules[-1].get_dist(data)


def is_plain(module: nn.Module) -> bool:
    """Whether a TensorDict module does nothing but call its network."""
    return (
        isinstance(module, TensorDictModule)
        and type(module).forward is TensorDictModule.forward
        and module._kwargs is None
        and module.method is None
        and not module.method_kwargs
        and not module._get_kwargs
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and module.out_keys == module.out_keys_source
        and "_" not in module.out_keys
    )
