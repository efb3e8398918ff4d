"""What takes the steps in the process of a learner."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.trainers.trainers import OptimizationStepper

from minerva_torchrl.trainers.stepping import GuardedStepper

__all__ = ["SKIPPED", "ReportingStepper"]

SKIPPED = "skipped"
"""Metric that is 1 for an update that was left out."""


class ReportingStepper(OptimizationStepper):
    """A stepper in a learner's process, which says after each update how it went.

    TorchRL averages what the steps of a batch return, over those entries that all have. A stepper
    that evaluates its metrics now and then would return none: here the latest ones are repeated.

    Args:
        stepper (GuardedStepper): takes the steps.

    Keyword Args:
        limit (int): updates in a row that may not be finite.
        num_threads (int): threads of torch in a learner's process.
    """

    updates_replay_priority = True  # or TorchRL would send every batch back to the replay buffer

    def __init__(self, stepper: GuardedStepper, *, limit: int, num_threads: int) -> None:
        self.stepper, self.limit, self.num_threads = stepper, limit, num_threads
        self._latest = TensorDict()
        self._steps = 0

    def __getstate__(self) -> dict[str, Any]:
        stepper = copy(self.stepper)
        stepper.__dict__.pop("_trainer", None)  # of this process
        return {**vars(self), "stepper": stepper}

    def register(self, trainer: Any, name: str = "optimization_stepper") -> None:
        """Attach to a learner."""
        torch.set_num_threads(self.num_threads)
        super().register(trainer, name)

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDict:
        """One update: its metrics, and whether it was left out, as 0 or 1."""
        interval = self.stepper.metrics_interval
        if self._latest.is_empty():  # nothing to repeat yet
            self.stepper.metrics_interval = 1
        self.stepper.step(trainer, sub_batch)
        self.stepper.metrics_interval = interval
        metrics = self.stepper.latest
        self._steps += 1
        left_out = (~self.stepper.latest_taken).to(torch.float64)
        if self._steps % self.limit == 0:  # which waits for the device
            self.stepper.check_finite(self.limit)
        if not metrics.is_empty():
            self._latest = metrics
        return TensorDict({**self._latest, SKIPPED: left_out.reshape(())})

    def state_dict(self) -> dict[str, Any]:
        """That of the stepper."""
        return self.stepper.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        self.stepper.load_state_dict(state_dict)
