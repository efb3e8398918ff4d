"""Atoms and bins that a critic's probabilities are about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minerva_torchrl.objectives.checks import check_count

__all__ = ["OnSupport", "Support"]

# More than this share of targets outside of a support, and it grows if it may.
_CLIPPED = 0.01


class Support(nn.Module):
    r"""Increasing atoms :math:`z_k = low + (high - low) u_k`, fixed or wide enough for the targets.

    An adaptive support doubles its range, on the side where they are, when more than one per cent
    of a batch's targets lie outside of it.

    Args:
        v_min (float): the first atom.
        v_max (float): the last atom.
        num_atoms (int): how many there are, evenly spaced.

    Keyword Args:
        atoms (sequence of float, optional): the atoms themselves instead.
        adaptive (bool): whether the range grows. Defaults to ``False``.

    Examples:
        >>> Support(-1.0, 1.0, 3)()
        tensor([-1.,  0.,  1.])
    """

    low: Tensor
    high: Tensor
    unit: Tensor
    clipped: Tensor

    def __init__(
        self,
        v_min: float,
        v_max: float,
        num_atoms: int,
        *,
        atoms: Sequence[float] | Tensor | None = None,
        adaptive: bool = False,
    ) -> None:
        super().__init__()
        if atoms is not None:
            given = torch.as_tensor(atoms, dtype=torch.float64).flatten()
            if len(given) < 2:
                raise ValueError(f"support must have at least two atoms, got {len(given)}.")
            if not (given.isfinite().all() and (given.diff() > 0).all()):
                raise ValueError(f"support must be finite and increasing, got {given.tolist()}.")
        else:
            check_count("num_atoms", num_atoms)
            if num_atoms < 2:
                raise ValueError(f"num_atoms must be at least 2, got {num_atoms}.")
            if not (math.isfinite(v_min) and math.isfinite(v_max) and v_min < v_max):
                raise ValueError(
                    f"v_min must be less than v_max, both finite, got {v_min} and {v_max}."
                )
            given = torch.linspace(v_min, v_max, num_atoms, dtype=torch.float64)
        self.num_atoms = len(given)
        self.adaptive = adaptive
        dtype = torch.get_default_dtype()
        unit = (given - given[0]) / (given[-1] - given[0])
        self.register_buffer("low", given[0].to(dtype))
        self.register_buffer("high", given[-1].to(dtype))
        self.register_buffer("unit", unit.to(dtype), persistent=False)
        self.register_buffer("clipped", torch.zeros((), dtype=dtype), persistent=False)

    def forward(self) -> Tensor:
        """The atoms, ``[K]``."""
        # eq: support
        return self.low + (self.high - self.low) * self.unit

    @torch.no_grad()
    def observe(self, values: Tensor, probs: Tensor) -> None:
        """Note the share of targets outside, and grow if the support is adaptive.

        Args:
            values (Tensor): where targets have mass, ``[*B, M]``.
            probs (Tensor): the mass, ``[*B, M]``.
        """
        width = self.high - self.low
        rounding = 1e-5 * width  # an atom that is mapped to itself
        total = probs.sum().clamp_min(torch.finfo(probs.dtype).tiny)
        above = torch.where(values > self.high + rounding, probs, 0.0).sum() / total
        below = torch.where(values < self.low - rounding, probs, 0.0).sum() / total
        self.clipped.copy_(above + below)
        if self.adaptive:
            self.high.add_(torch.where(above > _CLIPPED, width, 0.0))
            self.low.sub_(torch.where(below > _CLIPPED, width, 0.0))


class OnSupport:
    """What critics have in common whose probabilities are those of a support."""

    support: Support
    metric_keys: tuple[str, ...] = ("clipped_targets",)

    def metrics(self) -> dict[str, Tensor]:
        """Share of targets outside of the support; above 0.01 it should be wider."""
        return {"clipped_targets": self.support.clipped.clone()}
