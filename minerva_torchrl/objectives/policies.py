"""What the losses ask of a policy, by the family of its distribution.

A family proposes candidates for the E-step, scores a new policy on the weighted candidates, and
measures how far it has moved, one divergence for each constraint. The losses know nothing else of
a policy: a new distribution is a new class here, and a line in :func:`policy_family`.

Notation: ``*B`` state dimensions, ``N`` candidates, ``D`` action dimensions, ``A`` actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data.tensor_specs import TensorSpec
from torchrl.modules import (
    IndependentNormal,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
    TruncatedNormal,
)

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.reductions import masked_extreme, masked_mean, masked_means
from minerva_torchrl.objectives.specs import action_bounds, check_range, single_distribution

__all__ = [
    "Candidates",
    "Categorical",
    "DiagonalGaussian",
    "PolicyFamily",
    "TanhGaussian",
    "leaf_distribution",
    "policy_family",
    "resolve_penalization",
]

# Share of the way to its bound from which a deterministic action counts as saturated.
_SATURATED = 0.99


class Candidates(NamedTuple):
    """Actions that the E-step weighs."""

    action: Tensor
    """The actions as the data has them, ``[N, *B, D]``, ``[N, *B, A]`` or ``[N, *B]``."""
    basis: dict[str, Tensor]
    """What :meth:`PolicyFamily.statistics` needs of them, ``[*B, N, ...]`` each."""
    log_prior: Tensor | None = None
    """Their log-probabilities ``[*B, N]`` if they are all actions there are, not samples."""


class PolicyFamily(nn.Module, ABC):
    """What the losses ask of a policy.

    A policy is described by a TensorDict ``[*B]`` of the parameters of its distribution, from
    :meth:`describe`.
    """

    constraints: ClassVar[tuple[str, ...]]
    """Names of the divergences, one constraint each."""

    @property
    def constraint_shape(self) -> tuple[int, ...]:
        """Shape of a constraint's multiplier."""
        return ()

    @abstractmethod
    def describe(self, dist: D.Distribution) -> TensorDict:
        """Parameters of a distribution, ``[*B]``."""

    @abstractmethod
    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        """Sampled actions, or all actions where they can be enumerated."""

    @abstractmethod
    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """What :meth:`cross_entropy` needs of candidates with weights ``[*B, N]``: ``[*B]``."""

    @abstractmethod
    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        """Weighted negative log-likelihood of the old policy's candidates, ``[*B]``."""

    def log_prob(self, dist: D.Distribution, action: Tensor) -> Tensor:
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
    def check_action(self, name: NestedKey, action: Tensor, batch_size: torch.Size) -> None:
        """Raise unless actions have the shape and type that the family scores."""

    def check_parameters(self, name: object, policy: TensorDictBase) -> None:
        """Raise if the parameters of a stored policy are degenerate. Waits for the device."""

    def clip(self, action: Tensor) -> Tensor:
        """Actions as the environment carries them out: the critic sees these."""
        return action

    @property
    def leaves_bounds(self) -> bool:
        """Whether there are bounds that actions can be outside of."""
        return False

    def bounds_cost(self, action: Tensor) -> Tensor:
        """How far actions ``[..., D]`` are outside their bounds, ``[...]``, zero or negative."""
        raise NotImplementedError(f"actions of a {type(self).__name__} have no bounds.")


class DiagonalGaussian(PolicyFamily):
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
    low: Tensor | None
    high: Tensor | None

    def __init__(self, action_spec: TensorSpec | None = None, *, per_dim: bool = False) -> None:
        super().__init__()
        self.per_dim = per_dim
        sized = action_spec is not None and len(action_spec.shape) > 0
        self.action_dim = action_spec.shape[-1] if action_spec is not None and sized else None
        if per_dim and self.action_dim is None:
            raise ValueError(
                "per_dim_constraining=True needs the size of the action: pass action_spec=, or "
                "build the actor with its spec, or set per_dim_constraining=False. "
                f"Got action_spec={action_spec!r}."
            )
        low, high = action_bounds(action_spec) or (None, None)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    @property
    def constraint_shape(self) -> tuple[int, ...]:
        """``(D,)`` or ``()``."""
        return (self.action_dim,) if self.per_dim and self.action_dim is not None else ()

    def describe(self, dist: D.Distribution) -> TensorDict:
        """Mean ``loc`` and standard deviation ``scale`` over raw actions, ``[*B, D]``."""
        dist = leaf_distribution(dist)
        normal = dist.base_dist if isinstance(dist, D.Independent) else dist
        if not isinstance(normal, (D.Normal, TanhNormal)):
            raise NotImplementedError(_unsupported(type(dist)))
        return TensorDict(
            {"loc": normal.loc, "scale": normal.scale}, batch_size=normal.loc.shape[:-1]
        )

    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        r"""Samples :math:`a = \mu + \sigma z` with their draws ``z``."""
        policy = self.describe(dist)
        loc, scale = policy.get("loc"), policy.get("scale")
        noise = self._draw_noise(num_samples, loc)
        raw_action = loc + scale * noise
        return Candidates(
            self._from_raw(leaf_distribution(dist), raw_action),
            {"noise": noise.movedim(0, -2)},
        )

    def _draw_noise(self, num_samples: int, like: Tensor) -> Tensor:
        """Standard-normal draws, ``[N, *B, D]``."""
        return torch.randn(num_samples, *like.shape, dtype=like.dtype, device=like.device)

    def _from_raw(self, dist: Any, raw_action: Tensor) -> Tensor:
        return raw_action

    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """Weighted moments of the draws."""
        moments = F.weighted_moments(basis["noise"].movedim(-2, 0), weights.movedim(-1, 0))
        return TensorDict(moments._asdict(), batch_size=weights.shape[:-1])

    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        """That of the new mean with the old scale, plus that of the new scale with the old mean."""
        moments = F.GaussianMoments(*(statistics.get(name) for name in F.GaussianMoments._fields))
        loc, scale = new.get("loc"), new.get("scale")
        old_loc, old_scale = old.get("loc"), old.get("scale")
        return F.weighted_gaussian_cross_entropy(
            loc, old_scale, old_loc, old_scale, moments
        ) + F.weighted_gaussian_cross_entropy(old_loc, scale, old_loc, old_scale, moments)

    def log_prob(self, dist: D.Distribution, action: Tensor) -> Tensor:
        """Log-likelihood of raw actions ``[*B, D]``, ``[*B]``."""
        shape = self.describe(dist).get("loc").shape
        if action.shape != shape:
            raise ValueError(
                f"the action must have the shape of the policy's mean, {tuple(shape)}, "
                f"got {tuple(action.shape)}."
            )
        return super().log_prob(dist, action)

    def divergences(self, new: TensorDictBase, old: TensorDictBase) -> dict[str, Tensor]:
        """Those of the moved mean and of the moved standard deviation."""
        parameters = (policy.get(name) for policy in (new, old) for name in ("loc", "scale"))
        kl_mean, kl_stddev = F.decoupled_gaussian_kl(*parameters)
        if self.per_dim:
            return {"mean": kl_mean, "stddev": kl_stddev}
        return {"mean": kl_mean.sum(-1, keepdim=True), "stddev": kl_stddev.sum(-1, keepdim=True)}

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """With bounds also how many deterministic actions are outside them, or close to them."""
        keys = ("entropy", "stddev_min", "stddev_max", "mean_abs_action")
        return keys if self.low is None else (*keys, "out_of_bounds", "saturation")

    def metrics(self, dist: D.Distribution, mask: Tensor | None) -> dict[str, Tensor]:
        """Entropy, standard deviations, and size of the deterministic action."""
        policy = self.describe(dist)
        loc, scale = policy.get("loc"), policy.get("scale")
        action = self._from_raw(leaf_distribution(dist), loc)
        means = {
            "entropy": F.gaussian_entropy(scale),
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
            "stddev_min": masked_extreme(scale, mask, "min"),
            "stddev_max": masked_extreme(scale, mask, "max"),
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
        loc, scale = policy.get("loc"), policy.get("scale")
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


class TanhGaussian(DiagonalGaussian):
    """A Gaussian over raw actions behind a tanh, which keeps actions inside their bounds.

    Candidates are scored before the tanh, where they are Gaussian and nothing has to be inverted.
    """

    def _from_raw(self, dist: Any, raw_action: Tensor) -> Tensor:
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


class Categorical(PolicyFamily):
    r"""Discrete actions, as an index or one-hot. All of them are candidates.

    With all actions enumerated the weights are
    :math:`w_a \propto \pi'(a) \exp(Q(s, a) / \eta)`, and the policy is fitted to them exactly.

    Keyword Args:
        one_hot (bool): whether actions are one-hot vectors. Defaults to ``False``.

    Examples:
        >>> family = Categorical()
        >>> candidates = family.candidates(D.Categorical(logits=torch.zeros(2)), num_samples=20)
        >>> candidates.action, candidates.log_prior.exp()
        (tensor([0, 1]), tensor([0.5000, 0.5000]))
    """

    constraints = ("policy",)
    metric_keys = ("entropy",)

    def __init__(self, *, one_hot: bool = False) -> None:
        super().__init__()
        self.one_hot = one_hot

    def describe(self, dist: D.Distribution) -> TensorDict:
        """The logits, ``[*B, A]``."""
        logits = leaf_distribution(dist).logits
        return TensorDict({"logits": logits}, batch_size=logits.shape[:-1])

    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        """All actions; ``num_samples`` does not matter."""
        logits = self.describe(dist).get("logits")
        num_actions, batch_size = logits.shape[-1], logits.shape[:-1]
        if self.one_hot:
            action = torch.eye(num_actions, dtype=logits.dtype, device=logits.device)
        else:
            action = torch.arange(num_actions, device=logits.device)
        action = action.reshape(num_actions, *[1] * len(batch_size), *action.shape[1:])
        action = action.expand(num_actions, *batch_size, *action.shape[1 + len(batch_size) :])
        return Candidates(action, {}, logits.log_softmax(-1))

    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """The weights themselves."""
        return TensorDict({"weights": weights}, batch_size=weights.shape[:-1])

    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        r""":math:`-\sum_a w_a \log \pi(a)`; an action without weight may have probability zero."""
        weights, log_prob = statistics.get("weights"), new.get("logits").log_softmax(-1)
        return -(weights * torch.where(weights > 0, log_prob, 0.0)).sum(-1)

    def divergences(self, new: TensorDictBase, old: TensorDictBase) -> dict[str, Tensor]:
        """That of the whole policy."""
        kl = F.categorical_kl(new.get("logits"), old.get("logits"))
        return {"policy": kl.unsqueeze(-1)}

    def metrics(self, dist: D.Distribution, mask: Tensor | None) -> dict[str, Tensor]:
        """The entropy."""
        log_prob = self.describe(dist).get("logits").log_softmax(-1)
        entropy = -torch.where(log_prob > -torch.inf, log_prob.exp() * log_prob, 0.0).sum(-1)
        return {"entropy": masked_mean(entropy, mask)}

    def check_action(self, name: NestedKey, action: Tensor, batch_size: torch.Size) -> None:
        """``[*B]``, or ``[*B, A]`` if one-hot."""
        ndim = len(batch_size) + self.one_hot
        if action.ndim != ndim or action.shape[: len(batch_size)] != batch_size:
            wanted = (*batch_size, "A") if self.one_hot else tuple(batch_size)
            kind = "one-hot" if self.one_hot else "an index"
            raise ValueError(
                f"{name!r} is {kind} and must have shape {wanted}, got {tuple(action.shape)}."
            )


# From an actor to its family ---------------------------------------------------------------------

_GAUSSIANS = "IndependentNormal, torch.distributions.Independent(Normal) or TanhNormal"


def policy_family(
    actor_network: object, action_spec: TensorSpec | None, *, per_dim: bool | None
) -> PolicyFamily:
    """The family of an actor's distribution.

    Args:
        actor_network (ProbabilisticTensorDictSequential): the policy.
        action_spec (TensorSpec, optional): spec of its action.

    Keyword Args:
        per_dim (bool, optional): ``per_dim_constraining`` of the loss; ``None`` is ``True`` where
            there are dimensions.
    """
    distribution = _distribution_class(actor_network)
    if issubclass(distribution, (D.Categorical, D.OneHotCategorical)):
        if per_dim:
            raise ValueError(
                "per_dim_constraining=True is for Gaussian policies, not discrete ones."
            )
        return Categorical(one_hot=issubclass(distribution, _ONE_HOT))
    if not issubclass(distribution, (D.Independent, TanhNormal)):
        raise NotImplementedError(_unsupported(distribution))
    _check_gaussian(actor_network, distribution)
    if issubclass(distribution, TanhNormal):
        check_range(actor_network, action_spec)
    family = TanhGaussian if issubclass(distribution, TanhNormal) else DiagonalGaussian
    return family(action_spec, per_dim=per_dim is None or per_dim)


_ONE_HOT = (D.OneHotCategorical, OneHotCategorical, MaskedOneHotCategorical)


def leaf_distribution(dist: D.Distribution) -> Any:
    """The distribution itself, or the only one inside a ``CompositeDistribution``."""
    if isinstance(dist, CompositeDistribution):
        (dist,) = dist.dists.values()
    return dist


def _distribution_class(actor_network: Any) -> type[D.Distribution]:
    """The class of the only distribution of an actor."""
    made_by, _ = single_distribution(actor_network)
    return made_by if isinstance(made_by, type) else type(_example(actor_network))


def _example(actor_network: Any) -> D.Distribution:
    """What the head of an actor makes of some parameters."""
    head = actor_network[-1]
    return head.get_dist(TensorDict({key: torch.ones(1) for key in head.in_keys}))


def _check_gaussian(actor_network: Any, distribution: type[D.Distribution]) -> None:
    """Raise unless what is independent over the dimensions is a Gaussian."""
    if issubclass(distribution, TruncatedNormal):
        raise NotImplementedError(_unsupported(distribution))
    _, part = single_distribution(actor_network)
    if issubclass(distribution, (IndependentNormal, TanhNormal)) or part is not None:
        return
    base: Any = getattr(_example(actor_network), "base_dist", None)
    if type(base) is not D.Normal:
        raise NotImplementedError(_unsupported(type(base)))


def resolve_penalization(requested: bool | None, policy: PolicyFamily) -> bool:
    """Whether actions outside the bounds are penalised; by default if there can be any."""
    if requested and not policy.leaves_bounds:
        raise ValueError(
            "action_penalization=True needs actions that can leave their bounds: those of an "
            "unsquashed Gaussian policy with a bounded action_spec= (or an actor with such a "
            "spec). A squashed or discrete policy stays inside."
        )
    return policy.leaves_bounds if requested is None else requested


def _unsupported(distribution: type) -> str:
    return (
        f"the policy's distribution must be a diagonal Gaussian ({_GAUSSIANS}), Categorical or "
        f"OneHotCategorical, got {distribution.__name__}. For actions with bounds use "
        "IndependentNormal, where the environment clips the action, or TanhNormal, which stays "
        "inside."
    )
