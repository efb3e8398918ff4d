"""Numbers over a suite of tasks: what several seeds on several tasks say together.

Scores are given by task, one number per seed. Tasks count alike, however many seeds they have.
The definitions are those of Agarwal et al. (2021), *Deep reinforcement learning at the edge of the
statistical precipice*, https://arxiv.org/abs/2108.13264.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Estimate",
    "performance_profile",
    "probability_of_improvement",
    "suite_iqm",
    "suite_mean",
    "suite_median",
    "with_interval",
]

Floats = NDArray[np.float64]
Scores = Mapping[str, ArrayLike]


class Estimate(NamedTuple):
    """A number with its bootstrap interval."""

    value: float
    low: float
    high: float


def suite_mean(scores: Scores) -> float:
    """Mean over tasks of the mean over seeds.

    Args:
        scores (mapping): by task, a score per seed.

    Examples:
        >>> suite_mean({"walk": [900.0, 700.0], "run": [300.0]})
        550.0
    """
    return float(np.mean([column.mean() for column in _columns(scores)]))


def suite_median(scores: Scores) -> float:
    """Median over tasks of the mean over seeds.

    Args:
        scores (mapping): by task, a score per seed.

    Examples:
        >>> suite_median({"walk": [900.0, 700.0], "run": [300.0], "hop": [0.0, 2.0]})
        300.0
    """
    return float(np.median([column.mean() for column in _columns(scores)]))


def suite_iqm(scores: Scores) -> float:
    r"""Interquartile mean over all runs of all tasks: the mean of the middle half of them.

    A run of a task with :math:`n` seeds has the weight :math:`1 / n`; at the edges of the middle
    half a run counts with the part of it that is inside.

    Args:
        scores (mapping): by task, a score per seed.

    Examples:
        >>> suite_iqm({"walk": [900.0, 700.0], "run": [300.0, 0.0]})
        500.0
    """
    columns = _columns(scores)
    values = np.concatenate(columns)
    weights = np.concatenate([np.full(len(column), 1 / len(column)) for column in columns])
    order = np.argsort(values)
    edges = np.concatenate([[0.0], np.cumsum(weights[order])]) / len(columns)
    inside = np.diff(np.clip(edges, 0.25, 0.75))
    return float(inside @ values[order] / 0.5)


def performance_profile(scores: Scores, thresholds: ArrayLike) -> Floats:
    """Share of runs above each threshold, as a mean over tasks.

    Args:
        scores (mapping): by task, a score per seed.
        thresholds (array_like): any number of scores, ``[M]``.

    Returns:
        The shares, ``[M]``.

    Examples:
        >>> performance_profile({"walk": [900.0, 700.0], "run": [300.0]}, [0, 500, 800]).tolist()
        [1.0, 0.5, 0.25]
    """
    levels = np.asarray(thresholds, dtype=np.float64)
    above = [(column[:, None] > levels).mean(0) for column in _columns(scores)]
    return np.mean(above, axis=0)


def probability_of_improvement(scores: Scores, others: Scores) -> float:
    """How likely a run scores more than another's on the same task; a tie counts as one half.

    Args:
        scores (mapping): by task, a score per seed.
        others (mapping): those of what is compared with, on the same tasks.

    Returns:
        The mean over tasks of the share of pairs of seeds.

    Examples:
        >>> probability_of_improvement({"walk": [900.0, 700.0]}, {"walk": [800.0, 700.0]})
        0.625
    """
    if scores.keys() != others.keys():
        raise ValueError(
            f"both must have the same tasks, got {', '.join(scores)} and {', '.join(others)}."
        )
    shares = []
    for column, other in zip(
        _columns(scores), _columns({k: others[k] for k in scores}), strict=True
    ):
        difference = np.sign(column[:, None] - other)
        shares.append((difference.mean() + 1) / 2)
    return float(np.mean(shares))


def with_interval(
    statistic: Callable[..., float],
    *scores: Scores,
    confidence: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> Estimate:
    """A statistic of a suite with a stratified bootstrap interval: seeds are drawn within tasks.

    Args:
        statistic (callable): one of the functions above, of one or several scores.
        *scores (mapping): its arguments.

    Keyword Args:
        confidence (float): coverage that is aimed at. Defaults to ``0.95``.
        resamples (int): how many suites to draw. Defaults to ``2_000``.
        seed (int): seed of the draws. Defaults to ``0``.

    Returns:
        The statistic, and both ends of the interval.

    Examples:
        >>> with_interval(suite_mean, {"walk": [900.0, 900.0], "run": [300.0, 300.0]})
        Estimate(value=600.0, low=600.0, high=600.0)
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}.")
    if resamples < 1:
        raise ValueError(f"resamples must be positive, got {resamples}.")
    generator = np.random.default_rng(seed)

    def draw(suite: Scores) -> dict[str, Floats]:
        return {
            task: generator.choice(column, len(column))
            for task, column in zip(suite, _columns(suite), strict=True)
        }

    values = [statistic(*map(draw, scores)) for _ in range(resamples)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Estimate(statistic(*scores), float(low), float(high))


def _columns(scores: Scores) -> Sequence[Floats]:
    columns = [np.asarray(values, dtype=np.float64).ravel() for values in scores.values()]
    if not columns or not all(len(column) and np.isfinite(column).all() for column in columns):
        raise ValueError("every task must have at least one score, and all must be finite.")
    return columns
