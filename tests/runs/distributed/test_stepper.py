"""What a learner's process says about its updates."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from minerva_torchrl import MPOLoss
from minerva_torchrl.runs.distributed.stepper import SKIPPED, ReportingStepper
from minerva_torchrl.trainers import NonFiniteError, make_target_updater
from minerva_torchrl.trainers.stepping import LocalLearner
from tests.objectives import base
from tests.trainers.problem import make_mpo_stepper, spoil


def make_stepper(limit: int = 10, **arguments: Any) -> tuple[ReportingStepper, LocalLearner]:
    torch.manual_seed(0)
    loss = MPOLoss(base.make_actor(), base.make_critic(), num_action_samples=4)
    make_target_updater(loss, period=3)
    stepper = make_mpo_stepper(loss, {}, fused=True)
    for name, value in arguments.items():
        setattr(stepper, name, value)
    return ReportingStepper(stepper, limit=limit, num_threads=1), LocalLearner(loss)


def make_batch(finite: bool = True) -> Any:
    batch = base.make_transitions(8, seed=0)
    return batch if finite else spoil(batch, ("next", "reward"), math.nan)


def test_metrics_are_repeated_until_there_are_new_ones() -> None:
    """TorchRL keeps only those that every step of a batch returned."""
    stepper, learner = make_stepper(metrics_interval=3)
    metrics = [stepper.step(learner, make_batch()) for _ in range(5)]
    assert all({*one.keys()} == {*metrics[0].keys()} for one in metrics)
    values = [float(one["loss_qvalue"]) for one in metrics]
    assert values[0] == values[1] == values[2] == values[3] != values[4]


def test_the_first_update_has_metrics_wherever_it_is_in_its_interval() -> None:
    stepper, learner = make_stepper(metrics_interval=3)
    stepper.stepper._updates = 5  # as after a checkpoint
    assert not stepper.stepper._has_metrics()
    assert "loss_qvalue" in stepper.step(learner, make_batch())
    assert stepper.stepper.metrics_interval == 3


def test_updates_left_out_are_reported() -> None:
    stepper, learner = make_stepper()
    skipped = [
        float(stepper.step(learner, make_batch(finite))[SKIPPED]) for finite in (True, False, True)
    ]
    assert skipped == [0, 1, 0]
    assert stepper.state_dict()["skips"] == (1, 0, 1)


def test_too_many_in_a_row_are_an_error() -> None:
    stepper, learner = make_stepper(limit=2)
    stepper.step(learner, make_batch(finite=False))
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        stepper.step(learner, make_batch(finite=False))


def test_it_can_be_sent() -> None:
    """With optimisers of the same parameters, and without the trainer that it belongs to here."""
    stepper, learner = make_stepper()
    stepper.stepper._trainer = learner  # type: ignore[assignment]
    copy, loss = pickle.loads(pickle.dumps((stepper, learner.loss_module)))
    assert not hasattr(copy.stepper, "_trainer")
    assert hasattr(stepper.stepper, "_trainer")
    stepped = {
        id(p) for o in copy.stepper._optimizers.values() for p in o.param_groups[0]["params"]
    }
    assert stepped <= {id(parameter) for parameter in loss.parameters()}
