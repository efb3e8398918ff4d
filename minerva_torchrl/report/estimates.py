"""Numbers over seeds: what a report says about several learning curves.

A learning curve is a pair of arrays: frames, which increase, and the evaluation's return at each
of them. Nothing here looks beyond the frames at which a curve was measured, and nothing picks the
best of several evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "FEWEST_SEEDS",
    "MeanCurve",
    "area_under_curve",
    "bootstrap_interval",
    "iqm",
    "mean_curve",
    "standard_deviation",
    "value_at",
]

Floats = NDArray[np.float64]
FEWEST_SEEDS = 3
"""Fewer say nothing about a 95 % interval."""


class MeanCurve(NamedTuple):
    """Mean of several learning curves, with an interval if there are at least three."""

    frames: NDArray[np.int64]
    mean: Floats
    low: Floats | None
    high: Floats | None


def iqm(values: ArrayLike) -> float:
    r"""Interquartile mean: the mean of the middle half of the values.

    .. math::
        \mathrm{IQM}(x) = 2 \sum_{i=1}^{n} w_i x_{(i)}, \qquad
        w_i = \left| \left[\tfrac{i-1}{n}, \tfrac{i}{n}\right] \cap
        \left[\tfrac14, \tfrac34\right] \right|

    with :math:`x_{(1)} \le \dots \le x_{(n)}`: a value at the edge of the middle half counts with
    the part of it that is inside, so that any number of values has one. If the number is a
    multiple of four, it is the mean without the lowest and the highest quarter.

    Args:
        values (array_like): at least one number.

    Returns:
        The mean.

    Examples:
        >>> iqm([0.0, 10.0, 20.0, 1000.0])
        15.0
        >>> iqm([0.0, 60.0, 600.0])  # weights 1/6, 2/3 and 1/6
        140.0
        >>> iqm([3.0, 5.0])
        4.0
    """
    ordered = np.sort(_column(values))
    number = len(ordered)
    edges = np.arange(number + 1, dtype=np.float64)
    weights = np.diff(np.clip(edges, number / 4, 3 * number / 4))
    return float(weights @ ordered / (number / 2))


def standard_deviation(values: ArrayLike) -> float | None:
    r"""Sample standard deviation; ``None`` for a single value, which has none.

    .. math::
        s = \sqrt{\frac{1}{n - 1} \sum_{i=1}^{n} (x_i - \bar x)^2}

    Args:
        values (array_like): at least one number.

    Examples:
        >>> standard_deviation([1.0, 3.0, 5.0])
        2.0
        >>> standard_deviation([7.0]) is None
        True
    """
    column = _column(values)
    return float(column.std(ddof=1)) if len(column) > 1 else None


def bootstrap_interval(
    values: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[Floats, Floats]:
    r"""Bootstrap interval of the mean over the first dimension.

    .. math::
        \left[ Q_{(1 - c) / 2}, \; Q_{(1 + c) / 2} \right] \text{ of } \bar x^{*} =
        \frac{1}{n} \sum_{j=1}^{n} x_{I_j}, \qquad I_j \sim \mathrm{Uniform}\{1, \dots, n\}

    The same draws are used for every column, and the same call always gives the same interval.
    With few seeds such an interval is rough, and rather too narrow.

    Args:
        values (array_like): at least three rows, one per seed; any shape behind that.

    Keyword Args:
        confidence (float): coverage :math:`c` that is aimed at. Defaults to ``0.95``.
        resamples (int): number of means to draw. Defaults to ``10_000``.
        seed (int): seed of the draws. Defaults to ``0``.

    Returns:
        The lower and the upper end, of the shape of one row.

    Examples:
        >>> low, high = bootstrap_interval([[10.0, 5.0], [20.0, 5.0], [30.0, 5.0]])
        >>> low.tolist(), high.tolist()
        ([10.0, 5.0], [30.0, 5.0])
    """
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim < 1 or len(rows) < FEWEST_SEEDS:
        raise ValueError(f"values must have at least three rows, got the shape {rows.shape}.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}.")
    if resamples < 1:
        raise ValueError(f"resamples must be positive, got {resamples}.")
    number = len(rows)
    # A resample is how often each row was drawn: one matrix product gives all means.
    draws = np.random.default_rng(seed).multinomial(
        number, np.full(number, 1 / number), size=resamples
    )
    means = draws @ rows.reshape(number, -1) / number
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low.reshape(rows.shape[1:]), high.reshape(rows.shape[1:])


def value_at(frames: ArrayLike, returns: ArrayLike, frame: float) -> tuple[float, bool]:
    r"""Return of a learning curve at a number of frames, and whether it is interpolated.

    .. math::
        R(f) = R_i + \frac{f - f_i}{f_{i+1} - f_i} (R_{i+1} - R_i),
        \qquad f_i \le f \le f_{i+1}

    Args:
        frames (array_like): frames of the evaluations, increasing.
        returns (array_like): their returns.
        frame (float): within the curve; elsewhere there is no value, and an error.

    Returns:
        The return, and whether it is between two evaluations.

    Examples:
        >>> value_at([0, 1000, 2000], [0.0, 10.0, 40.0], 1000)
        (10.0, False)
        >>> value_at([0, 1000, 2000], [0.0, 10.0, 40.0], 1500)
        (25.0, True)
    """
    grid, column = _curve(frames, returns)
    if not grid[0] <= frame <= grid[-1]:
        raise ValueError(f"frame must be between {grid[0]:g} and {grid[-1]:g}, got {frame:g}.")
    return float(np.interp(frame, grid, column)), frame not in grid


def area_under_curve(frames: ArrayLike, returns: ArrayLike, budget: float) -> float:
    r"""Mean return along the way to a budget: the area under the curve per frame.

    .. math::
        A(B) = \frac{1}{B} \int_0^B R(f) \, df

    by the trapezoidal rule, which is exact for the curve as it is drawn.

    Args:
        frames (array_like): frames of the evaluations, increasing from 0.
        returns (array_like): their returns.
        budget (float): positive, and within the curve.

    Returns:
        The mean return.

    Examples:
        >>> area_under_curve([0, 1000, 2000], [0.0, 100.0, 100.0], 2000)
        75.0
        >>> area_under_curve([0, 1000, 2000], [0.0, 100.0, 100.0], 1000)
        50.0
    """
    grid, column = _curve(frames, returns)
    if grid[0] != 0:
        raise ValueError(f"the first of frames must be 0, got {grid[0]:g}.")
    if not budget > 0:
        raise ValueError(f"budget must be positive, got {budget:g}.")
    end, _ = value_at(grid, column, budget)
    inside = grid < budget
    steps = np.append(grid[inside], budget)
    heights = np.append(column[inside], end)
    return float(np.sum(np.diff(steps) * (heights[1:] + heights[:-1])) / (2 * budget))


def mean_curve(curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> MeanCurve:
    r"""Mean over seeds at every frame at which any of them was evaluated.

    A seed without an evaluation at that frame is interpolated linearly, as :func:`value_at` does.
    The mean is over all seeds everywhere: it begins where the last of them begins and ends where
    the first of them ends. There is nothing left if they have no frames in common.

    Args:
        curves (sequence of pairs): frames and returns of each seed.

    Returns:
        Frames, and the mean at each of them.

    Examples:
        >>> curve = mean_curve([([0, 100, 200], [0.0, 10.0, 90.0]), ([0, 150], [0.0, 30.0])])
        >>> curve.frames.tolist(), curve.mean.tolist()
        ([0, 100, 150], [0.0, 15.0, 40.0])
    """
    checked = [_curve(frames, returns) for frames, returns in curves]
    if not checked:
        raise ValueError("there must be at least one curve.")
    grid = np.unique(np.concatenate([frames for frames, _ in checked]))
    start = max(frames[0] for frames, _ in checked)
    end = min(frames[-1] for frames, _ in checked)
    grid = grid[(grid >= start) & (grid <= end)]
    rows = np.stack([np.interp(grid, frames, returns) for frames, returns in checked])
    enough = len(rows) >= FEWEST_SEEDS and grid.size
    low, high = bootstrap_interval(rows) if enough else (None, None)
    return MeanCurve(grid.astype(np.int64), rows.mean(0), low, high)


def _column(values: ArrayLike) -> Floats:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1 or not column.size:
        raise ValueError(f"values must be a list of numbers, got the shape {column.shape}.")
    return column


def _curve(frames: ArrayLike, returns: ArrayLike) -> tuple[Floats, Floats]:
    grid, column = _column(frames), _column(returns)
    if len(grid) != len(column):
        raise ValueError(
            f"frames and returns must be equally many, got {len(grid)} and {len(column)}."
        )
    if (np.diff(grid) <= 0).any():
        raise ValueError("frames must increase.")
    return grid, column
