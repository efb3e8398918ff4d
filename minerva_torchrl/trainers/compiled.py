"""The part of an update that is compiled: losses, gradients and their clipping, as one graph."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.fx import GraphModule

from minerva_torchrl.trainers.tracing import Backend, Origin, TracedFunction, kind_of, replayed

__all__ = ["CompiledGradients", "Evaluation", "clip_gradients", "sum_of_losses", "why_not"]

Groups = Sequence[tuple[Sequence[Tensor], float | None]]
"""Parameters, with the largest joint norm of their gradient."""

_COMPILATIONS = 16  # of one kind of batch, before somebody should know


class Evaluation(NamedTuple):
    """What the optimisers' steps need of a batch."""

    losses: dict[str, Tensor]
    """Losses and metrics, detached."""
    gradients: Sequence[Tensor | None]
    """Gradients of all parameters, clipped."""
    finite: Tensor
    """Whether losses and gradients are finite, 0-d."""


class CompiledGradients:
    """Evaluates a loss, the gradients of the sum of its losses, and their clipping, compiled.

    It has the eager update's mathematics and random numbers. A loss is run once on a batch, and
    the operations that it called, those of its backward pass included, are what is compiled
    (``make_fx``): the compiler never sees Python or TensorDicts, and neither do later updates.
    Parameters and buffers are read anew in each of them. Optimisers step outside, so that learning
    rates, their states and checkpoints are as without it.

    What a graph was made from is compared before it is used: shapes and types of the batch, plain
    attributes of the loss and its networks, and which tensors they hold. Where they differ another
    graph is made.

    Args:
        mode (str): mode of ``torch.compile``. Defaults to ``"default"``.
        backend (str): backend of ``torch.compile``. Defaults to ``"inductor"``. With ``"recorded"``
            nothing is compiled: the recorded operations are called again, one after the other,
            which gives the eager update's numbers to the last bit without its Python.

    Examples:
        >>> from tensordict import TensorDict
        >>> class Square(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.tensor(3.0))
        ...
        ...     def forward(self, data):
        ...         return {"loss_square": (self.weight * data["x"]).square().mean()}
        >>> loss, data = Square(), TensorDict({"x": torch.ones(4)}, [4])
        >>> evaluate = CompiledGradients(backend="aot_eager")
        >>> losses, gradients, finite = evaluate(loss, data, None, [([loss.weight], 1.0)])
        >>> losses["loss_square"], finite
        (tensor(9.), tensor(True))
        >>> gradients[0].round(decimals=3)
        tensor(1.)
    """

    def __init__(self, mode: str = "default", backend: str = "inductor") -> None:
        self.mode = mode
        self.backend = backend
        self.announce: Callable[[str], None] = lambda line: None
        """Is told when a compilation begins and ends."""
        self.one_graph = backend != "recorded"
        """Whether a graph costs so much that one should serve updates with and without metrics."""
        self._graphs: dict[Any, _Graph] = {}
        self._looked_at: set[Any] = set()
        self._compilations: dict[Any, int] = {}

    def begin_update(self) -> None:
        """Look at the loss again: between the steps of one update nothing but values changes."""
        self._looked_at.clear()

    def __call__(
        self, loss: nn.Module, batch: TensorDictBase, method: str | None, groups: Groups
    ) -> Evaluation:
        """Losses, clipped gradients, and whether all are finite.

        Args:
            loss (LossModule): the loss.
            batch (TensorDictBase): a batch. The loss may write into it.
            method (str, optional): which method of the loss to call; by default ``forward``.
            groups (sequence): parameters, with the largest norm of their gradient.
        """
        key = (id(loss), method, kind_of(batch), *((len(p), clip) for p, clip in groups))
        graph = self._graphs.get(key)
        if graph is None or (key not in self._looked_at and graph.origin.changed() is not None):
            graph = self._graphs[key] = self._compile(key, loss, batch, method, groups)
        self._looked_at.add(key)
        if self.mode == "default":
            return graph(batch)
        torch.compiler.cudagraph_mark_step_begin()
        result = graph(batch)
        # The next call writes where this one did.
        losses = {name: value.clone() for name, value in result.losses.items()}
        return Evaluation(losses, result.gradients, result.finite.clone())

    def _compile(
        self, key: Any, loss: nn.Module, batch: TensorDictBase, method: str | None, groups: Groups
    ) -> _Graph:
        self._compilations[key] = count = self._compilations.get(key, 0) + 1
        if count > _COMPILATIONS:
            changed = self._graphs[key].origin.changed()
            raise RuntimeError(
                f"{type(loss).__name__} would be compiled for the {count}th time, because "
                f"{changed} changes from update to update. Make it a buffer, or don't compile."
            )
        if self.backend == "recorded":
            return _Graph(loss, batch, method, groups, replayed)
        self.announce("compiling the update, which takes up to a minute")
        start = time.perf_counter()
        with _signals_wait():
            graph = _Graph(loss, batch, method, groups, self._compiled)
        self.announce(f"compiled in {time.perf_counter() - start:.0f} s")
        return graph

    def _compiled(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """A backend of ``torch.compile`` with its options."""
        backend: Any = torch._dynamo.lookup_backend(self.backend)
        if self.backend != "inductor":
            return backend(graph, inputs)
        from torch._inductor import config, list_mode_options

        options = {
            **list_mode_options(self.mode),
            "fallback_random": True,  # the draws of the eager update
            "size_asserts": False,  # shapes have been compared before
            "alignment_asserts": False,
            # What calls the kernels in C++, too, and all in one file, which is read by the C++
            # compiler once.
            "cpp_wrapper": all(x.device.type == "cpu" for x in (*inputs, *graph.buffers())),
        }
        with config.patch(options):
            return backend(graph, inputs)


class _Graph:
    """A compiled evaluation of a loss, for batches of one kind."""

    def __init__(
        self,
        loss: nn.Module,
        batch: TensorDictBase,
        method: str | None,
        groups: Groups,
        backend: Backend,
    ) -> None:
        call = loss if method is None else getattr(loss, method)
        self._names: list[str] = []
        self._has_gradient: list[bool] = []

        def evaluate(data: TensorDictBase) -> list[Tensor]:
            losses, gradients, finite = _evaluate(call, groups, data, backend is not replayed)
            self._names = list(losses)
            self._has_gradient = [gradient is not None for gradient in gradients]
            return [finite, *losses.values(), *(x for x in gradients if x is not None)]

        self._function = TracedFunction(loss, evaluate, batch, backend)
        self.origin = Origin(loss)

    def __call__(self, batch: TensorDictBase) -> Evaluation:
        finite, *outputs = self._function(batch)
        losses = dict(zip(self._names, outputs, strict=False))
        present = iter(outputs[len(losses) :])
        gradients = [next(present) if has_gradient else None for has_gradient in self._has_gradient]
        return Evaluation(losses, gradients, finite)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let Ctrl-C wait: it would end the C++ compiler, too, and the run with an error."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _evaluate(
    call: Callable[[TensorDictBase], TensorDictBase],
    groups: Groups,
    batch: TensorDictBase,
    fused: bool,
) -> Evaluation:
    """What is traced."""
    losses = call(batch)
    total = sum_of_losses(losses)
    parameters = [parameter for group, _ in groups for parameter in group]
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(total, parameters, allow_unused=True)
    finite, start = total.detach().isfinite(), 0
    for group, clip in groups:
        end = start + len(group)
        of_group = [x for x in gradients[start:end] if x is not None]
        finite = finite & clip_gradients(of_group, clip, fused=fused).isfinite()
        start = end
    return Evaluation({name: x.detach() for name, x in losses.items()}, gradients, finite)


@torch.no_grad()
def clip_gradients(gradients: list[Tensor], clip: float | None, *, fused: bool = False) -> Tensor:
    """Scale gradients, in place, to a joint norm of at most ``clip``; returns their norm.

    ``fused`` is for a compiler, which has no code of its own for the usual norm.
    """
    if fused and gradients:
        norm = torch.stack([x.square().sum() for x in gradients]).sum().sqrt()
    elif len({(x.dtype, x.device) for x in gradients}) == 1:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    else:
        norm = nn.utils.get_total_norm(gradients)
    if clip is not None and gradients:
        torch._foreach_mul_(gradients, (clip / (norm + 1e-6)).clamp(max=1.0))
    return norm


def sum_of_losses(losses: Mapping[str, Tensor] | TensorDictBase) -> Tensor:
    """The sum of the entries that begin with ``loss_``."""
    return torch.stack([x for name, x in losses.items() if name.startswith("loss_")]).sum()


@functools.cache
def why_not(device: str) -> str | None:
    """Why updates can't be compiled here, or ``None`` if they can.

    Args:
        device (str): type of the device that they run on, such as ``"cpu"``.
    """
    if device != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return "no C++ compiler was found"
    return None
