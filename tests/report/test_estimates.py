from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minerva_torchrl.report.estimates import (
    area_under_curve,
    bootstrap_interval,
    iqm,
    mean_curve,
    standard_deviation,
    value_at,
)

NUMBERS = st.floats(-1e4, 1e4, allow_nan=False)
COLUMNS = st.lists(NUMBERS, min_size=1, max_size=12)


@st.composite
def curves(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """A learning curve from frame 0 on."""
    frames = draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=8, unique=True))
    returns = draw(st.lists(NUMBERS, min_size=len(frames) + 1, max_size=len(frames) + 1))
    return [0, *sorted(frames)], returns


# Interquartile mean ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], 5.0),
        ([1.0, 2.0], 1.5),
        ([0.0, 60.0, 600.0], 140.0),  # 0 / 6 + 60 * 2 / 3 + 600 / 6
        ([1000.0, 20.0, 0.0, 10.0], 15.0),
        # Of five, the second and the fourth count with 3/4 of a fifth, the third with all of it.
        ([0.0, 10.0, 20.0, 30.0, 1000.0], 2 * (0.15 * 10 + 0.2 * 20 + 0.15 * 30)),
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, -100.0], 4.5),
    ],
)
def test_iqm(values: list[float], expected: float) -> None:
    assert iqm(values) == pytest.approx(expected, rel=1e-12)


@given(COLUMNS)
def test_iqm_is_within_the_values(values: list[float]) -> None:
    assert min(values) - 1e-9 <= iqm(values) <= max(values) + 1e-9


@given(NUMBERS, st.integers(1, 12))
def test_iqm_of_a_constant(value: float, number: int) -> None:
    assert iqm([value] * number) == pytest.approx(value, abs=1e-9)


@given(st.lists(NUMBERS, min_size=4, max_size=12).filter(lambda x: len(x) % 4 == 0))
def test_iqm_of_a_multiple_of_four_is_the_trimmed_mean(values: list[float]) -> None:
    quarter = len(values) // 4
    assert iqm(values) == pytest.approx(np.mean(sorted(values)[quarter:-quarter]), abs=1e-8)


@given(COLUMNS, st.floats(0.1, 10), NUMBERS, st.randoms(use_true_random=False))
def test_iqm_follows_scale_shift_and_not_order(
    values: list[float], scale: float, shift: float, random: object
) -> None:
    moved = [scale * value + shift for value in values]
    random.shuffle(moved)  # type: ignore[attr-defined]
    assert iqm(moved) == pytest.approx(scale * iqm(values) + shift, abs=1e-6)


# Standard deviation ------------------------------------------------------------------------------


def test_standard_deviation() -> None:
    assert standard_deviation([2.0, 4.0]) == pytest.approx(2**0.5)
    assert standard_deviation([4.0]) is None


# Bootstrap ---------------------------------------------------------------------------------------


def test_bootstrap_of_three_seeds_is_their_range() -> None:
    # All draws are the same seed with probability 1/27 each, which is beyond 2.5 %.
    low, high = bootstrap_interval([3.0, 4.0, 7.0])
    assert (float(low), float(high)) == (3.0, 7.0)


def test_bootstrap_against_all_resamples() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0, 30.0])
    means = np.array(list(itertools.product(values, repeat=5))).mean(1)
    low, high = bootstrap_interval(values, confidence=0.8, resamples=200_000)
    assert float(low) == pytest.approx(np.quantile(means, 0.1), abs=0.25)
    assert float(high) == pytest.approx(np.quantile(means, 0.9), abs=0.25)


@settings(max_examples=30, deadline=None)
@given(st.lists(NUMBERS, min_size=3, max_size=8))
def test_bootstrap_contains_the_mean(values: list[float]) -> None:
    low, high = bootstrap_interval(values)
    assert min(values) - 1e-8 <= low <= np.mean(values) + 1e-8
    assert np.mean(values) - 1e-8 <= high <= max(values) + 1e-8


@settings(max_examples=20, deadline=None)
@given(st.lists(NUMBERS, min_size=3, max_size=8))
def test_bootstrap_widens_with_confidence(values: list[float]) -> None:
    low, high = bootstrap_interval(values, confidence=0.5)
    lower, higher = bootstrap_interval(values, confidence=0.99)
    assert lower <= low + 1e-9
    assert high <= higher + 1e-9


def test_bootstrap_of_columns() -> None:
    rows = np.random.default_rng(3).normal(size=(4, 2, 3))
    low, high = bootstrap_interval(rows)
    assert low.shape == high.shape == (2, 3)
    for index in np.ndindex(2, 3):
        one_low, one_high = bootstrap_interval(rows[(slice(None), *index)])
        assert low[index] == pytest.approx(float(one_low), abs=1e-12)
        assert high[index] == pytest.approx(float(one_high), abs=1e-12)


def test_bootstrap_depends_on_its_seed_only() -> None:
    values = np.random.default_rng(0).normal(size=7)
    np.random.default_rng().normal()
    first, second = bootstrap_interval(values), bootstrap_interval(values)
    assert first == second
    assert bootstrap_interval(values, seed=1) != first


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ([1.0], {}, r"at least three rows, got the shape \(1,\)"),
        (5.0, {}, "at least three rows"),
        ([1.0, 2.0], {}, r"at least three rows, got the shape \(2,\)"),
        ([1.0, 2.0, 3.0], {"confidence": 1.0}, "confidence must be between 0 and 1, got 1.0"),
        ([1.0, 2.0, 3.0], {"resamples": 0}, "resamples must be positive, got 0"),
    ],
)
def test_bootstrap_errors(values: object, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values, **arguments)  # type: ignore[arg-type]


# Values and areas --------------------------------------------------------------------------------


def test_value_between_evaluations() -> None:
    assert value_at([0, 100, 300], [1.0, 5.0, 9.0], 150) == (6.0, True)
    assert value_at([0, 100, 300], [1.0, 5.0, 9.0], 300) == (9.0, False)
    assert value_at([0], [1.0], 0) == (1.0, False)


@pytest.mark.parametrize("frame", [9, 301])
def test_no_value_outside(frame: int) -> None:
    with pytest.raises(ValueError, match=f"between 10 and 300, got {frame}"):
        value_at([10, 300], [1.0, 2.0], frame)


def test_area_by_hand() -> None:
    # To 100: 50 on average; to 250: 100 and then 250 on average over 150 frames.
    area = area_under_curve([0, 100, 200, 300], [0.0, 100.0, 300.0, 100.0], 250)
    assert area == pytest.approx((100 * 50 + 100 * 200 + 50 * 250) / 250)


@given(NUMBERS, NUMBERS, st.integers(1, 20), st.integers(1, 1000))
def test_area_of_a_straight_line(start: float, slope: float, number: int, budget: int) -> None:
    frames = np.linspace(0, 1000, number + 1)
    area = area_under_curve(frames, start + slope * frames, budget)
    assert area == pytest.approx(start + slope * budget / 2, abs=1e-4)


@given(curves())
def test_area_is_within_the_curve(curve: tuple[list[int], list[float]]) -> None:
    frames, returns = curve
    area = area_under_curve(frames, returns, frames[-1])
    assert min(returns) - 1e-7 <= area <= max(returns) + 1e-7


@given(curves(), st.data())
def test_area_does_not_know_the_future(
    curve: tuple[list[int], list[float]], data: st.DataObject
) -> None:
    frames, returns = curve
    index = data.draw(st.integers(1, len(frames) - 1))
    budget = frames[index]
    before = area_under_curve(frames[: index + 1], returns[: index + 1], budget)
    assert area_under_curve(frames, returns, budget) == before


@pytest.mark.parametrize(
    ("frames", "budget", "message"),
    [
        ([10, 100], 50, "first of frames must be 0, got 10"),
        ([0, 100], 0, "budget must be positive"),
        ([0, 100], 101, "between 0 and 100, got 101"),
        ([0, 0], 1, "frames must increase"),
        ([0, 1, 2], 1, "equally many, got 3 and 2"),
        ([], 1, "must be a list of numbers"),
    ],
)
def test_area_errors(frames: list[int], budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        area_under_curve(frames, [0.0, 1.0], budget)


# Curves ------------------------------------------------------------------------------------------


def test_mean_curve_by_hand() -> None:
    first = ([0, 100, 200, 300], [0.0, 10.0, 20.0, 1000.0])
    second = ([0, 50, 250], [8.0, 8.0, 48.0])
    curve = mean_curve([first, second, second])
    assert curve.frames.tolist() == [0, 50, 100, 200, 250]  # not 300: the second ends before
    assert curve.mean.tolist() == pytest.approx([16 / 3, 7, 46 / 3, 32, 202])
    assert curve.low is not None
    assert curve.high is not None
    assert curve.low.tolist() == pytest.approx([0, 5, 10, 20, 48])
    assert curve.high.tolist() == pytest.approx([8, 8, 18, 38, 510])


@pytest.mark.parametrize("seeds", [1, 2])
def test_mean_curve_of_few_seeds_has_no_interval(seeds: int) -> None:
    curve = mean_curve([([0, 10], [1.0, 2.0])] * seeds)
    assert curve.mean.tolist() == [1.0, 2.0]
    assert curve.low is curve.high is None


def test_mean_curve_begins_with_the_last() -> None:
    curve = mean_curve([([0, 100], [0.0, 100.0]), ([50, 100], [0.0, 0.0])])
    assert curve.frames.tolist() == [50, 100]
    assert curve.mean.tolist() == [25.0, 50.0]


def test_mean_curve_without_common_frames() -> None:
    curve = mean_curve([([0, 10], [0.0, 1.0]), ([20, 30], [0.0, 1.0])])
    assert curve.frames.size == curve.mean.size == 0
    assert curve.low is None


@settings(max_examples=25, deadline=None)
@given(st.lists(curves(), min_size=1, max_size=4))
def test_mean_curve_is_between_its_seeds(seeds: list[tuple[list[int], list[float]]]) -> None:
    curve = mean_curve(seeds)
    assert curve.frames[-1] == min(frames[-1] for frames, _ in seeds)
    for frame, mean in zip(curve.frames, curve.mean, strict=True):
        values = [value_at(*seed, frame)[0] for seed in seeds]
        assert min(values) - 1e-7 <= mean <= max(values) + 1e-7


def test_mean_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one curve"):
        mean_curve([])
