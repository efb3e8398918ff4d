"""Means and variances of several collectors are those of all their data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minerva_torchrl import make_env
from minerva_torchrl.envs import ReturnStdScaling
from minerva_torchrl.runs.distributed.statistics import Moments, Statistics, added, merged


def moments(rows: Tensor) -> Moments:
    count = torch.tensor(float(len(rows)), dtype=torch.float64)
    return Moments(rows.mean(0), rows.var(0, correction=0), count)


def assert_close(first: Moments, second: Moments, rtol: float = 1e-12) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-12)


def make_rows(count: int, seed: int, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return mean + torch.randn(count, 3, generator=generator, dtype=torch.float64)


def test_merged_are_those_of_the_whole() -> None:
    """With other counts and other means, an average of variances would be far away."""
    parts = [make_rows(7, 0), make_rows(200, 1, mean=5.0), make_rows(1, 2, mean=-3.0)]
    whole = moments(parts[0])
    for part in parts[1:]:
        whole = merged(whole, moments(part))
    assert_close(whole, moments(torch.cat(parts)))


def test_nothing_changes_nothing() -> None:
    some, zero = moments(make_rows(5, 0)), torch.zeros(3, dtype=torch.float64)
    nothing = Moments(zero, zero, torch.tensor(0.0, dtype=torch.float64))
    assert_close(merged(some, nothing), some)
    assert_close(merged(nothing, some), some)
    assert_close(merged(nothing, nothing), nothing)
    assert_close(added(some, some), nothing)


def test_added_is_what_came_between() -> None:
    before, new = make_rows(10_000, 0, mean=100.0), make_rows(20, 1, mean=99.0)
    after = merged(moments(before), moments(new))
    assert_close(added(moments(before), after), moments(new), rtol=1e-7)


def test_environments_that_share_what_they_see() -> None:
    """Three collectors report to a driver: it has the statistics of all their frames."""
    envs = [
        make_env("cartpole-balance", num_envs=2, seed=s, observation_norm=True) for s in (0, 1, 2)
    ]
    for env in envs:
        env.append_transform(ReturnStdScaling(0.99))
    driver, *collectors = (Statistics(env) for env in envs)
    driver.freeze()
    envs[0].rollout(3)  # which does not count
    known = [collector.get() for collector in collectors]
    for steps in (5, 8):
        for index, (env, collector) in enumerate(zip(envs[1:], collectors, strict=True)):
            env.rollout(steps)
            now = collector.get()
            driver.merge([added(*pair) for pair in zip(known[index], now, strict=True)])
            known[index] = now
    observations, rewards = driver.get()
    pairs = zip(*(collector.get() for collector in collectors), strict=True)
    (first, second), returns = pairs
    assert_close(observations, merged(first, second), rtol=1e-9)
    assert float(observations.count) == 2 * 2 * (5 + 1 + 8 + 1)
    # What all begin with counts once.
    counts = sum(float(part.count) for part in returns)
    assert float(rewards.count) == pytest.approx(counts - 1e-4, rel=1e-12)
    driver.set(known[0])
    for one, other in zip(driver.get(), known[0], strict=True):
        assert_close(one, other)
