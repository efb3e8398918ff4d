r"""Running statistics of several collectors: what each adds, and all of it together.

A statistic is a mean :math:`\mu`, a population variance :math:`\sigma^2` and a count :math:`n`. Of
two disjoint samples

.. math::
    n = n_1 + n_2, \qquad \mu = \mu_1 + \tfrac{n_2}{n} (\mu_2 - \mu_1), \qquad
    n \sigma^2 = n_1 \sigma_1^2 + n_2 \sigma_2^2 + \tfrac{n_1 n_2}{n} (\mu_2 - \mu_1)^2

and the same equations solved for the second sample say what was added to the first. Nothing is
averaged over collectors: a step counts the same, whoever made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrl.envs import TransformedEnv

from minerva_torchrl.envs import ReturnStdScaling, RunningObservationNorm

__all__ = ["Moments", "Statistics", "added", "merged"]


class Moments(NamedTuple):
    """Mean, population variance and count of a sample, in double precision."""

    mean: Tensor
    variance: Tensor
    count: Tensor  # type: ignore[assignment]


def merged(first: Moments, second: Moments) -> Moments:
    """The statistics of two disjoint samples together.

    Args:
        first (Moments): of one.
        second (Moments): of the other; a count of zero changes nothing.

    Examples:
        >>> rows = torch.tensor([1.0, 2.0, 6.0, 7.0, 9.0], dtype=torch.float64)
        >>> halves = [
        ...     Moments(part.mean(), part.var(correction=0), torch.tensor(float(len(part))))
        ...     for part in rows.split([2, 3])
        ... ]
        >>> mean, variance, count = merged(*halves)
        >>> torch.isclose(mean, rows.mean()), torch.isclose(variance, rows.var(correction=0))
        (tensor(True), tensor(True))
    """
    count = first.count + second.count
    share = torch.where(count > 0, second.count / count, 0.0)
    shift = second.mean - first.mean
    variance = (1 - share) * first.variance + share * (second.variance + (1 - share) * shift**2)
    return Moments(first.mean + share * shift, variance, count)


def added(before: Moments, after: Moments) -> Moments:
    """The sample that was added between two states of running statistics.

    Args:
        before (Moments): the earlier state.
        after (Moments): the later one.
    """
    count = after.count - before.count
    if not (count > 0).any():
        zero = torch.zeros_like(after.mean)
        return Moments(zero, torch.zeros_like(after.variance), torch.zeros_like(count))
    share = count / after.count
    shift = (after.mean - before.mean) / share
    variance = (after.variance - (1 - share) * before.variance) / share - (1 - share) * shift**2
    return Moments(before.mean + shift, variance.clamp_min(0.0), count)


class Statistics:
    """The running statistics of an environment's transforms.

    Args:
        env (TransformedEnv): the environment.
    """

    def __init__(self, env: TransformedEnv) -> None:
        kinds = (RunningObservationNorm, ReturnStdScaling)
        self._transforms = [t for t in env.transform if isinstance(t, kinds)]

    def freeze(self) -> Statistics:
        """Let them change by :meth:`set` and :meth:`merge` only, not by steps of this environment.

        Returns:
            Themselves.
        """
        for transform in self._transforms:
            transform.freeze()
        return self

    def get(self) -> list[Moments]:
        """A copy of them, one after the other."""
        return [moments for t in self._transforms for moments in _moments(t.get_extra_state())]

    def set(self, values: list[Moments]) -> None:
        """Put others in their place.

        Args:
            values (list of Moments): as many as :meth:`get` returns.
        """
        remaining = iter(values)
        for transform in self._transforms:
            state = transform.get_extra_state()
            count = len(_moments(state))
            transform.set_extra_state(_with_moments(state, [next(remaining) for _ in range(count)]))

    def merge(self, samples: list[Moments]) -> None:
        """Count samples as well that were seen elsewhere.

        Args:
            samples (list of Moments): one for each statistic.
        """
        pairs = zip(self.get(), samples, strict=True)
        self.set([merged(own, other) for own, other in pairs])


# What the transforms have: ``moments`` with all three, or ``loc…``, ``var…`` and ``count…``.


def _moments(state: Mapping[str, Any]) -> list[Moments]:
    if "moments" in state:
        return [Moments(*state["moments"].clone())]
    keys = sorted(name.removeprefix("loc") for name in state if name.startswith("loc"))
    return [
        Moments(*(state[kind + key].clone().double() for kind in ("loc", "var", "count")))
        for key in keys
    ]


def _with_moments(state: Mapping[str, Any], values: list[Moments]) -> dict[str, Tensor]:
    if "moments" in state:
        return {"moments": torch.stack([*values[0]])}
    keys = sorted(name.removeprefix("loc") for name in state if name.startswith("loc"))
    new = {}
    for key, moments in zip(keys, values, strict=True):
        for kind, value in zip(("loc", "var", "count"), moments, strict=True):
            new[kind + key] = value.to(state[kind + key].dtype).reshape(state[kind + key].shape)
    return new
