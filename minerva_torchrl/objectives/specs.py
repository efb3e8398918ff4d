"""What an actor and its spec say of the action: its place, distribution, size and bounds."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NestedKey, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from torch import Tensor
from torchrl.data.tensor_specs import Composite, TensorSpec

__all__ = [
    "action_bounds",
    "action_place",
    "check_range",
    "is_inside",
    "keys_without",
    "resolve_action_spec",
    "single_distribution",
]


def single_distribution(actor_network: object) -> tuple[Any, NestedKey | None]:
    """What makes the only distribution of an actor, a class or a function.

    Beside it the name of its sample, if it is the part of a ``CompositeDistribution``.
    """
    if not isinstance(actor_network, ProbabilisticTensorDictSequential):
        raise TypeError(
            "actor_network must be a ProbabilisticTensorDictSequential (for example TorchRL's "
            f"ProbabilisticActor), got {type(actor_network).__name__}."
        )
    made_by, _, part = _distribution(actor_network)
    return made_by, part


def _distribution(
    actor_network: ProbabilisticTensorDictSequential,
) -> tuple[Any, dict[str, Any], NestedKey | None]:
    """What makes the distribution, with which arguments, and the part of a composite it is."""
    heads = [m for m in actor_network.modules() if isinstance(m, ProbabilisticTensorDictModule)]
    made_by, arguments = _unwrapped(heads[-1].distribution_class)
    arguments |= heads[-1].distribution_kwargs or {}
    if made_by is not CompositeDistribution:
        return made_by, arguments, None
    parts = arguments["distribution_map"]
    if len(parts) != 1:
        raise NotImplementedError(
            "the policy's CompositeDistribution must have a single part, "
            f"got {len(parts)}: {', '.join(map(str, parts))}."
        )
    ((name, made_by),) = parts.items()
    made_by, of_part = _unwrapped(made_by)
    of_part |= (arguments.get("extra_kwargs") or {}).get(name, {})
    return made_by, of_part, (arguments.get("name_map") or {}).get(name, name)


def _unwrapped(made_by: Any) -> tuple[Any, dict[str, Any]]:
    """A function or class, and the arguments that a partial fixes."""
    if isinstance(made_by, functools.partial):
        return made_by.func, dict(made_by.keywords)
    return made_by, {}


def action_place(actor_network: ProbabilisticTensorDictSequential) -> NestedKey:
    """Where the data has the action.

    For a ``CompositeDistribution`` that is an entry inside the one that the actor writes, which the
    critic may read as a whole.
    """
    _, part = single_distribution(actor_network)
    written = actor_network.dist_sample_keys[0]
    return written if part is None else part if is_inside(part, written) else (written, part)


def is_inside(key: NestedKey, outer: NestedKey) -> bool:
    """Whether an entry is another one, or one of its parts."""
    path, outer_path = (k if isinstance(k, tuple) else (k,) for k in map(unravel_key, (key, outer)))
    return path[: len(outer_path)] == outer_path


def keys_without(keys: Iterable[NestedKey], parts: Iterable[NestedKey]) -> list[NestedKey]:
    """Those entries that are none of the given parts and have none of them inside."""
    return [key for key in keys if not any(is_inside(part, key) for part in parts)]


def resolve_action_spec(
    action_spec: TensorSpec | None,
    actor_network: ProbabilisticTensorDictSequential | None,
    action_key: NestedKey,
) -> TensorSpec | None:
    """The spec of the action: the given one, or the one that the actor carries, or ``None``."""
    spec = action_spec if action_spec is not None else getattr(actor_network, "spec", None)
    if isinstance(spec, Composite):
        spec = spec[action_key] if action_key in spec.keys(include_nested=True) else None
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


def check_range(
    actor_network: ProbabilisticTensorDictSequential, action_spec: TensorSpec | None
) -> None:
    """Raise if a policy with a tanh ends elsewhere than the bounds of its action."""
    bounds = action_bounds(action_spec)
    if bounds is None or bounds[0].is_meta:
        return
    arguments = _distribution(actor_network)[1]
    for name, bound, default in zip(("low", "high"), bounds, (-1.0, 1.0), strict=True):
        end = torch.as_tensor(arguments.get(name, default)).to(bound)
        if not torch.allclose(end.expand_as(bound), bound, rtol=1e-5):
            raise ValueError(
                f"the policy's TanhNormal has {name}={end.tolist()}, but its action_spec has "
                f"{name}={bound.tolist()}: actions would leave the bounds, or never reach them. "
                "Build the actor with distribution_kwargs={'low': spec.space.low, 'high': "
                "spec.space.high}, or scale the action in the environment."
            )
