"""What the tests on a cluster share: settings, kills, and what is stored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from minerva_torchrl.runs import Callback, Run, open_checkpoint

SMALL: dict[str, Any] = {"ray__collectors": 2, "ray__timeout": 900.0}
"""Two collectors, that are given up in good time."""
STORING: dict[str, Any] = {
    **SMALL,
    "replay_buffer__size": 1000,
    "replay_buffer__batch_size": 64,
}
"""The same, with a replay buffer that keeps everything in the order of its collection, and larger
batches than there is data for when updates begin."""


class At(Callback):
    """Does something once a run has so many frames."""

    def __init__(self, frames: int, action: Callable[[Run], None]) -> None:
        self.frames, self.action = frames, action
        self.done = False

    def on_batch(self, run: Run, batch: Any) -> None:
        if run.frames >= self.frames and not self.done:
            self.done = True
            self.action(run)


class LosesALearner(Callback):
    """Kills a learner of a run that was resumed, once in the life of its process."""

    done = False

    def on_batch(self, run: Run, batch: Any) -> None:
        begun = 0 if run.checkpoint is None else run.checkpoint.frames
        if begun and run.frames > begun + 150 and not LosesALearner.done:
            LosesALearner.done = True
            kill_learner(run)


def kill_process(actor: Any) -> None:
    """End the process of an actor as the system would when memory is short."""
    import ray

    os.kill(ray.get(actor.__ray_call__.remote(_pid)), signal.SIGKILL)


def _pid(_: Any) -> int:
    return os.getpid()


def kill_collector(run: Run) -> None:
    kill_process(trainer(run).collector._members[0].actor)


def kill_learner(run: Run) -> None:
    kill_process(trainer(run)._execution_backend._actors[-1])


def kill_replay(run: Run) -> None:
    kill_process(trainer(run).service._rb)


def trainer(run: Run) -> Any:
    return run.assembly.trainer


def stored(folder: Any) -> dict[str, Any]:
    """What the replay buffer of a run's last checkpoint has, by name."""
    data: dict[str, Any] = open_checkpoint(folder).load("replay")["data"]["entries"]
    return data


def assert_transitions_fit(data: dict[str, Any], n_steps: int) -> None:
    """Every transition of ``n_steps`` leads to where its trajectory was that much later."""
    ids = data["collector"]["traj_ids"].flatten()
    checked = 0
    for number in ids.unique():
        rows = (ids == number).nonzero().flatten()
        if "steps_to_next_obs" in data:  # without the single steps at the beginning
            rows = rows[data["steps_to_next_obs"].flatten()[rows] == n_steps]
        states, following = data["observation"][rows], data["next"]["observation"][rows]
        ends = data["next"]["done"].flatten()[rows]
        assert not ends[:-n_steps].any()
        torch.testing.assert_close(following[:-n_steps], states[n_steps:], rtol=0, atol=0)
        checked += max(len(rows) - n_steps, 0)
    assert checked > 20
