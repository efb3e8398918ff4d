"""Learners that share a batch, in processes of a Ray cluster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch import distributed as dist

from minerva_torchrl import MPOLoss
from minerva_torchrl.runs.distributed.stepper import SKIPPED, ReportingStepper
from minerva_torchrl.trainers import make_target_updater
from minerva_torchrl.trainers.stepping import LocalLearner
from tests.objectives import base
from tests.trainers.problem import make_mpo_stepper

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

UPDATES = 4


def rank() -> int | None:
    return dist.get_rank() if dist.is_initialized() else None


class SharedNoise:
    """The part of a learner of what one learner would draw."""

    def __init__(self) -> None:
        self.seed = 0

    def __call__(self, num_samples: int, like: Tensor) -> Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        length = len(like) * (1 if rank() is None else 2)
        shape = (num_samples, length, *like.shape[1:])
        noise = torch.randn(shape, generator=generator, dtype=like.dtype)
        index = rank()
        return noise if index is None else noise.chunk(2, 1)[index]


class Halves:
    """Has batches in store; learners get a half of each, anybody else the whole."""

    def __init__(self) -> None:
        self.drawn = 0

    def clients(self, count: int) -> list[Any]:
        assert count == 2
        return [Halves() for _ in range(count)]

    def sample(self, batch_size: int) -> TensorDict:
        batch = base.make_transitions(8, seed=self.drawn, dtype=torch.float64)
        self.drawn += 1
        index = rank()
        return batch if index is None else batch.chunk(2)[index].clone()


def make_parts() -> tuple[MPOLoss, ReportingStepper, Any]:
    torch.manual_seed(0)
    loss = MPOLoss(base.make_actor(), base.make_critic(), num_action_samples=5).double()
    loss.make_value_estimator(gamma=0.9).double()
    loss.policy._draw_noise = SharedNoise()
    updater = make_target_updater(loss, period=3)
    stepper = ReportingStepper(make_mpo_stepper(loss, {}), limit=10, num_threads=1)
    return loss, stepper, updater


def test_two_with_half_a_batch_are_one_with_the_whole() -> None:
    from torchrl.trainers._ray_execution import _RayTrainerExecution

    loss, stepper, updater = make_parts()
    learners = _RayTrainerExecution(
        loss_module=loss,
        optimizer=None,
        optimization_stepper=stepper,
        target_net_updater=updater,
        replay_buffer=Halves(),
        global_batch_size=8,
        options={"world_size": 2, "setup_timeout": 120.0, "command_timeout": 120.0},
        update_replay_priority=False,
    )
    try:
        learners.start()
        metrics = learners.step(UPDATES).metrics
        states = [state["loss_module"] for state in learners.state_dict()["ranks"]]
    finally:
        learners.shutdown()
    whole, batches = LocalLearner(loss), Halves()
    for _ in range(UPDATES):
        stepper.step(whole, batches.sample(8))
        updater.step()
    assert float(metrics[SKIPPED]) == 0
    for name, value in loss.state_dict().items():
        assert torch.equal(states[0][name], states[1][name]), name
        torch.testing.assert_close(states[0][name], value, rtol=1e-9, atol=1e-12)
