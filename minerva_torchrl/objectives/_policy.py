"""How the losses look at a policy: as a diagonal Gaussian over raw actions, and its bounds."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor
from torch import distributions as D
from torchrl.data.tensor_specs import Composite, TensorSpec
from torchrl.modules import TanhNormal

_GAUSSIANS = (D.Independent, TanhNormal)
_CATEGORICALS = (D.Categorical, D.OneHotCategorical)
_SUPPORTED = "IndependentNormal, torch.distributions.Independent(Normal) or TanhNormal"


def check_is_gaussian_actor(actor_network: object) -> None:
    """Raise unless the actor is a TensorDict policy with a diagonal Gaussian distribution."""
    if not issubclass(distribution_class(actor_network), _GAUSSIANS):
        raise NotImplementedError(_unsupported(distribution_class(actor_network)))


def is_discrete(actor_network: object) -> bool:
    """Whether the actor is categorical; raise unless it is that or a diagonal Gaussian."""
    distribution = distribution_class(actor_network)
    if not issubclass(distribution, (*_GAUSSIANS, *_CATEGORICALS)):
        raise NotImplementedError(
            f"the policy's distribution must be a diagonal Gaussian ({_SUPPORTED}), Categorical or "
            f"OneHotCategorical, got {distribution.__name__}."
        )
    return issubclass(distribution, _CATEGORICALS)


def distribution_class(actor_network: object) -> type[D.Distribution]:
    """The distribution class of the last probabilistic module of an actor."""
    if not isinstance(actor_network, ProbabilisticTensorDictSequential):
        raise TypeError(
            "actor_network must be a ProbabilisticTensorDictSequential (for example TorchRL's "
            f"ProbabilisticActor), got {type(actor_network).__name__}."
        )
    heads = [m for m in actor_network.modules() if isinstance(m, ProbabilisticTensorDictModule)]
    distribution = heads[-1].distribution_class
    if not isinstance(distribution, type):  # a factory: see what it makes
        parameters = TensorDict({key: torch.ones(1) for key in heads[-1].in_keys})
        distribution = type(heads[-1].get_dist(parameters))
    return distribution


def is_squashed(actor_network: ProbabilisticTensorDictSequential) -> bool:
    """Whether the actor's samples are inside the bounds by construction."""
    return issubclass(distribution_class(actor_network), TanhNormal)


def gaussian_parameters(dist: D.Distribution) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the Gaussian over raw (unsquashed) actions, ``[*B, D]``."""
    if isinstance(dist, TanhNormal):
        return dist.loc, dist.scale
    if isinstance(dist, D.Independent) and isinstance(dist.base_dist, D.Normal):
        return dist.base_dist.loc, dist.base_dist.scale
    raise NotImplementedError(_unsupported(type(dist)))


def policy_parameters(dist: D.Distribution) -> tuple[Tensor, ...]:
    """What divergences are computed from: mean and standard deviation, or logits."""
    if isinstance(dist, _CATEGORICALS):
        return (dist.logits,)
    return gaussian_parameters(dist)


def raw_to_action(dist: D.Distribution, raw_action: Tensor) -> Tensor:
    """Map raw Gaussian samples to actions: through the tanh if there is one."""
    return dist.transforms[0](raw_action) if isinstance(dist, TanhNormal) else raw_action


def _unsupported(distribution: type) -> str:
    return (
        f"the policy's distribution must be a diagonal Gaussian ({_SUPPORTED}), "
        f"got {distribution.__name__}."
    )


def resolve_action_spec(
    action_spec: TensorSpec | None,
    actor_network: ProbabilisticTensorDictSequential,
    action_key: NestedKey,
) -> TensorSpec | None:
    """The spec of the action: the given one, or the one that the actor carries, or ``None``."""
    spec = action_spec if action_spec is not None else getattr(actor_network, "spec", None)
    if isinstance(spec, Composite):
        spec = spec.get(action_key, None)
    return spec


def action_bounds(action_spec: TensorSpec | None) -> tuple[Tensor, Tensor] | None:
    """Lower and upper bounds ``[D]`` of a bounded spec, ``None`` for any other.

    The leading dimensions of the spec of a batch of environments are dropped. Bounds at the limits
    of the floating-point range, which transforms write for "none", count as infinite.
    """
    space: Any = getattr(action_spec, "space", None)
    if action_spec is None or not hasattr(space, "low") or not action_spec.dtype.is_floating_point:
        return None
    dim = action_spec.shape[-1] if action_spec.shape else 1
    low, high = (
        torch.as_tensor(bound).broadcast_to(action_spec.shape).reshape(-1, dim)[0].clone()
        for bound in (space.low, space.high)
    )
    limits = torch.finfo(low.dtype)
    low = low.masked_fill(low <= limits.min, -torch.inf)
    high = high.masked_fill(high >= limits.max, torch.inf)
    if not low.is_meta and low.isinf().all() and high.isinf().all():
        return None
    return low, high


def multiplier_shape(action_spec: TensorSpec | None) -> tuple[int]:
    """Shape of a multiplier per action dimension."""
    if action_spec is None or not action_spec.shape:
        raise ValueError(
            "per_dim_constraining=True needs the size of the action: pass action_spec=, or build "
            "the actor with its spec, or set per_dim_constraining=False. "
            f"Got action_spec={action_spec!r}."
        )
    return (action_spec.shape[-1],)


def resolve_penalization(requested: bool | None, *, bounded: bool, squashed: bool) -> bool:
    """Whether samples outside the bounds are penalised; by default if there can be any."""
    if requested is None:
        return bounded and not squashed
    if requested and squashed:
        raise ValueError(
            "action_penalization=True makes no sense for a squashed policy, whose samples are "
            "always inside the bounds. Set it to False or leave it to None."
        )
    if requested and not bounded:
        raise ValueError(
            "action_penalization=True needs the bounds of the action: pass a bounded "
            "action_spec=, or build the actor with its spec."
        )
    return requested


def blank_terminal_states(states: TensorDictBase, terminated: Tensor) -> TensorDictBase:
    """Zeros where ``terminated`` ``[*B]`` holds, as terminal observations may be NaN."""

    def blank(x: Tensor) -> Tensor:
        features = [1] * (x.ndim - terminated.ndim)
        return torch.where(terminated.reshape(*terminated.shape, *features), 0, x)

    return states.apply(blank)
