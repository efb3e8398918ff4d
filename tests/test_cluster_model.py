"""The model of a cluster adds up what it is made of."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import cluster_model
from cluster import costs_of
from cluster_model import CASES, HERE, Case, seconds_per_batch

UPDATES = cluster_model.UPDATES_PER_FRAME * cluster_model.FRAMES_PER_BATCH


def test_synchronous_is_the_sum_and_asynchronous_the_longer() -> None:
    parts = seconds_per_batch(HERE, 4)
    behind = max(parts["learning"], parts["replay"], parts["network"])
    assert parts["total"] == pytest.approx(parts["collecting"] + behind + parts["driver"])
    parts = seconds_per_batch(HERE, 4, sync=False)
    assert parts["total"] == pytest.approx(max(parts["collecting"], behind + parts["driver"]))


def test_collectors_help_until_something_else_is_the_limit() -> None:
    """First in proportion, then not at all, and in the end every further one costs."""
    case, slow = Case("", sync=False), replace(HERE, frame=1.0)
    free = replace(slow, part=0.0)
    assert case.frames_per_second(free, 10) == pytest.approx(10 * case.frames_per_second(free, 1))
    rates = [case.frames_per_second(slow, count) for count in (1, 10**4, 10**7)]
    assert rates[0] < rates[1]
    assert rates[2] < 0.8 * rates[1]
    assert case.limit(slow, 1) == "collecting" != case.limit(slow, 10**7)


def test_fewer_updates_and_quicker_learners_move_the_limit() -> None:
    slow = replace(HERE, frame=1e-2)
    one, few = (
        Case("", sync=False, updates_per_frame=updates).frames_per_second(slow, 100)
        for updates in (0.5, 0.125)
    )
    assert few > 2 * one
    quick = Case("", sync=False, quicker=10.0)
    assert quick.seconds(slow, 1)["learning"] == pytest.approx(UPDATES * HERE.update / 10)


def test_costs_are_those_of_the_runs() -> None:
    """Put into the model again, they give the times that were measured."""
    measured: dict[str, Any] = {"frame_ms": 2.0, "update_ms": 10.0}
    rows = [
        {**measured, "collectors": 1, "collecting_ms": 450, "noting_ms": 1, "publishing_ms": 4},
        {**measured, "collectors": 3, "collecting_ms": 200, "noting_ms": 1, "publishing_ms": 6},
    ]
    two = {**rows[0], "update_ms": 12.0}
    others = dict.fromkeys(("replay_frame", "replay_part", "replay_sample"), 1e-09)
    sizes = {"frame_bytes": 1.0, "batch_bytes": 1.0, "weight_bytes": 1.0}
    costs = costs_of(rows, two, publication=1e-3, **others, **sizes)
    parts = seconds_per_batch(costs, 1)
    assert parts["collecting"] == pytest.approx(0.45)
    assert parts["learning"] == pytest.approx(UPDATES * 0.01)
    assert parts["driver"] == pytest.approx(0.005 + 0.001)
    assert seconds_per_batch(costs, 3)["driver"] == pytest.approx(0.005 + 0.003)
    assert seconds_per_batch(costs, 1, 2)["learning"] == pytest.approx(UPDATES * 0.012)


def test_table_and_plot(tmp_path: Path) -> None:
    lines = list(cluster_model.table(HERE))
    assert lines[2].startswith("| 1 |")
    assert lines[-1].startswith("| 1,000 |")
    assert {line.count("|") for line in lines} == {len(CASES) + 2}
    cluster_model.draw(HERE, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
