"""Gaussian policies: diagonal, behind a tanh, and with a full covariance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch import distributions as D
from torchrl.data.tensor_specs import TensorSpec
from torchrl.modules import TanhNormal

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.policies.family import (
    Candidates,
    PolicyFamily,
    leaf_distribution,
    unsupported,
)
from minerva_torchrl.objectives.reductions import masked_extreme, masked_means
from minerva_torchrl.objectives.specs import action_bounds

__all__ = ["DiagonalGaussian", "FullGaussian", "TanhGaussian"]

# Share of the way to its bound from which a deterministic action counts as saturated.
_SATURATED = 0.99


class _Gaussian(PolicyFamily):
    """A Gaussian over raw actions, which the environment clips to their bounds."""

    low: Tensor | None
    high: Tensor | None

    def __init__(self, action_spec: TensorSpec | None = None) -> None:
        super().__init__()
        sized = action_spec is not None and len(action_spec.shape) > 0
        self.action_dim = action_spec.shape[-1] if action_spec is not None and sized else None
        low, high = action_bounds(action_spec) or (None, None)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    @abstractmethod
    def _stddev(self, policy: TensorDictBase) -> Tensor:
        """Standard deviations of the dimensions, ``[*B, D]``."""

    @abstractmethod
    def _entropy(self, policy: TensorDictBase) -> Tensor:
        """Entropy before any tanh, ``[*B]``."""

    def _draw_noise(self, num_samples: int, like: Tensor) -> Tensor:
        """Standard-normal draws, ``[N, *B, D]``."""
        return torch.randn(num_samples, *like.shape, dtype=like.dtype, device=like.device)

    def _from_raw(self, dist: Any, raw_action: Tensor) -> Tensor:
        return raw_action

    def log_prob(self, dist: D.Distribution, action: Tensor) -> Tensor:
        """Log-likelihood of raw actions ``[*B, D]``, ``[*B]``."""
        shape = self.describe(dist).get("loc").shape
        if action.shape != shape:
            raise ValueError(
                f"the action must have the shape of the policy's mean, {tuple(shape)}, "
                f"got {tuple(action.shape)}."
            )
        return super().log_prob(dist, action)

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """With bounds also how many deterministic actions are outside them, or close to them."""
        keys = ("entropy", "stddev_min", "stddev_max", "mean_abs_action")
        return keys if self.low is None else (*keys, "out_of_bounds", "saturation")

    def metrics(self, dist: D.Distribution, mask: Tensor | None) -> dict[str, Tensor]:
        """Entropy, standard deviations, and size of the deterministic action."""
        policy = self.describe(dist)
        loc, stddev = policy.get("loc"), self._stddev(policy)
        action = self._from_raw(leaf_distribution(dist), loc)
        means = {
            "entropy": self._entropy(policy),
            "mean_abs_action": action.abs().mean(-1),
        }
        if self.low is not None and self.high is not None:
            low, high = self.low.to(action), self.high.to(action)
            margin = (1 - _SATURATED) * (high - low) / 2
            margin = torch.where(margin.isinf(), 0.0, margin)
            at_bound = (action <= low + margin) | (action >= high - margin)
            means["out_of_bounds"] = (action != action.clamp(low, high)).to(loc.dtype).mean(-1)
            means["saturation"] = at_bound.to(loc.dtype).mean(-1)
        return {
            **masked_means(means, mask),
            "stddev_min": masked_extreme(stddev, mask, "min"),
            "stddev_max": masked_extreme(stddev, mask, "max"),
        }

    def check_action(self, name: NestedKey, action: Tensor, batch_size: torch.Size) -> None:
        """Floating-point ``[*B, D]``."""
        if action.ndim != len(batch_size) + 1 or not action.is_floating_point():
            raise ValueError(
                f"{name!r} must be a floating-point tensor of shape {(*batch_size, 'D')}, "
                f"got {action.dtype} {tuple(action.shape)}."
            )
        if self.action_dim is not None and action.shape[-1] != self.action_dim:
            raise ValueError(
                f"{name!r} must have {self.action_dim} dimensions as in action_spec, "
                f"got {action.shape[-1]}."
            )

    def check_parameters(self, name: object, policy: TensorDictBase) -> None:
        """Finite, with positive standard deviations."""
        loc, scale = policy.get("loc"), self._stddev(policy)
        if not (loc.isfinite().all() and scale.isfinite().all() and (scale > 0).all()):
            raise ValueError(
                f"The old policy's {name} must be finite with positive standard deviations, got "
                f"standard deviations from {scale.min().item()} to {scale.max().item()}. All zeros "
                "are what collectors write for frames drawn without the policy "
                "(init_random_frames)."
            )

    def clip(self, action: Tensor) -> Tensor:
        """Within the bounds, if there are any."""
        if self.low is None or self.high is None:
            return action
        return action.clamp(self.low.to(action), self.high.to(action))

    @property
    def leaves_bounds(self) -> bool:
        """Whether there are bounds."""
        return self.low is not None

    def bounds_cost(self, action: Tensor) -> Tensor:
        """See :func:`~minerva_torchrl.objectives.functional.out_of_bounds_cost`."""
        assert self.low is not None
        assert self.high is not None
        return F.out_of_bounds_cost(action, self.low.to(action), self.high.to(action))


class DiagonalGaussian(_Gaussian):
    r"""Independent normal distributions over raw actions, which the environment clips.

    Constraints ``mean`` and ``stddev``: the mean is fitted with the old standard deviations, the
    standard deviations with the old mean (https://arxiv.org/abs/1812.02256).

    Args:
        action_spec (TensorSpec, optional): has the action's size and bounds.

    Keyword Args:
        per_dim (bool): constrain each action dimension by itself, not their sum. It needs
            ``action_spec``. Defaults to ``False``.

    Examples:
        >>> from torchrl.modules import IndependentNormal
        >>> family = DiagonalGaussian()
        >>> old = family.describe(IndependentNormal(torch.zeros(4, 2), torch.ones(4, 2)))
        >>> new = family.describe(IndependentNormal(torch.ones(4, 2), torch.ones(4, 2)))
        >>> {name: kl[0] for name, kl in family.divergences(new, old).items()}
        {'mean': tensor([1.]), 'stddev': tensor([0.])}
    """

    constraints = ("mean", "stddev")

    def __init__(self, action_spec: TensorSpec | None = None, *, per_dim: bool = False) -> None:
        super().__init__(action_spec)
        self.per_dim = per_dim
        if per_dim and self.action_dim is None:
            raise ValueError(
                "per_dim_constraining=True needs the size of the action: pass action_spec=, or "
                "build the actor with its spec, or set per_dim_constraining=False. "
                f"Got action_spec={action_spec!r}."
            )

    @property
    def constraint_shape(self) -> tuple[int, ...]:
        """``(D,)`` or ``()``."""
        return (self.action_dim,) if self.per_dim and self.action_dim is not None else ()

    def describe(self, dist: D.Distribution) -> TensorDict:
        """Mean ``loc`` and standard deviation ``scale`` over raw actions, ``[*B, D]``."""
        dist = leaf_distribution(dist)
        normal = dist.base_dist if isinstance(dist, D.Independent) else dist
        if not isinstance(normal, (D.Normal, TanhNormal)):
            raise NotImplementedError(unsupported(type(dist)))
        return TensorDict(
            {"loc": normal.loc, "scale": normal.scale}, batch_size=normal.loc.shape[:-1]
        )

    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        r"""Samples :math:`a = \mu + \sigma z` with their draws ``z``."""
        policy = self.describe(dist)
        loc, scale = policy.get("loc"), policy.get("scale")
        # eq: gaussian-candidates
        noise = self._draw_noise(num_samples, loc)
        raw_action = loc + scale * noise
        return Candidates(
            self._from_raw(leaf_distribution(dist), raw_action),
            {"noise": noise.movedim(0, -2)},
        )

    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """Weighted moments of the draws."""
        moments = F.weighted_moments(basis["noise"].movedim(-2, 0), weights.movedim(-1, 0))
        return TensorDict(moments._asdict(), batch_size=weights.shape[:-1])

    def expected_statistics(self, old: TensorDictBase) -> TensorDict:
        """Moments 1, 0 and 1 of the draws."""
        zeros = torch.zeros_like(old.get("loc"))
        moments = F.GaussianMoments(zeros[..., :1] + 1, zeros, zeros + 1)
        return TensorDict(moments._asdict(), batch_size=old.batch_size)

    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        """That of the new mean with the old scale, plus that of the new scale with the old mean."""
        moments = F.GaussianMoments(*(statistics.get(name) for name in F.GaussianMoments._fields))
        loc, scale = new.get("loc"), new.get("scale")
        old_loc, old_scale = old.get("loc"), old.get("scale")
        # eq: decoupled-fit
        return F.weighted_gaussian_cross_entropy(
            loc, old_scale, old_loc, old_scale, moments
        ) + F.weighted_gaussian_cross_entropy(old_loc, scale, old_loc, old_scale, moments)

    def divergences(self, new: TensorDictBase, old: TensorDictBase) -> dict[str, Tensor]:
        """Those of the moved mean and of the moved standard deviation."""
        parameters = (policy.get(name) for policy in (new, old) for name in ("loc", "scale"))
        # eq: kl-mean, kl-stddev
        kl_mean, kl_stddev = F.decoupled_gaussian_kl(*parameters)
        if self.per_dim:
            return {"mean": kl_mean, "stddev": kl_stddev}
        return {"mean": kl_mean.sum(-1, keepdim=True), "stddev": kl_stddev.sum(-1, keepdim=True)}

    def _stddev(self, policy: TensorDictBase) -> Tensor:
        return policy.get("scale")

    def _entropy(self, policy: TensorDictBase) -> Tensor:
        return F.gaussian_entropy(policy.get("scale"))


class TanhGaussian(DiagonalGaussian):
    """A Gaussian over raw actions behind a tanh, which keeps actions inside their bounds.

    Candidates are scored before the tanh, where they are Gaussian and nothing has to be inverted.

    Takes the arguments of :class:`DiagonalGaussian`.

    Examples:
        >>> family = TanhGaussian()
        >>> dist = TanhNormal(torch.zeros(2), torch.ones(2), low=-1.0, high=1.0)
        >>> bool(family.candidates(dist, 100).action.abs().max() <= 1)
        True
    """

    def _from_raw(self, dist: Any, raw_action: Tensor) -> Tensor:
        # eq: tanh-candidates
        return dist.transforms[0](raw_action)

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """No action is out of bounds."""
        return tuple(key for key in super().metric_keys if key != "out_of_bounds")

    def metrics(self, dist: D.Distribution, mask: Tensor | None) -> dict[str, Tensor]:
        """As without the tanh."""
        metrics = super().metrics(dist, mask)
        metrics.pop("out_of_bounds", None)
        return metrics

    def clip(self, action: Tensor) -> Tensor:
        """As it is."""
        return action

    @property
    def leaves_bounds(self) -> bool:
        """No."""
        return False


class FullGaussian(_Gaussian):
    r"""A normal distribution with any covariance, which the environment clips.

    The constraints are decoupled as in https://arxiv.org/abs/1812.02256.

    Constraints ``mean`` and ``covariance``: the mean is fitted with the old covariance, the
    covariance with the old mean. The distribution is ``torch.distributions.MultivariateNormal``
    with a Cholesky factor, ``scale_tril``.

    Args:
        action_spec (TensorSpec, optional): has the action's size and bounds.

    Examples:
        >>> family = FullGaussian()
        >>> old = family.describe(D.MultivariateNormal(torch.zeros(2), scale_tril=torch.eye(2)))
        >>> new = family.describe(D.MultivariateNormal(torch.ones(2), scale_tril=torch.eye(2)))
        >>> family.divergences(new, old)
        {'mean': tensor([1.]), 'covariance': tensor([0.])}
    """

    constraints = ("mean", "covariance")

    def describe(self, dist: D.Distribution) -> TensorDict:
        """Mean ``loc`` ``[*B, D]`` and Cholesky factor ``scale_tril`` ``[*B, D, D]``."""
        normal = leaf_distribution(dist)
        if not isinstance(normal, D.MultivariateNormal):
            raise NotImplementedError(unsupported(type(normal)))
        return TensorDict(
            {"loc": normal.loc, "scale_tril": normal.scale_tril}, batch_size=normal.loc.shape[:-1]
        )

    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        r"""Samples :math:`a = \mu + L z` with their draws ``z``."""
        policy = self.describe(dist)
        loc, scale_tril = policy.get("loc"), policy.get("scale_tril")
        # eq: full-candidates
        noise = self._draw_noise(num_samples, loc)
        action = loc + (scale_tril @ noise.unsqueeze(-1)).squeeze(-1)
        return Candidates(action, {"noise": noise.movedim(0, -2)})

    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """Weighted moments of the draws."""
        moments = F.weighted_multivariate_moments(basis["noise"], weights)
        return TensorDict(moments._asdict(), batch_size=weights.shape[:-1])

    def expected_statistics(self, old: TensorDictBase) -> TensorDict:
        """Moments 1, 0 and the identity of the draws."""
        zeros = torch.zeros_like(old.get("loc"))
        identity = torch.eye(zeros.shape[-1], dtype=zeros.dtype, device=zeros.device)
        moments = F.GaussianMoments(zeros[..., :1] + 1, zeros, identity + zeros.unsqueeze(-1))
        return TensorDict(moments._asdict(), batch_size=old.batch_size)

    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        """That of the new mean with the old covariance, plus the reverse."""
        moments = F.GaussianMoments(*(statistics.get(name) for name in F.GaussianMoments._fields))
        loc, scale_tril = new.get("loc"), new.get("scale_tril")
        old_policy = old.get("loc"), old.get("scale_tril")
        # eq: full-decoupled-fit
        return F.weighted_multivariate_gaussian_cross_entropy(
            loc, old_policy[1], *old_policy, moments
        ) + F.weighted_multivariate_gaussian_cross_entropy(
            old_policy[0], scale_tril, *old_policy, moments
        )

    def divergences(self, new: TensorDictBase, old: TensorDictBase) -> dict[str, Tensor]:
        """Those of the moved mean and of the moved covariance."""
        parameters = (policy.get(name) for policy in (new, old) for name in ("loc", "scale_tril"))
        # eq: full-kl-mean, full-kl-covariance
        kl_mean, kl_covariance = F.multivariate_gaussian_kl(*parameters)
        return {"mean": kl_mean.unsqueeze(-1), "covariance": kl_covariance.unsqueeze(-1)}

    def where_valid(self, policy: TensorDictBase, valid: Tensor) -> TensorDictBase:
        """The factor stays triangular."""
        policy = super().where_valid(policy, valid)
        return policy.set("scale_tril", policy.get("scale_tril").tril())

    def _stddev(self, policy: TensorDictBase) -> Tensor:
        return torch.linalg.vector_norm(policy.get("scale_tril"), dim=-1)

    def _entropy(self, policy: TensorDictBase) -> Tensor:
        return F.gaussian_entropy(policy.get("scale_tril").diagonal(dim1=-2, dim2=-1))
