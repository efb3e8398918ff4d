"""A function of a loss and a batch as one graph of tensor operations, without Python around it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.modules.distributions import continuous

__all__ = ["Backend", "Origin", "TracedFunction", "kind_of", "replayed"]

Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]
"""A backend of ``torch.compile``: makes a function of a graph."""

_NO_VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class TracedFunction:
    """A function of a loss and a batch, compiled from the operations that it called once.

    The function is run on the batch, and each operation on tensors is recorded, whatever Python,
    TensorDicts and modules it came from. That takes as long as a few eager calls. What it did to
    parameters, buffers and random numbers is taken back.

    Parameters and buffers of the loss are inputs of the graph, not values in it: it always works
    with what they hold at the time of a call. Tensors that belong to nobody are constants.

    Args:
        loss (nn.Module): whose parameters and buffers the function reads.
        function (callable): takes a batch, may write entries into it, returns tensors.
        batch (TensorDictBase): a batch.
        backend (callable): compiles the graph.
    """

    def __init__(
        self,
        loss: nn.Module,
        function: Callable[[TensorDictBase], Sequence[Tensor]],
        batch: TensorDictBase,
        backend: Backend,
    ) -> None:
        # In an order that does not depend on the process, by which the compiler finds its caches.
        entries = dict(sorted(_entries(batch).items(), key=lambda entry: str(entry[0])))
        with _no_effects(loss):
            function(batch.copy())  # looks that a loss takes at its first data only
            graph, self._written = _trace(function, batch, list(entries))
        used = _remove_unused_inputs(graph)
        self._read = [key for key, is_used in zip(entries, used, strict=True) if is_used]
        _hold_tensors_of(loss, graph)
        # With a shape environment the compiler's caches work.
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        with tracing(TracingContext(mode)), torch.no_grad():
            self._call = backend(graph, [entries[key] for key in self._read])

    def __call__(self, batch: TensorDictBase) -> Sequence[Tensor]:
        """What the function returns for a batch of the same kind."""
        with torch.no_grad():
            outputs = self._call(*[batch.get(key) for key in self._read])
        if not self._written:
            return outputs
        end = len(outputs) - len(self._written)
        for key, value in zip(self._written, outputs[end:], strict=True):
            batch.set(key, value)
        return outputs[:end]


class Origin:
    """What a loss was like when a graph was made of it.

    That is: the attributes of its modules that are numbers, strings and the like, the keys that it
    reads and writes, and which tensors it holds. Values of tensors are no part of it.

    Args:
        loss (nn.Module): the loss.
    """

    def __init__(self, loss: nn.Module) -> None:
        modules = _modules(loss)
        keys = (vars(m._tensor_keys) for m in modules if _has_keys(m))
        self._settings = [_Values(of, _is_setting) for of in (*map(vars, modules), *keys)]
        tensors = [of for m in loss.modules() for of in (m._parameters, m._buffers)]
        self._tensors = [_Values(of, lambda _, x: x is not None) for of in tensors]
        self._learned = [(x, x.requires_grad) for of in self._tensors for x in of.values]

    def changed(self) -> str | None:
        """The name of something that is different now, if anything is."""
        for settings in self._settings:
            if settings.now() != settings.values:
                return settings.different()
        for tensors in self._tensors:
            if not all(map(operator.is_, tensors.now(), tensors.values)):
                return tensors.different()
        for tensor, requires_grad in self._learned:
            if tensor.requires_grad is not requires_grad:
                return "requires_grad"
        return None


class _Values:
    """Some values of a dictionary."""

    def __init__(self, of: dict[str, Any], belongs: Callable[[str, Any], bool]) -> None:
        self._of = of
        self._names = [name for name, value in of.items() if belongs(name, value)]
        self.values = self.now()

    def now(self) -> list[Any]:
        """What they are now."""
        return list(map(self._of.get, self._names))

    def different(self) -> str:
        """The name of one that is not what it was."""
        pairs = zip(self._names, self.now(), self.values, strict=True)
        return next(name for name, now, before in pairs if now is not before)


def kind_of(batch: TensorDictBase) -> tuple[Any, ...]:
    """What a graph is made for: names, shapes, strides, types and devices of a batch's entries."""
    return (
        batch.batch_size,
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        *((key, x.shape, x.stride(), x.dtype, x.device) for key, x in _entries(batch).items()),
    )


# Tracing -----------------------------------------------------------------------------------------


def _trace(
    function: Callable[[TensorDictBase], Sequence[Tensor]],
    batch: TensorDictBase,
    keys: list[NestedKey],
) -> tuple[GraphModule, list[NestedKey]]:
    """The graph of a function of the batch's entries, and the keys that it wrote.

    The values that were written are the last outputs of the graph.
    """
    written: list[NestedKey] = []

    def of_tensors(*tensors: Tensor) -> list[Tensor]:
        data = batch.copy()
        for key, tensor in zip(keys, tensors, strict=True):
            data.set(key, tensor)
        given = _entries(data)
        with _NoValues(), _no_checks():
            outputs = list(function(data))
        new = {key: x for key, x in _entries(data).items() if x is not given.get(key)}
        written.extend(new)
        return [*outputs, *(x.detach() for x in new.values())]

    tensors = [batch.get(key) for key in keys]
    with torch.enable_grad():
        graph = make_fx(of_tensors, _allow_non_fake_inputs=True)(*tensors)
    return graph, written


class _NoValues(TorchDispatchMode):
    """Refuses to read a value on the host, which would be the same for ever in a graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NO_VALUES:
            raise RuntimeError(
                "A loss that is compiled can't look at the values of tensors (.item(), bool(x), "
                "if x > 0: ...)."
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_checks() -> Iterator[None]:
    """Keep TorchRL's distributions from looking at their bounds, as while torch compiles them."""
    with mock.patch.object(continuous, "is_compiling", return_value=True):
        yield


@contextmanager
def _no_effects(loss: nn.Module) -> Iterator[None]:
    """Take back what happens to the tensors of a loss, and to random numbers."""
    tensors = [*loss.parameters(), *loss.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


def _remove_unused_inputs(graph: GraphModule) -> list[bool]:
    """Remove what has no effect; returns which inputs have one."""
    graph.graph.eliminate_dead_code()
    inputs = graph.graph.find_nodes(op="placeholder")
    used = [bool(node.users) for node in inputs]
    for node, is_used in zip(inputs, used, strict=True):
        if not is_used:
            graph.graph.erase_node(node)
    return used


def _hold_tensors_of(loss: nn.Module, graph: GraphModule) -> None:
    """Make a loss's tensors the graph's own, where it has them or views of the same memory."""
    owners = {_memory(tensor): tensor for tensor in (*loss.buffers(), *loss.parameters())}
    names: dict[int, str] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, node.target)
        tensor = owners.get(_memory(tensor), tensor)
        name = names.get(id(tensor))
        if name is None:
            name = names[id(tensor)] = f"tensor_{len(names)}"
            # Not a parameter: nothing is differentiated from here on.
            graph.register_buffer(name, tensor)
        node.target = name
    for name in [*vars(graph), *graph._parameters, *graph._buffers]:
        if name.startswith(("_tensor_constant", "_param_constant")):
            delattr(graph, name)
    graph.recompile()
    # As in graphs of torch.export, whose tensors keep their addresses: CUDA graphs rely on it.
    graph.meta["dynamo_compile_id"] = None


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def replayed(graph: GraphModule, _: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A backend without a compiler: the operations as they were recorded."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        (source,) = node.args
        if source.op == "call_function":  # the loss's own tensors are not given away
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


# Losses and batches ------------------------------------------------------------------------------


def _entries(batch: TensorDictBase) -> dict[NestedKey, Tensor]:
    return {key: x for key, x in batch.items(True, True) if isinstance(x, Tensor)}


def _modules(loss: nn.Module) -> list[nn.Module]:
    """All modules of a loss, with the networks that it calls with parameters of its own."""
    found: dict[int, nn.Module] = {}
    waiting = [loss]
    while waiting:
        for module in waiting.pop().modules():
            if id(module) not in found:
                found[id(module)] = module
                waiting += [x for x in vars(module).values() if isinstance(x, nn.Module)]
    return [module for module in found.values() if not isinstance(module, TensorDictParams)]


def _has_keys(module: nn.Module) -> bool:
    return hasattr(vars(module).get("_tensor_keys"), "__dict__")


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("_"):  # a count or a flag; other things are often made when first needed
        return isinstance(value, (bool, int, float))
    return isinstance(value, (bool, int, float, str, bytes, tuple, type(None)))
