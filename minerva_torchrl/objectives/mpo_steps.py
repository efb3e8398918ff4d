"""The tensors that pass between the phases of an MPO update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from minerva_torchrl.objectives.functional import GaussianMoments

__all__ = ["MPOEStep", "MPOMStep", "Samples"]


class MPOEStep(NamedTuple):
    """What the target networks say about a batch; fixed while the policy takes its steps.

    ``*S`` are the states of the policy loss: ``[*B]``, or ``[2, *B]`` for both kinds of states.
    """

    next_value: Tensor
    """Expected target value of the next states, ``[*B, 1]``."""
    inputs: TensorDictBase
    """Inputs of the actor at the states of the policy loss, ``[*S]``."""
    loc: Tensor
    """Means of the target policy, ``[*S, D]``."""
    scale: Tensor
    """Standard deviations of the target policy, ``[*S, D]``."""
    moments: GaussianMoments
    """Weighted moments of the samples."""
    mask: Tensor | None
    """States that count, ``[*S]``."""
    priority_weight: Tensor | None
    """Importance weights of prioritised replay, ``[*S]``."""
    temperature_loss: Tensor
    """Dual loss of the temperature for each state, ``[*S]``, differentiable."""
    penalty_temperature_loss: Tensor | None
    """The same for the action penalty."""
    metrics: dict[str, Tensor]
    """Diagnostics of the values and the weights, 0-d."""


class MPOMStep(NamedTuple):
    """What the online policy says about the E-step; differentiable."""

    cross_entropy: Tensor
    """Weighted negative log-likelihood of the samples, ``[*S]``."""
    kl_mean: Tensor
    """KL divergence of the moved mean, ``[*S, D]`` (``[*S, 1]`` if constrained jointly)."""
    kl_stddev: Tensor
    """KL divergence of the moved standard deviation, of the same shape."""
    scale: Tensor
    """Standard deviations of the online policy, ``[*S, D]``, detached."""


class Samples(NamedTuple):
    """Actions sampled from the target policy and their target values."""

    inputs: TensorDictBase
    loc: Tensor
    scale: Tensor
    noise: Tensor
    q_value: Tensor
    cost: Tensor | None

    def first_step(self, time_dim: int) -> Samples:
        """Keep the first step of every sequence."""
        cost = None if self.cost is None else self.cost.select(time_dim + 1, 0)
        return Samples(
            self.inputs[(slice(None),) * time_dim + (0,)],
            self.loc.select(time_dim, 0),
            self.scale.select(time_dim, 0),
            self.noise.select(time_dim + 1, 0),
            self.q_value.select(time_dim + 1, 0),
            cost,
        )

    @staticmethod
    def stack(*parts: Samples) -> Samples:
        """Put the samples of several sets of states together, along a new first state dimension."""
        inputs, loc, scale, noise, q_value, cost = zip(*parts, strict=True)
        batch_size = [len(parts), *inputs[0].shape]
        return Samples(
            inputs[0].apply(lambda *x: torch.stack(x), *inputs[1:], batch_size=batch_size),
            torch.stack(loc, 0),
            torch.stack(scale, 0),
            torch.stack(noise, 1),
            torch.stack(q_value, 1),
            None if cost[0] is None else torch.stack(cost, 1),
        )
