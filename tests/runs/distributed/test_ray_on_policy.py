"""V-MPO and PPO with rollouts of collectors on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.runs import Callback, Run, open_checkpoint
from tests.runs.distributed.cluster import SMALL, At, kill_collector, trainer
from tests.runs.tiny import make_resumed, make_run, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class Versions(Callback):
    """Notes the versions of the policies that made each rollout, and its shape."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], tuple[int, ...]]] = []

    def on_batch(self, run: Run, batch: Any) -> None:
        versions = batch["collector", "policy_version"].unique().tolist()
        self.seen.append((versions, tuple(batch.shape)))


@pytest.mark.parametrize("kind", ["vmpo", "ppo"])
def test_rollouts_are_of_the_latest_policy(kind: str, tmp_path: Path) -> None:
    """Also if a collector is lost in between, and after the run was resumed."""
    settings = {**SMALL, "ray__envs_per_collector": 5}
    versions, kill = Versions(), At(100, kill_collector)
    run = make_run(tiny_config(kind, **settings), tmp_path, callbacks=[versions, kill])
    run.train()
    assert versions.seen == [([version], (10, 5)) for version in range(4)]
    assert trainer(run).collector.replaced == 1
    assert (run.frames, run.updates) == (200, 4)
    # Observations of all copies: steps, and beginnings of episodes.
    state = open_checkpoint(tmp_path).load("model")["transforms"]
    counts = [int(value) for name, value in _flat(state).items() if "count" in name]
    assert 200 < counts[0] < 200 + 60
    changes: dict[str, Any] = {"total_frames": 300, "ray__collectors": 1}
    versions = Versions()
    run = make_resumed(tmp_path, callbacks=[versions, kill], **changes)
    run.train()
    assert versions.seen == [([version], (5, 10)) for version in (4, 5)]
    assert (run.frames, run.updates) == (300, 6)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for name, part in tree.items() for k, v in _flat(part, f"{path}/{name}").items()}
