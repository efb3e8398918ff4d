"""From an actor to the family of its policy."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDict, unravel_key
from torch import distributions as D
from torchrl.data.tensor_specs import Composite, TensorSpec
from torchrl.modules import (
    IndependentNormal,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
    TruncatedNormal,
)

from minerva_torchrl.objectives.policies.categorical import Categorical
from minerva_torchrl.objectives.policies.composite import CompositePolicy
from minerva_torchrl.objectives.policies.family import (
    PolicyFamily,
    leaf_distribution,
    unsupported,
)
from minerva_torchrl.objectives.policies.gaussian import (
    DiagonalGaussian,
    FullGaussian,
    TanhGaussian,
)
from minerva_torchrl.objectives.specs import (
    action_place,
    check_range,
    distribution_parts,
    part_places,
)

__all__ = ["policy_family", "resolve_penalization"]

_ONE_HOT = (D.OneHotCategorical, OneHotCategorical, MaskedOneHotCategorical)


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

    Returns:
        The family, with the action's size and bounds if they are known.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["logits"])
        >>> actor = ProbabilisticActor(module, ["logits"], distribution_class=D.Categorical)
        >>> policy_family(actor, None, per_dim=None).constraints
        ('policy',)
    """
    parts = distribution_parts(actor_network)
    if len(parts) == 1:
        ((name, (made_by, arguments)),) = parts.items()
        distribution = _made_class(made_by, actor_network)
        if name is None:
            _check_base(distribution, actor_network)
        return _family(distribution, arguments, action_spec, per_dim)
    actor: Any = actor_network
    place, places = action_place(actor), part_places(actor)
    families = {}
    for name, (made_by, arguments) in parts.items():
        assert name is not None
        inside = _without_prefix(places[name], place)
        spec = _part_spec(action_spec, inside, places[name])
        distribution = _made_class(made_by, actor_network)
        dimensions = None if issubclass(distribution, _WITHOUT_DIMENSIONS) else per_dim
        families[name] = (inside, _family(distribution, arguments, spec, dimensions))
    policy = CompositePolicy(families)
    if per_dim and not any(family.constraint_shape for _, family in families.values()):
        raise ValueError(
            "per_dim_constraining=True is for policies with a diagonal Gaussian part, and this one "
            f"has none: {', '.join(type(family).__name__ for _, family in families.values())}."
        )
    return policy


_WITHOUT_DIMENSIONS = (D.Categorical, D.OneHotCategorical, D.MultivariateNormal)


def _family(
    distribution: type[D.Distribution],
    arguments: dict[str, Any],
    spec: TensorSpec | None,
    per_dim: bool | None,
) -> PolicyFamily:
    """The family of one distribution."""
    if issubclass(distribution, (D.Categorical, D.OneHotCategorical)):
        if per_dim:
            raise ValueError(
                "per_dim_constraining=True is for Gaussian policies, not discrete ones."
            )
        return Categorical(one_hot=issubclass(distribution, _ONE_HOT))
    if issubclass(distribution, D.MultivariateNormal):
        if per_dim:
            raise ValueError(
                "per_dim_constraining=True is for diagonal Gaussians: a covariance matrix has one "
                "bound."
            )
        return FullGaussian(spec)
    is_gaussian = issubclass(distribution, (D.Independent, TanhNormal))
    if not is_gaussian or issubclass(distribution, TruncatedNormal):
        raise NotImplementedError(unsupported(distribution))
    per_dim = per_dim is None or per_dim
    if issubclass(distribution, TanhNormal):
        check_range(arguments, spec)
        return TanhGaussian(spec, per_dim=per_dim)
    return DiagonalGaussian(spec, per_dim=per_dim)


def _made_class(made_by: Any, actor_network: Any) -> type[D.Distribution]:
    """The class of a distribution that is made by a class or a function."""
    return made_by if isinstance(made_by, type) else type(_example(actor_network))


def _example(actor_network: Any) -> Any:
    """What the head of an actor makes of some parameters."""
    head = actor_network[-1]
    parameters = TensorDict({key: torch.ones(1) for key in head.in_keys})
    return leaf_distribution(head.get_dist(parameters))


def _check_base(distribution: type[D.Distribution], actor_network: Any) -> None:
    """Raise if what is independent over the dimensions is no Gaussian."""
    if issubclass(distribution, D.Independent) and not issubclass(
        distribution, (IndependentNormal, TruncatedNormal)
    ):
        base = type(_example(actor_network).base_dist)
        if base is not D.Normal:
            raise NotImplementedError(unsupported(base))


def _without_prefix(place: NestedKey, outer: NestedKey) -> NestedKey:
    """The name of an entry inside another."""
    path = place if isinstance(place, tuple) else (place,)
    return unravel_key(path[len(outer) if isinstance(outer, tuple) else 1 :])


def _part_spec(
    action_spec: TensorSpec | None, inside: NestedKey, place: NestedKey
) -> TensorSpec | None:
    """The spec of a part of an action."""
    if not isinstance(action_spec, Composite):
        return None
    known = action_spec.keys(include_nested=True)
    return next((action_spec[key] for key in (inside, place) if key in known), None)


def resolve_penalization(requested: bool | None, policy: PolicyFamily) -> bool:
    """Whether actions outside the bounds are penalised; by default if there can be any.

    Args:
        requested (bool, optional): what the user asked for.
        policy (PolicyFamily): the policy.

    Returns:
        Whether there is a penalty.

    Examples:
        >>> resolve_penalization(None, Categorical())
        False
    """
    if requested and not policy.leaves_bounds:
        raise ValueError(
            "action_penalization=True needs actions that can leave their bounds: those of an "
            "unsquashed Gaussian policy with a bounded action_spec= (or an actor with such a "
            "spec). A squashed or discrete policy stays inside."
        )
    return policy.leaves_bounds if requested is None else requested
