from __future__ import annotations

import itertools

import numpy as np
import pytest

from minerva_torchrl.report.suite import (
    performance_profile,
    probability_of_improvement,
    suite_iqm,
    suite_mean,
    suite_median,
    with_interval,
)


def random_suite(tasks: int, seeds: int, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {f"task{i}": generator.gamma(2.0, 200.0, seeds) for i in range(tasks)}


def test_rliable_says_the_same() -> None:
    # Version 1.2.0, of the same suites. Its interquartile mean drops whole runs, so that it is the
    # same where the number of runs is a multiple of four.
    suite, other = random_suite(6, 4, 0), random_suite(6, 4, 1)
    assert suite_iqm(suite) == pytest.approx(286.89592161967386, rel=1e-12)
    assert suite_mean(suite) == pytest.approx(349.04265615521217, rel=1e-12)
    assert suite_median(suite) == pytest.approx(327.63281997572545, rel=1e-12)
    assert probability_of_improvement(suite, other) == pytest.approx(0.4479166666666667, rel=1e-12)
    profile = performance_profile(suite, [100, 300, 500])
    assert profile == pytest.approx([0.95833333, 0.45833333, 0.25], abs=1e-8)
    estimate = with_interval(suite_iqm, suite)
    assert (estimate.low, estimate.high) == pytest.approx((218.8, 390.7), rel=0.03)


def test_a_quarter_of_all_runs_is_dropped_at_each_end() -> None:
    suite = random_suite(6, 4, 0)
    ordered = np.sort(np.concatenate(list(suite.values())))
    assert suite_iqm(suite) == pytest.approx(ordered[6:18].mean(), rel=1e-12)


def test_tasks_count_alike_however_many_seeds_they_have() -> None:
    suite = {"a": [1.0, 3.0], "b": [10.0]}
    repeated = {"a": [1.0, 3.0], "b": [10.0, 10.0]}
    for statistic in (suite_mean, suite_median, suite_iqm):
        assert statistic(suite) == pytest.approx(statistic(repeated), rel=1e-12)
    assert suite_mean(suite) == 6.0


def test_improvement_is_the_share_of_pairs_with_half_of_the_ties() -> None:
    ours, theirs = random_suite(3, 4, 1), random_suite(3, 5, 2)
    ours["task0"][0] = theirs["task0"][0]
    shares = []
    for task in ours:
        pairs = list(itertools.product(ours[task], theirs[task]))
        shares.append(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    assert probability_of_improvement(ours, theirs) == pytest.approx(np.mean(shares), rel=1e-12)
    both = probability_of_improvement(ours, theirs) + probability_of_improvement(theirs, ours)
    assert both == pytest.approx(1.0, rel=1e-12)


def test_a_profile_falls_from_one_to_zero() -> None:
    suite = random_suite(5, 3, 3)
    profile = performance_profile(suite, np.linspace(-1, 5_000, 100))
    assert profile[0] == 1
    assert profile[-1] == 0
    assert (np.diff(profile) <= 0).all()


def test_an_interval_covers_the_statistic_and_is_the_same_every_time() -> None:
    suite = random_suite(5, 3, 4)
    first, second = (with_interval(suite_iqm, suite, resamples=500) for _ in range(2))
    assert first == second
    assert first.low < first.value < first.high
    assert first.value == suite_iqm(suite)


def test_seeds_are_drawn_within_their_task() -> None:
    # Between tasks nothing varies, so nothing is uncertain.
    estimate = with_interval(suite_mean, {"a": [0.0, 0.0], "b": [1000.0, 1000.0]}, resamples=50)
    assert estimate.low == estimate.high == 500.0


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(100):
        suite = {str(i): generator.normal(100.0 * i, 10.0, 10) for i in range(4)}
        estimate = with_interval(suite_mean, suite, resamples=200, seed=trial)
        covered += estimate.low <= 150.0 <= estimate.high
    assert 85 <= covered <= 99


@pytest.mark.parametrize("suite", [{}, {"a": []}, {"a": [1.0, float("nan")]}])
def test_scores_that_say_nothing_are_refused(suite: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="every task must have at least one score"):
        suite_mean(suite)


def test_other_tasks_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="both must have the same tasks, got a and b"):
        probability_of_improvement({"a": [1.0]}, {"b": [1.0]})
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 2"):
        with_interval(suite_mean, {"a": [1.0]}, confidence=2)
    with pytest.raises(ValueError, match="resamples must be positive, got 0"):
        with_interval(suite_mean, {"a": [1.0]}, resamples=0)
