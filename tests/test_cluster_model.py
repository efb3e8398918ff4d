"""The model of a cluster adds up what it is made of."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import cluster
from cluster import HERE, frames_per_second, seconds_per_batch


def test_synchronous_is_the_sum_and_asynchronous_the_longer() -> None:
    parts = seconds_per_batch(HERE, 4)
    behind = max(parts["learning"], parts["replay"], parts["network"])
    assert parts["total"] == pytest.approx(parts["collecting"] + behind + parts["driver"])
    parts = seconds_per_batch(HERE, 4, sync=False)
    assert parts["total"] == pytest.approx(max(parts["collecting"], behind + parts["driver"]))


def test_two_learners_take_what_was_measured() -> None:
    updates = cluster.UPDATES_PER_FRAME * cluster.FRAMES_PER_BATCH
    assert seconds_per_batch(HERE, 1, 1)["learning"] / updates == pytest.approx(14e-3)
    assert seconds_per_batch(HERE, 1, 2)["learning"] / updates == pytest.approx(25e-3)


def test_collectors_help_until_something_else_is_the_limit() -> None:
    """First in proportion, then not at all, and in the end every further one costs."""
    free = replace(HERE, update=0.0, replay_sample=0.0, driver=0.0, publication=0.0, part=0.0)
    free = replace(free, replay_part=0.0, replay_frame=0.0, batch_bytes=0.0, weight_bytes=0.0)
    free = replace(free, frame_bytes=0.0)
    assert frames_per_second(free, 10) == pytest.approx(10 * frames_per_second(free, 1))
    rates = [frames_per_second(HERE, count, sync=False) for count in (1, 2, 8, 1000)]
    assert rates[0] < rates[1] == pytest.approx(rates[2], rel=0.02)
    assert rates[3] < 0.8 * rates[2]


def test_table() -> None:
    lines = list(cluster.model_lines(HERE))
    assert lines[1].split()[0] == "1"
    assert lines[-2].split()[0] == "1000"
