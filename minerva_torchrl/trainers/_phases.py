"""What the optimisation steppers share: optimiser steps that leave out what is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl.objectives.common import LossModule
from torchrl.trainers.trainers import OptimizationStepper

__all__ = ["NonFiniteError", "PhasedStepper", "descend"]


class NonFiniteError(RuntimeError):
    """Too many batches in a row had a loss, a gradient or data that is not finite."""


class PhasedStepper(OptimizationStepper):
    """A stepper that takes the phases of a loss one by one, with several optimisers.

    An update whose losses or gradients are not finite changes neither parameters nor optimisers. It
    is counted on the device, so that nothing waits for it: with a fused optimiser
    (``torch.optim.Adam(..., fused=True)``) the step is left out on the device as well, with any
    other one the decision is made on the host.
    """

    _optimizer_names: tuple[str, ...]
    _skips: Tensor | None = None  # updates skipped: in all, in a row until now, most in a row

    @property
    def skipped_updates(self) -> int:
        """Updates left out so far because something was not finite. Waits for the device."""
        return 0 if self._skips is None else int(self._skips[0])

    def check_finite(self, limit: int) -> None:
        """Raise :class:`NonFiniteError` if ``limit`` updates in a row were left out.

        Reads the counters, which waits for the device: once per collected batch is enough.

        Args:
            limit (int): number of updates in a row.
        """
        if self._skips is not None and int(self._skips[2]) >= limit:
            raise NonFiniteError(
                f"{int(self._skips[2])} updates in a row had losses or gradients that are not "
                f"finite ({int(self._skips[0])} in all; the limit is {limit})."
            )

    def state_dict(self) -> dict[str, Any]:
        """State of the optimisers, and the counters of updates left out."""
        state: dict[str, Any] = {name: opt.state_dict() for name, opt in self._optimizers()}
        state["skips"] = None if self._skips is None else self._skips.clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for name, optimizer in self._optimizers():
            optimizer.load_state_dict(state_dict[name])
        skips = state_dict.get("skips")
        self._skips = None if skips is None else skips.clone()

    def _optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        for name in self._optimizer_names:
            optimizer = getattr(self, name)
            if optimizer is not None:
                yield name, optimizer

    def _count(self, *finite: Tensor) -> None:
        """Count the update as left out unless all flags are true."""
        left_out = ~torch.stack(finite).all()
        if self._skips is None:
            self._skips = torch.zeros(3, dtype=torch.int64)
        total, in_a_row, longest = self._skips.to(left_out.device).unbind()
        in_a_row = (in_a_row + 1) * left_out
        self._skips = torch.stack([total + left_out, in_a_row, longest.maximum(in_a_row)])

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


def descend(
    loss: Tensor,
    optimizer: Optimizer,
    max_norm: float | None = None,
    *,
    lr_scale: float = 1.0,
    unless: Tensor | None = None,
) -> Tensor:
    """One optimiser step on a loss, with clipping by the joint norm of its gradients.

    Args:
        loss (Tensor): the loss.
        optimizer (Optimizer): steps if the norm of all gradients of its parameters is finite.
        max_norm (float, optional): largest norm.

    Keyword Args:
        lr_scale (float): factor on the learning rates. Defaults to ``1``.
        unless (Tensor, optional): a 0-d flag; if it is true, no step is taken.

    Returns:
        Whether the step was taken, 0-d.
    """
    optimizer.zero_grad()
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    taken = norm.isfinite() if unless is None else norm.isfinite() & ~unless
    # Scaled for this step only, so that schedulers and checkpoints see the nominal rates.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * lr_scale
    _step_if(taken, optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return taken


def _step_if(taken: Tensor, optimizer: Any) -> None:
    if all(group.get("fused") for group in optimizer.param_groups):
        # What gradient scalers use: a fused optimiser reads the flag on the device.
        optimizer.found_inf = (~taken).float()
        optimizer.step()
        del optimizer.found_inf
    elif taken:
        optimizer.step()
