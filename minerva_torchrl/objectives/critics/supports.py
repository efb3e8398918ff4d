"""Atoms and bins that a critic's probabilities are about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minerva_torchrl.objectives.checks import check_count

__all__ = ["OnSupport", "Support", "default_ends"]

# More than this share of targets outside of a support, and it grows if it may.
_CLIPPED = 0.01
# By this part of its width in an update, if all targets are outside.
_GROWTH = 0.1
# Ends of a support without given ones.
_FIXED_END, _ADAPTIVE_END = 150.0, 1.0


def default_ends(
    v_min: float | None, v_max: float | None, *, adaptive: bool
) -> tuple[float, float]:
    """Ends of a support, -150 and 150 where none are given, or -1 and 1 if it adapts.

    Args:
        v_min (float, optional): the lower end.
        v_max (float, optional): the upper end.

    Keyword Args:
        adaptive (bool): whether the support grows.

    Examples:
        >>> default_ends(None, 100.0, adaptive=False)
        (-150.0, 100.0)
    """
    end = _ADAPTIVE_END if adaptive else _FIXED_END
    return -end if v_min is None else v_min, end if v_max is None else v_max


class Support(nn.Module):
    r"""Increasing atoms :math:`z_k = low + (high - low) u_k`, fixed or wide enough for the targets.

    An adaptive support begins narrow and grows on the side where more than one per cent of a
    batch's targets lie outside of it, with :math:`f` their share:

    .. math::
        high \leftarrow high + 0.1 \max(0, f - 0.01) \, (high - low)

    What a critic has learned is stretched with its atoms. That is why the support grows the more
    slowly, the fewer targets are outside: the critic learns at the same time.

    Args:
        v_min (float, optional): the first atom. Default: -150, or -1 if the support is adaptive.
        v_max (float, optional): the last atom. Default: 150, or 1 if the support is adaptive.
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
        v_min: float | None,
        v_max: float | None,
        num_atoms: int,
        *,
        atoms: Sequence[float] | Tensor | None = None,
        adaptive: bool = False,
    ) -> None:
        super().__init__()
        v_min, v_max = default_ends(v_min, v_max, adaptive=adaptive)
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
            values (Tensor): where targets have mass, ``[*B, M]``; NaN where there is no target.
            probs (Tensor): the mass, ``[*B, M]``.
        """
        probs = torch.where(values.isnan(), 0.0, probs)
        width = self.high - self.low
        rounding = 1e-5 * width  # an atom that is mapped to itself
        total = probs.sum().clamp_min(torch.finfo(probs.dtype).tiny)
        above = torch.where(values > self.high + rounding, probs, 0.0).sum() / total
        below = torch.where(values < self.low - rounding, probs, 0.0).sum() / total
        self.clipped.copy_(above + below)
        if self.adaptive:
            # eq: adaptive-support
            self.high.add_(_GROWTH * (above - _CLIPPED).clamp_min(0) * width)
            self.low.sub_(_GROWTH * (below - _CLIPPED).clamp_min(0) * width)


class OnSupport:
    """What critics have in common whose probabilities are those of a support."""

    support: Support
    metric_keys: tuple[str, ...] = ("clipped_targets",)

    def metrics(self) -> dict[str, Tensor]:
        """Share of targets outside of the support; above 0.01 it should be wider."""
        return {"clipped_targets": self.support.clipped.clone()}
