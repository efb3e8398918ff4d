"""What the losses ask of a policy, whatever its distribution.

Notation: ``*B`` state dimensions, ``N`` candidates, ``D`` action dimensions, ``A`` actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor, nn
from torch import distributions as D

__all__ = ["Candidates", "PolicyFamily", "leaf_distribution", "unsupported"]

_GAUSSIANS = "IndependentNormal, torch.distributions.Independent(Normal) or TanhNormal"


class Candidates(NamedTuple):
    """Actions that the E-step weighs."""

    action: Any
    """The actions as the data has them, ``[N, *B, D]``, ``[N, *B, A]`` or ``[N, *B]``, or a
    TensorDict ``[N, *B]`` of parts."""
    basis: dict[str, Any]
    """What :meth:`PolicyFamily.statistics` needs of them, ``[*B, N, ...]`` each."""
    log_prior: Tensor | None = None
    """Their log-probabilities ``[*B, N]`` if they are all actions there are, not samples."""


class PolicyFamily(nn.Module, ABC):
    """What the losses ask of a policy.

    A policy is described by a TensorDict ``[*B]`` of the parameters of its distribution, from
    :meth:`describe`.
    """

    @property
    @abstractmethod
    def constraints(self) -> tuple[str, ...]:
        """Names of the divergences, one constraint each."""

    @property
    def enumerates(self) -> bool:
        """Whether candidates are all actions there are, so that a critic may value all at once."""
        return False

    @property
    def constraint_shape(self) -> tuple[int, ...]:
        """Shape of a constraint's multiplier."""
        return ()

    def constraint_kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """By constraint, what is constrained, as in the name of the bound, and its shape."""
        return {name: (name, self.constraint_shape) for name in self.constraints}

    @abstractmethod
    def describe(self, dist: D.Distribution) -> TensorDict:
        """Parameters of a distribution, ``[*B]``."""

    @abstractmethod
    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        """Sampled actions, or all actions where they can be enumerated."""

    def samples(self, dist: D.Distribution, num_samples: int) -> Candidates:
        """Sampled actions, also where all could be enumerated."""
        return self.candidates(dist, num_samples)

    @abstractmethod
    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """What :meth:`cross_entropy` needs of candidates with weights ``[*B, N]``: ``[*B]``."""

    @abstractmethod
    def expected_statistics(self, old: TensorDictBase) -> TensorDict:
        """The expectation of :meth:`statistics` for samples of ``old`` whose weights sum to one.

        The weights are those of samples that nothing prefers: equal ones.
        """

    def steady_statistics(
        self, basis: Mapping[str, Any], weights: Tensor, old: TensorDictBase
    ) -> TensorDict:
        r"""As :meth:`statistics`, with less noise and the same expectation.

        Statistics are sums of some :math:`x_i`. For equally weighted samples their expectation is
        known, and so is the error of a draw, which is taken out as a control variate:

        .. math::
            \sum_i w_i x_i - m_0 \Big(\frac1N \sum_i x_i - E[x]\Big)
            = \sum_i \Big(w_i - \frac{m_0}{N}\Big) x_i + m_0 E[x], \qquad m_0 = \sum_i w_i

        Where all weights are equal no noise is left.
        """
        # eq: control-variate
        total, mean = weights.sum(-1), weights.mean(-1, keepdim=True)
        deviation = self.statistics(basis, weights - mean)

        def add(x: Tensor, expected: Tensor) -> Tensor:
            return x + total.reshape(*total.shape, *[1] * (x.ndim - total.ndim)) * expected

        return deviation.apply(add, self.expected_statistics(old))

    @abstractmethod
    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        """Weighted negative log-likelihood of the old policy's candidates, ``[*B]``."""

    def log_prob(self, dist: D.Distribution, action: Any) -> Tensor:
        """Log-likelihood of stored actions, ``[*B]``."""
        return leaf_distribution(dist).log_prob(action)

    @abstractmethod
    def divergences(self, new: TensorDictBase, old: TensorDictBase) -> dict[str, Tensor]:
        """KL divergence of the old policy from the new one by constraint, ``[*B, D or 1]``."""

    @abstractmethod
    def metrics(self, dist: D.Distribution, mask: Tensor | None) -> dict[str, Tensor]:
        """Diagnostics of a policy over the states where ``mask`` ``[*B]`` holds, 0-d."""

    @property
    @abstractmethod
    def metric_keys(self) -> tuple[str, ...]:
        """Names that :meth:`metrics` returns."""

    @abstractmethod
    def check_action(self, name: NestedKey, action: Any, batch_size: torch.Size) -> None:
        """Raise unless actions have the shape and type that the family scores."""

    def check_parameters(self, name: object, policy: TensorDictBase) -> None:
        """Raise if the parameters of a stored policy are degenerate. Waits for the device."""

    def where_valid(self, policy: TensorDictBase, valid: Tensor) -> TensorDictBase:
        """A stored policy ``[*B]`` with some policy where ``valid`` ``[*B]`` does not hold.

        What is stored there may be anything; ones are parameters of most distributions.
        """

        def blank(x: Tensor) -> Tensor:
            features = [1] * (x.ndim - valid.ndim)
            return torch.where(valid.reshape(*valid.shape, *features), x, 1.0)

        return policy.apply(blank)

    def clip(self, action: Any) -> Any:
        """Actions as the environment carries them out: the critic sees these."""
        return action

    @property
    def leaves_bounds(self) -> bool:
        """Whether there are bounds that actions can be outside of."""
        return False

    def bounds_cost(self, action: Any) -> Tensor:
        """How far actions ``[..., D]`` are outside their bounds, ``[...]``, zero or negative."""
        raise NotImplementedError(f"actions of a {type(self).__name__} have no bounds.")


def leaf_distribution(dist: D.Distribution) -> Any:
    """The distribution itself, or the only one inside a ``CompositeDistribution``.

    Args:
        dist (Distribution): of a policy with one action.

    Returns:
        The distribution of the action.

    Examples:
        >>> normal = D.Normal(torch.zeros(2), torch.ones(2))
        >>> leaf_distribution(normal) is normal
        True
    """
    if isinstance(dist, CompositeDistribution):
        (dist,) = dist.dists.values()
    return dist


def unsupported(distribution: type) -> str:
    """The message for a distribution without a family."""
    return (
        f"the policy's distribution must be a diagonal Gaussian ({_GAUSSIANS}), "
        "MultivariateNormal, Categorical or OneHotCategorical (also masked), or a "
        f"CompositeDistribution of these, got {distribution.__name__}. For actions with bounds use "
        "IndependentNormal, where the environment clips the action, or TanhNormal, which stays "
        "inside."
    )
