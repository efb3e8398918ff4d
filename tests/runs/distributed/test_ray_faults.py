"""Processes and nodes that are lost while a run trains."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.envs import EnvironmentFailure
from minerva_torchrl.runs import Run, open_checkpoint
from minerva_torchrl.runs.distributed import WorkersLost
from tests.runs.distributed.cluster import (
    STORING,
    At,
    assert_transitions_fit,
    kill_collector,
    kill_learner,
    kill_replay,
    stored,
    trainer,
)
from tests.runs.distributed.commands import PATIENCE
from tests.runs.tiny import column, make_resumed, make_run, read_csv, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def test_a_collector_is_replaced(tmp_path: Path) -> None:
    stream = io.StringIO()
    config = tiny_config("mpo", **STORING)
    run = make_run(config, tmp_path, callbacks=[At(100, kill_collector)], stream=stream)
    run.train()
    assert (run.frames, run.updates) == (200, 18)
    assert "collector 0 died, and is replaced" in stream.getvalue()
    assert float(read_csv(tmp_path / "metrics.csv")[-1]["collectors_replaced"]) == 1
    assert_transitions_fit(stored(tmp_path), n_steps=3)


class Nothing:
    """An actor that takes processors."""


def wait_for_free(cpus: float) -> None:
    """Until no more and no fewer processors of the cluster are free."""
    import ray

    end = time.monotonic() + PATIENCE
    while ray.available_resources().get("CPU", 0) != cpus:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_node_is_lost(tmp_path: Path, cluster: Any) -> None:
    """Its collector can't be replaced, and the other one does the work of both."""
    if cluster is None:
        pytest.skip("needs a cluster of its own")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    wait_for_free(8)  # which earlier tests had
    node = cluster.add_node(num_cpus=5, object_store_memory=100_000_000)
    cluster.wait_for_nodes()
    # It is taken until replay service, learner and a collector are on the first node. Ray might
    # put any of them anywhere.
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    taken = ray.remote(num_cpus=5, scheduling_strategy=there)(Nothing).remote()
    ray.get(taken.__ray_ready__.remote())

    def give_free() -> None:
        wait_for_free(1)
        ray.kill(taken)

    giving = threading.Thread(target=give_free)
    giving.start()
    config = tiny_config("mpo", **STORING, ray__cpus_per_collector=5.0)

    def lose_node(run: Run) -> None:
        assert trainer(run).collector.num_ready == 2
        cluster.remove_node(node, allow_graceful=False)

    run = make_run(config, tmp_path, callbacks=[At(120, lose_node)])
    run.train()
    assert (run.frames, run.updates) == (200, 18)
    assert trainer(run).collector.replaced == 1
    giving.join()


def test_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    """A learner is lost, and then, in the run that goes on, the replay service."""
    config = tiny_config("mpo", **STORING, ray__learners=2)
    run = make_run(config, tmp_path, callbacks=[At(160, kill_learner)])
    with pytest.raises(WorkersLost, match=r"^a learner was lost\.$"):
        run.train()
    assert open_checkpoint(tmp_path).frames == run.saved_frames == 100
    again = make_resumed(tmp_path, callbacks=[At(160, kill_replay)], ray__learners=1)
    assert (again.frames, again.updates) == (100, 8)
    with pytest.raises(WorkersLost, match=r"^the replay service was lost\.$"):
        again.train()
    assert open_checkpoint(tmp_path).frames == again.saved_frames == 100
    last = make_resumed(tmp_path, callbacks=[At(10**6, kill_replay)])
    assert (last.frames, last.updates) == (100, 8)
    last.train()
    assert (last.frames, last.updates) == (200, 18)
    assert column(tmp_path / "metrics.csv", "frames") == [60, 100, 160, 200]


def test_an_error_in_a_collector_is_one_here(tmp_path: Path) -> None:
    config = tiny_config(
        "mpo",
        **STORING,
        env__factory="tests.envs.faulty:Faulty",
        env__name="faulty",
        env__kwargs={"fault": "raise", "at": [40]},
    )
    run = make_run(config, tmp_path)
    with pytest.raises(EnvironmentFailure):
        run.train()
    # Learners were fine: what they had learned is saved.
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.frames == run.frames > 0
    assert checkpoint.load("training")["hooks"]["optimization_stepper"]["updates"] == run.updates
