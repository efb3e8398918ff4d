"""Calls of TensorDict modules that cost less besides their network."""

from __future__ import annotations

import inspect
import operator
from contextlib import nullcontext
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictParams, skip_existing
from torch import Tensor, nn
from torchrl._utils import is_compiling

__all__ = ["DirectModule", "using"]

# Without what makes a TensorDict of tensors, and looks for outputs that exist already.
_forward = inspect.unwrap(TensorDictModule.forward)


class DirectModule(TensorDictModule):
    """A ``TensorDictModule`` that reads and writes the tensors of its network as they are.

    TensorDict looks at every output for something to convert, and for optional packages that it
    might come from, which takes longer than a small network. A TensorDict as input and tensors as
    outputs are left alone here; for anything else this is the module that it inherits from, with
    its arguments. It serves as policy, value or action-value network.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> module = DirectModule(torch.nn.Linear(3, 2), ["observation"], ["features"])
        >>> module(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))["features"].shape
        torch.Size([5, 2])
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network on entries of a TensorDict, and write what it returns."""
        plain = len(args) == 1 and not kwargs and isinstance(args[0], TensorDictBase)
        if plain and not skip_existing():
            return _forward(self, args[0])
        return super().forward(*args, **kwargs)

    def _write_to_tensordict(
        self,
        tensordict: TensorDictBase,
        tensors: Any,
        tensordict_out: TensorDictBase | None = None,
        out_keys: Any = None,
    ) -> TensorDictBase:
        keys = self.out_keys_source
        plain = tensordict_out is None and out_keys is None and self.inplace is True
        plain = plain and len(keys) == len(tensors) and "_" not in keys
        if not plain or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return super()._write_to_tensordict(tensordict, tensors, tensordict_out, out_keys)
        for key, tensor in zip(keys, tensors, strict=True):
            tensordict.set(key, tensor)
        return tensordict


def using(module: nn.Module, params: Any) -> Any:
    """A context in which a module has the given parameters; none if it holds them already.

    Exchanging the parameters of a small network takes as long as calling it.

    Args:
        module (nn.Module): a network of a loss.
        params (TensorDictParams): the parameters that the loss holds for it.
    """
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
