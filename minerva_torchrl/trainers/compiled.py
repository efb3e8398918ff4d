"""The part of an update that is compiled: losses, gradients and their clipping, as one graph."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

__all__ = ["CompiledGradients", "Evaluation", "clip_gradients", "sum_of_losses", "why_not"]


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

    It has the eager update's mathematics and random numbers, traced once for each shape of a batch.
    Optimisers step outside of it, so that learning rates, their states and checkpoints are as
    without it.

    Args:
        mode (str): mode of ``torch.compile``. Defaults to ``"default"``.
        backend (str): backend of ``torch.compile``. Defaults to ``"inductor"``.

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
        self._functions: dict[Any, Callable[[TensorDictBase], Evaluation]] = {}

    def __call__(
        self,
        loss: nn.Module,
        batch: TensorDictBase,
        method: str | None,
        groups: Sequence[tuple[Sequence[Tensor], float | None]],
    ) -> Evaluation:
        """Losses, clipped gradients, and whether all are finite.

        Args:
            loss (LossModule): the loss.
            batch (TensorDictBase): a batch. The loss may write into it.
            method (str, optional): which method of the loss to call; by default ``forward``.
            groups (sequence): parameters, with the largest norm of their gradient.
        """
        key = (id(loss), method, batch.shape, *((len(p), clip) for p, clip in groups))
        start = time.perf_counter()
        new = key not in self._functions
        if new:
            self.announce("compiling the update, which takes up to a minute")
            call = loss if method is None else getattr(loss, method)
            evaluate = functools.partial(_evaluate, call, [(list(p), clip) for p, clip in groups])
            compile_: Any = torch.compile  # its annotations lack an argument
            self._functions[key] = compile_(
                evaluate,
                fullgraph=True,
                dynamic=False,
                isolate_recompiles=True,
                backend=self.backend,
                options=self._options(),
            )
        torch.compiler.cudagraph_mark_step_begin()
        undisturbed = _signals_wait() if new else nullcontext()
        with torch._dynamo.config.patch(trace_autograd_ops=True), undisturbed:
            result = self._functions[key](batch)
        if new:
            self.announce(f"compiled in {time.perf_counter() - start:.0f} s")
        if self.mode == "default":
            return result
        # The next call writes where this one did.
        losses = {name: value.clone() for name, value in result.losses.items()}
        return Evaluation(losses, result.gradients, result.finite.clone())

    def _options(self) -> dict[str, Any] | None:
        if self.backend != "inductor":
            return None
        of_mode = {} if self.mode == "default" else torch._inductor.list_mode_options(self.mode)
        return {**of_mode, "fallback_random": True}  # the draws of the eager update


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
    groups: list[tuple[list[Tensor], float | None]],
    batch: TensorDictBase,
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
        finite = finite & clip_gradients(of_group, clip).isfinite()
        start = end
    return Evaluation({name: x.detach() for name, x in losses.items()}, gradients, finite)


@torch.no_grad()
def clip_gradients(gradients: list[Tensor], clip: float | None) -> Tensor:
    """Scale gradients, in place, to a joint norm of at most ``clip``; returns their norm."""
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
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        return f"torch {torch.__version__} can't trace a backward pass"
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
