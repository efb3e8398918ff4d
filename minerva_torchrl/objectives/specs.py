"""What an actor and its spec say of the action: its place, distribution, size and bounds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
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
    "distribution_parts",
    "is_inside",
    "keys_without",
    "number_of_actions",
    "part_places",
    "reads",
    "resolve_action_spec",
]


def distribution_parts(
    actor_network: object,
) -> dict[NestedKey | None, tuple[Any, dict[str, Any]]]:
    """What makes the distributions of an actor, classes or functions, and their fixed arguments.

    They go by the names of their samples if they are parts of a ``CompositeDistribution``; the
    name of a distribution by itself is ``None``.
    """
    if not isinstance(actor_network, ProbabilisticTensorDictSequential):
        raise TypeError(
            "actor_network must be a ProbabilisticTensorDictSequential (for example TorchRL's "
            f"ProbabilisticActor), got {type(actor_network).__name__}."
        )
    heads = [m for m in actor_network.modules() if isinstance(m, ProbabilisticTensorDictModule)]
    made_by, arguments = _unwrapped(heads[-1].distribution_class, heads[-1].distribution_kwargs)
    if made_by is not CompositeDistribution:
        return {None: (made_by, arguments)}
    names, extra = (arguments.get(key) or {} for key in ("name_map", "extra_kwargs"))
    return {
        unravel_key(names.get(name, name)): _unwrapped(part, extra.get(name))
        for name, part in arguments["distribution_map"].items()
    }


def _unwrapped(made_by: Any, arguments: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """A function or class, with the arguments that it is given and those that a partial fixes."""
    given = dict(arguments or {})
    if isinstance(made_by, functools.partial):
        return made_by.func, {**made_by.keywords, **given}
    return made_by, given


def action_place(actor_network: ProbabilisticTensorDictSequential) -> NestedKey:
    """Where the data has the action.

    For a ``CompositeDistribution`` of one part that is an entry inside the one that the actor
    writes, which the critic may read as a whole; for one of several the entry that has them all.
    """
    places = part_places(actor_network)
    if len(places) == 1:
        return next(iter(places.values()))
    paths = [place if isinstance(place, tuple) else (place,) for place in places.values()]
    levels = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    shared = tuple(names[0] for names in levels)
    if not shared or shared in paths:
        raise ValueError(
            "the parts of the policy's CompositeDistribution must be inside one entry, such as "
            f"('action', 'arm') and ('action', 'leg'), got {list(places.values())}."
        )
    return unravel_key(shared)


def part_places(
    actor_network: ProbabilisticTensorDictSequential,
) -> dict[NestedKey | None, NestedKey]:
    """Where the data has the samples of an actor's distributions, by their names."""
    parts, written = distribution_parts(actor_network), actor_network.dist_sample_keys

    def place(part: NestedKey | None) -> NestedKey:
        if part is None:
            return written[0]
        inside = any(is_inside(part, outer) for outer in written)
        return part if inside else unravel_key((written[0], part))

    return {part: place(part) for part in parts}


def is_inside(key: NestedKey, outer: NestedKey) -> bool:
    """Whether an entry is another one, or one of its parts."""
    path, outer_path = (k if isinstance(k, tuple) else (k,) for k in map(unravel_key, (key, outer)))
    return path[: len(outer_path)] == outer_path


def reads(keys: Iterable[NestedKey], entry: NestedKey) -> bool:
    """Whether an entry, a part of it or one that has it inside is among the keys."""
    return any(is_inside(entry, key) or is_inside(key, entry) for key in keys)


def keys_without(keys: Iterable[NestedKey], parts: Iterable[NestedKey]) -> list[NestedKey]:
    """Those entries that are none of the given parts and have none of them inside."""
    return [key for key in keys if not any(is_inside(part, key) for part in parts)]


def resolve_action_spec(
    action_spec: TensorSpec | None,
    actor_network: ProbabilisticTensorDictSequential | None,
    action_key: NestedKey,
) -> TensorSpec | None:
    """The spec of the action: the given one, or the one that the actor carries, or ``None``.

    That of an action with several parts is a ``Composite`` of theirs.
    """
    spec = action_spec if action_spec is not None else getattr(actor_network, "spec", None)
    if isinstance(spec, Composite):
        parts = actor_network is not None and len(distribution_parts(actor_network)) > 1
        known = action_key in spec.keys(include_nested=True)
        spec = spec[action_key] if known else spec if parts else None
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


def check_range(arguments: Mapping[str, Any], action_spec: TensorSpec | None) -> None:
    """Raise if a tanh with some arguments ends elsewhere than the bounds of its action."""
    bounds = action_bounds(action_spec)
    if bounds is None or bounds[0].is_meta:
        return
    for name, bound, default in zip(("low", "high"), bounds, (-1.0, 1.0), strict=True):
        end = torch.as_tensor(arguments.get(name, default)).to(bound)
        if not torch.allclose(end.expand_as(bound), bound, rtol=1e-5):
            raise ValueError(
                f"the policy's TanhNormal has {name}={end.tolist()}, but its action_spec has "
                f"{name}={bound.tolist()}: actions would leave the bounds, or never reach them. "
                "Build the actor with distribution_kwargs={'low': spec.space.low, 'high': "
                "spec.space.high}, or scale the action in the environment."
            )


def number_of_actions(action_spec: TensorSpec | None) -> int | None:
    """How many discrete actions there are, if the spec says so."""
    number = getattr(getattr(action_spec, "space", None), "n", None)
    return number if isinstance(number, int) else None
