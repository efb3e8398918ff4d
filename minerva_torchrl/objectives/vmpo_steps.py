"""The tensors that pass between the phases of a V-MPO update."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch import distributions as D

__all__ = ["VMPOEStep", "VMPOMStep"]


class VMPOEStep(NamedTuple):
    """The weighted samples of a batch; fixed while policy and critic take their steps."""

    weights: Tensor
    """Weights of the samples, ``[*B]``, summing to one."""
    selected: Tensor
    """Which samples are among the best, ``[*B]``."""
    mask: Tensor
    """Which samples are valid, ``[*B]``."""
    num_valid: Tensor
    """How many are, 0-d, at least one."""
    kl_weights: Tensor
    """Weights of the samples in the mean divergences, ``[*B]``, summing to one."""
    old_policy: tuple[Tensor, ...]
    """Parameters of the old policy: mean and standard deviation, or logits."""
    temperature_loss: Tensor
    """Dual loss of the temperature, 0-d, differentiable."""
    metrics: dict[str, Tensor]
    """Diagnostics of advantages and weights, 0-d."""

    def take(self, rows: Tensor | slice) -> VMPOEStep:
        """Some samples of the flattened batch.

        Their weights and ``num_valid`` stay those of the whole batch, so that the loss of a random
        part has the loss of the whole as its expectation.

        Args:
            rows (Tensor or slice): which samples, as indices into ``B`` made one-dimensional.
        """
        return self._replace(
            weights=self.weights.flatten()[rows],
            selected=self.selected.flatten()[rows],
            mask=self.mask.flatten()[rows],
            kl_weights=self.kl_weights.flatten()[rows],
            old_policy=tuple(x.flatten(0, -2)[rows] for x in self.old_policy),
        )


class VMPOMStep(NamedTuple):
    """What the online policy says about the samples; differentiable."""

    neg_log_prob: Tensor
    """Negative log-likelihood of the stored actions, ``[*B]``."""
    divergences: dict[str, Tensor]
    """KL divergence for each constraint by its name, ``[*B, D]`` or ``[*B, 1]``."""
    dist: D.Distribution
    """The online policy itself."""
