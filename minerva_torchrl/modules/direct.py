"""Calls of TensorDict modules that cost less besides their network."""

from __future__ import annotations

import inspect
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, skip_existing
from torch import Tensor

__all__ = ["DirectModule"]

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
