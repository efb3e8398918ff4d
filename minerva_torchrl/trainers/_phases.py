"""What the optimisation steppers share: optimiser steps that leave out what is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl.objectives.common import LossModule
from torchrl.trainers.trainers import OptimizationStepper

from minerva_torchrl.objectives.duals import DualVariable

__all__ = ["NonFiniteError", "PhasedStepper", "Undo", "backward", "dual_tensors", "step_if"]


_FLAGS_KEPT = 256  # before they become one tensor


class NonFiniteError(RuntimeError):
    """Too many batches in a row had a loss, a gradient or data that is not finite."""


class PhasedStepper(OptimizationStepper):
    """A stepper that takes the phases of a loss one by one, with several optimisers.

    An update whose losses or gradients are not finite changes nothing: neither parameters nor
    optimisers, in none of its phases. It is counted on the device, so that nothing waits for it:
    with a fused optimiser (``torch.optim.Adam(..., fused=True)``) the step is left out on the
    device as well, with any other one the decision is made on the host.
    """

    _optimizer_names: tuple[str, ...]
    _skips: tuple[int, int, int] = (0, 0, 0)  # in all, in a row until now, most in a row
    _uncounted: tuple[Tensor, ...] = ()  # flags of the latest updates, 1-d, still on the device

    @property
    def skipped_updates(self) -> int:
        """Updates left out so far because something was not finite. Waits for the device."""
        return self._tally()[0]

    def check_finite(self, limit: int) -> None:
        """Raise :class:`NonFiniteError` if ``limit`` updates in a row were left out.

        Reads the flags of the updates, which waits for the device: once per collected batch is
        enough.

        Args:
            limit (int): number of updates in a row.
        """
        total, _, longest = self._tally()
        if longest >= limit:
            raise NonFiniteError(
                f"{longest} updates in a row had losses or gradients that are not finite "
                f"({total} in all; the limit is {limit})."
            )

    def state_dict(self) -> dict[str, Any]:
        """State of the optimisers, and the counters of updates left out."""
        state: dict[str, Any] = {name: opt.state_dict() for name, opt in self._optimizers()}
        state["skips"] = self._tally()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for name, optimizer in self._optimizers():
            optimizer.load_state_dict(state_dict[name])
        total, in_a_row, longest = map(int, state_dict.get("skips") or (0, 0, 0))
        self._skips, self._uncounted = (total, in_a_row, longest), ()

    def _optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        for name in self._optimizer_names:
            optimizer = getattr(self, name)
            if optimizer is not None:
                yield name, optimizer

    def _count(self, taken: Tensor) -> None:
        """Count an update, as left out unless a 0-d flag is true."""
        self._uncounted = (*self._uncounted, taken.reshape(1))
        if len(self._uncounted) >= _FLAGS_KEPT:
            self._uncounted = (torch.cat(self._uncounted),)

    def _tally(self) -> tuple[int, int, int]:
        total, in_a_row, longest = self._skips
        for taken in torch.cat(self._uncounted).tolist() if self._uncounted else ():
            in_a_row = 0 if taken else in_a_row + 1
            total += not taken
            longest = max(longest, in_a_row)
        self._skips, self._uncounted = (total, in_a_row, longest), ()
        return self._skips

    def _refuse_distributed(self, trainer: Any) -> None:
        if getattr(trainer, "_ddp_loss", None) is not None:
            raise NotImplementedError(
                f"{type(self).__name__} evaluates the phases of the loss one by one, which a "
                "distributed learner backend cannot synchronise. Use the local backend."
            )

    def _refuse_unreduced(self, loss: LossModule) -> None:
        if loss.reduction == "none":
            raise ValueError(
                f"{type(self).__name__} needs a loss with reduction 'mean' or 'sum', got 'none'."
            )


def backward(loss: Tensor, optimizer: Optimizer, max_norm: float | None = None) -> Tensor:
    """Gradients of an optimiser's parameters, clipped by their joint norm.

    Args:
        loss (Tensor): the loss, 0-d.
        optimizer (Optimizer): has the parameters.
        max_norm (float, optional): largest norm.

    Returns:
        Whether the loss and all gradients are finite, 0-d.
    """
    optimizer.zero_grad()
    loss.backward()
    parameters = _parameters(optimizer)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return (norm + loss.detach()).isfinite()


def step_if(taken: Tensor, optimizer: Any, *, lr_scale: float = 1.0) -> None:
    """One optimiser step, if a 0-d flag is true.

    Args:
        taken (Tensor): the flag.
        optimizer (Optimizer): has parameters with gradients.

    Keyword Args:
        lr_scale (float): factor on the learning rates. Defaults to ``1``.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if not fused and not taken:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    if lr_scale != 1:
        # For this step only, so that schedulers and checkpoints see the nominal rates.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * lr_scale
    if fused:  # what gradient scalers use: the flag is read on the device
        optimizer.found_inf = (~taken).float()
    optimizer.step()
    if fused:
        del optimizer.found_inf
    if lr_scale != 1:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class Undo:
    """Takes back what happens to some parameters and optimisers, for those of few numbers.

    Args:
        *optimizers (Optimizer): whose parameters and state to remember; ``None`` is none.
        parameters (iterable of Tensor): further parameters.
    """

    def __init__(self, *optimizers: Optimizer | None, parameters: Iterable[Tensor] = ()) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if optimizer is not None]
        self._parameters = list(parameters)
        self._before = {id(tensor): tensor.detach().clone() for tensor in self._tensors()}

    @torch.no_grad()
    def unless(self, kept: Tensor) -> None:
        """Take everything back unless a 0-d flag is true."""
        for tensor in self._tensors():
            # An optimiser's state begins with zeros at its first step.
            before = self._before.get(id(tensor), tensor.new_zeros(()))
            tensor.copy_(torch.where(kept, tensor, before))

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._parameters
        for optimizer in self._optimizers:
            for parameter in _parameters(optimizer):
                yield parameter
                state = optimizer.state.get(parameter, {})
                yield from (value for value in state.values() if isinstance(value, Tensor))


def dual_tensors(loss: LossModule) -> list[Tensor]:
    """The dual variables of a loss, those that are solved for as well as the learned ones."""
    return [module.raw for module in loss.modules() if isinstance(module, DualVariable)]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
