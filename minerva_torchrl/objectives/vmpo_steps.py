"""The tensors that pass between the phases of a V-MPO update."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["VMPOEStep", "VMPOMStep"]


class VMPOEStep(NamedTuple):
    """The weighted samples of a batch; fixed while policy and critic take their steps."""

    weights: Tensor
    """Weights of the samples, ``[*B]``, summing to one."""
    selected: Tensor
    """Which samples are among the best, ``[*B]``."""
    mask: Tensor
    """Which samples are valid, ``[*B]``."""
    old_policy: tuple[Tensor, ...]
    """Parameters of the old policy: mean and standard deviation, or logits."""
    temperature_loss: Tensor
    """Dual loss of the temperature, 0-d, differentiable."""
    metrics: dict[str, Tensor]
    """Diagnostics of advantages and weights, 0-d."""


class VMPOMStep(NamedTuple):
    """What the online policy says about the samples; differentiable."""

    neg_log_prob: Tensor
    """Negative log-likelihood of the stored actions, ``[*B]``."""
    divergences: dict[str, Tensor]
    """KL divergence for each constraint by its name, ``[*B, D]`` or ``[*B, 1]``."""
    metrics: dict[str, Tensor]
    """Diagnostics of the policy, 0-d."""
