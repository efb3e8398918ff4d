"""Policies of several parts: several discrete ones, or discrete and continuous ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch import distributions as D

from minerva_torchrl.objectives.policies.family import Candidates, PolicyFamily

__all__ = ["CompositePolicy"]


class CompositePolicy(PolicyFamily):
    r"""Independent parts, of a ``CompositeDistribution``, that are sampled together.

    A candidate has an action of every part, and all its parts get its weight:
    :math:`-\sum_i w_i \sum_k \log \pi_k(a_{ik})`. Each part has the constraints of its family,
    under names that begin with its own: ``arm_mean``, ``tool_policy``. A bound such as
    ``epsilon_mean`` is that of every part that has such a constraint.

    Args:
        parts (mapping): by the name of a part in the distribution, its name inside the action
            and its family.

    Examples:
        >>> from minerva_torchrl.objectives.policies import Categorical, DiagonalGaussian
        >>> policy = CompositePolicy(
        ...     {"arm": ("arm", DiagonalGaussian()), "tool": ("tool", Categorical())}
        ... )
        >>> policy.constraints
        ('arm_mean', 'arm_stddev', 'tool_policy')
    """

    def __init__(self, parts: Mapping[NestedKey, tuple[NestedKey, PolicyFamily]]) -> None:
        super().__init__()
        self._names = {name: inside for name, (inside, _) in parts.items()}
        self._families = nn.ModuleList(family for _, family in parts.values())
        titles = ["_".join(key) if isinstance(key, tuple) else key for key in self._names.values()]
        if len(set(titles)) < len(titles):
            raise ValueError(f"the parts of an action need names of their own, got {titles}.")
        self._titles = titles

    def _parts(self) -> list[tuple[str, NestedKey, PolicyFamily]]:
        """Title, name inside the action and family of each part."""
        return list(zip(self._titles, self._names.values(), self._families, strict=True))  # type: ignore[arg-type]

    def _with_dists(self, dist: Any) -> list[tuple[str, NestedKey, PolicyFamily, D.Distribution]]:
        dists = (dist.dists[name] for name in self._names)
        return [(*part, of_part) for part, of_part in zip(self._parts(), dists, strict=True)]

    @property
    def constraints(self) -> tuple[str, ...]:
        """Those of all parts."""
        return tuple(self.constraint_kinds())

    def constraint_kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Those of all parts, with the names of the parts before them."""
        return {
            f"{title}_{name}": kind
            for title, _, family in self._parts()
            for name, kind in family.constraint_kinds().items()
        }

    def describe(self, dist: D.Distribution) -> TensorDict:
        """The parameters of every part."""
        parts = {title: family.describe(d) for title, _, family, d in self._with_dists(dist)}
        return TensorDict(parts, batch_size=next(iter(parts.values())).batch_size)

    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        """Samples of all parts."""
        action, basis = TensorDict(), {}
        for title, inside, family, of_part in self._with_dists(dist):
            drawn = family.samples(of_part, num_samples)
            action.set(inside, drawn.action)
            basis[title] = drawn.basis
        action.batch_size = [num_samples, *self.describe(dist).batch_size]
        return Candidates(action, basis)

    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """Those of every part."""
        parts = {t: family.statistics(basis[t], weights) for t, _, family in self._parts()}
        return TensorDict(parts, batch_size=weights.shape[:-1])

    def expected_statistics(self, old: TensorDictBase) -> TensorDict:
        """Those of every part."""
        parts = {t: family.expected_statistics(old.get(t)) for t, _, family in self._parts()}
        return TensorDict(parts, batch_size=old.batch_size)

    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        """The sum over parts."""
        # eq: composite-cross-entropy
        parts = [
            family.cross_entropy(new.get(t), old.get(t), statistics.get(t))
            for t, _, family in self._parts()
        ]
        return torch.stack(parts).sum(0)

    def log_prob(self, dist: D.Distribution, action: Any) -> Tensor:
        """The sum over parts."""
        parts = [
            family.log_prob(of_part, action.get(inside))
            for _, inside, family, of_part in self._with_dists(dist)
        ]
        return torch.stack(parts).sum(0)

    def divergences(self, new: TensorDictBase, old: TensorDictBase) -> dict[str, Tensor]:
        """Those of every part."""
        return {
            f"{t}_{name}": kl
            for t, _, family in self._parts()
            for name, kl in family.divergences(new.get(t), old.get(t)).items()
        }

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """The whole entropy, and all of every part."""
        of_parts = (f"{t}_{key}" for t, _, family in self._parts() for key in family.metric_keys)
        return ("entropy", *of_parts)

    def metrics(self, dist: D.Distribution, mask: Tensor | None) -> dict[str, Tensor]:
        """Those of every part."""
        metrics: dict[str, Tensor] = {}
        for title, _, family, of_part in self._with_dists(dist):
            of_family = family.metrics(of_part, mask)
            metrics |= {f"{title}_{key}": value for key, value in of_family.items()}
        entropy = [metrics[f"{title}_entropy"] for title in self._titles]
        return {"entropy": torch.stack(entropy).sum(0), **metrics}

    def check_action(self, name: NestedKey, action: Any, batch_size: torch.Size) -> None:
        """A TensorDict of the parts."""
        missing = [key for key in self._names.values() if action.get(key, None) is None]
        if missing:
            raise ValueError(
                f"{name!r} must have the parts {list(self._names.values())}, but {missing} are "
                "missing."
            )
        for _, inside, family in self._parts():
            path = inside if isinstance(inside, tuple) else (inside,)
            outer = name if isinstance(name, tuple) else (name,)
            family.check_action((*outer, *path), action.get(inside), batch_size)

    def check_parameters(self, name: object, policy: TensorDictBase) -> None:
        """Those of every part."""
        for title, _, family in self._parts():
            family.check_parameters(f"{name}, part {title!r}", policy.get(title))

    def where_valid(self, policy: TensorDictBase, valid: Tensor) -> TensorDictBase:
        """Part by part."""
        parts = {t: family.where_valid(policy.get(t), valid) for t, _, family in self._parts()}
        return TensorDict(parts, batch_size=policy.batch_size)

    def clip(self, action: Any) -> Any:
        """Every part within its bounds."""
        clipped = action.copy()
        for _, inside, family in self._parts():
            clipped.set(inside, family.clip(action.get(inside)))
        return clipped

    @property
    def leaves_bounds(self) -> bool:
        """Whether a part can leave its bounds."""
        return any(family.leaves_bounds for _, _, family in self._parts())

    def bounds_cost(self, action: Any) -> Tensor:
        """The norm over all parts that have bounds."""
        # eq: composite-bounds-cost
        costs = [
            family.bounds_cost(action.get(inside))
            for _, inside, family in self._parts()
            if family.leaves_bounds
        ]
        return -torch.linalg.vector_norm(torch.stack(costs), dim=0)
