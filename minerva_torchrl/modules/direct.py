"""Calls of TensorDict modules that cost less besides their network."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, cast

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, skip_existing
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, SafeProbabilisticModule

from minerva_torchrl.modules.exploration import PinkNoiseActor

__all__ = ["DirectModule", "plain_gaussian"]

# Without what makes a TensorDict of tensors, and looks for outputs that exist already.
_forward = inspect.unwrap(TensorDictModule.forward)


class DirectModule(TensorDictModule):
    """A ``TensorDictModule`` that reads and writes the tensors of its network as they are.

    TensorDict looks at every output for something to convert, and for optional packages that it
    might come from, which takes longer than a small network. A TensorDict as input and tensors as
    outputs are left alone here; for anything else this is the module that it inherits from, with
    its arguments. It serves as policy, value or action-value network.

    Takes the arguments of :class:`~tensordict.nn.TensorDictModule`.

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


def plain_gaussian(actor: nn.Module) -> tuple[nn.Module, NestedKey | None] | None:
    """The network of a diagonal Gaussian policy that can be called without a TensorDict.

    Args:
        actor (nn.Module): a policy, with pink noise or without.

    Returns:
        What maps the observation to mean and standard deviation, and the key of the
        log-probability, ``None`` if it is not asked for. Or ``None`` for policies with another
        distribution, with something around it, or with other keys than ``"observation"``,
        ``"loc"``, ``"scale"`` and ``"action"``.
    """
    if type(actor) not in (ProbabilisticActor, PinkNoiseActor):
        return None
    network, *rest = cast("Iterable[Any]", cast("Any", actor).module)
    head = rest[0]
    plain = len(rest) == 1 and type(network) is DirectModule
    plain = plain and type(head) is SafeProbabilisticModule and not head.safe
    plain = plain and head.distribution_class is IndependentNormal and not head.distribution_kwargs
    plain = plain and head.num_samples is None
    plain = plain and head._generator is None and head._generator_key is None
    hooked = [m for m in (actor, network, head) if m._forward_hooks or m._forward_pre_hooks]
    if not plain or hooked:
        return None
    sources = [*network.in_keys, *network.out_keys]
    targets = [*head.in_keys, *head.dist_keys, *head.dist_sample_keys]
    parameters = ["loc", "scale"]
    if sources != ["observation", *parameters] or targets != [*parameters, *parameters, "action"]:
        return None
    return network.module, head.log_prob_key if head.return_log_prob else None
