"""Positive dual variables: temperatures and Lagrange multipliers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minerva_torchrl.objectives.functional import solve_temperature

__all__ = ["DualVariable"]

# Keeps the value strictly positive whatever an optimiser does to the raw parameter.
_OFFSET = 1e-8


def _raw_from_value(value: float) -> float:
    """Inverse of ``value = softplus(raw) + _OFFSET``."""
    value = value - _OFFSET
    return value + math.log(-math.expm1(-value))


class DualVariable(nn.Module):
    r"""A positive variable learned by gradient descent.

    .. math:: x = \mathrm{softplus}(raw) + 10^{-8}

    Values go in and come out in real units: ``DualVariable(1000.0)`` is a multiplier of 1000. After
    each optimiser step :meth:`project_` puts the stored parameter back above a floor. Clamping it
    in the forward pass instead would leave a variable that has crossed the floor without gradient.

    Args:
        init (float): initial value, positive and finite.
        shape (tuple of int): shape of the variable: ``()`` for a temperature, ``(D,)`` for a
            multiplier per dimension. Defaults to ``()``.

    Keyword Args:
        floor (float): smallest value that :meth:`project_` keeps. Defaults to ``2.5e-8``, which is
            a raw parameter of -18.
        learnable (bool): whether the parameter takes gradients. Switch it off for a variable that
            is set by :meth:`solve_`. Defaults to ``True``.

    Examples:
        >>> alpha = DualVariable(10.0, (3,))
        >>> alpha()
        tensor([10., 10., 10.], grad_fn=<AddBackward0>)
        >>> optimizer = torch.optim.Adam(alpha.parameters(), lr=1e-2)
        >>> alpha().sum().backward()
        >>> optimizer.step()
        >>> alpha.project_()
    """

    def __init__(
        self,
        init: float,
        shape: tuple[int, ...] = (),
        *,
        floor: float = 2.5e-8,
        learnable: bool = True,
    ) -> None:
        super().__init__()
        if not floor > _OFFSET:
            raise ValueError(f"floor must be greater than {_OFFSET}, got {floor}.")
        if not (math.isfinite(init) and init >= floor):
            raise ValueError(f"init must be finite and at least the floor ({floor}), got {init}.")
        self.init = float(init)
        self.floor = float(floor)
        self.raw = nn.Parameter(torch.empty(shape), requires_grad=learnable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the variable back to its initial value."""
        with torch.no_grad():
            self.raw.fill_(_raw_from_value(self.init))

    def forward(self) -> Tensor:
        """The value in real units, differentiable."""
        return nn.functional.softplus(self.raw) + _OFFSET

    @torch.no_grad()
    def project_(self) -> None:
        """Put the parameter back above the floor. Call it after each optimiser step."""
        self.raw.clamp_(min=_raw_from_value(self.floor))

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Set the value, in real units: at least the floor, and left as it is if not finite."""
        x = value.clamp_min(self.floor) - _OFFSET
        raw = x + (-torch.expm1(-x)).log()
        self.raw.copy_(torch.where(raw.isfinite(), raw, self.raw))

    def solve_(
        self,
        value: Tensor,
        epsilon: Tensor | float,
        *,
        sample_dim: int = 0,
        log_prior: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Set a scalar temperature to the minimum of its dual on the given values.

        The arguments are those of
        :func:`~minerva_torchrl.objectives.functional.solve_temperature`.

        Returns:
            The new value, 0-d.
        """
        if self.raw.ndim:
            raise ValueError(
                f"solve_ needs a scalar variable, but this one has shape {tuple(self.raw.shape)}."
            )
        self.set_(
            solve_temperature(
                value,
                epsilon,
                sample_dim=sample_dim,
                log_prior=log_prior,
                mask=mask,
                floor=self.floor,
            )
        )
        return self().detach()

    def extra_repr(self) -> str:
        """Initial value, shape and floor."""
        return f"init={self.init:g}, shape={tuple(self.raw.shape)}, floor={self.floor:g}"
