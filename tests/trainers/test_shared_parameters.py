"""Parameters that several losses train: who may step them, and along which gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from minerva_torchrl import MPOLoss, MPOOptimizationStepper, VMPOOptimizationStepper
from tests.objectives import vmpo_problem
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    gradients,
    make_mlp,
    make_transitions,
    with_updater,
)
from tests.trainers.test_mpo_stepper import BATCH, difference, inject, make_stepper, values


class TestTrunk:
    def make_loss(self, *, separate_losses: bool) -> tuple[MPOLoss, dict[str, Tensor]]:
        """A loss, and the parameters of the trunk by their names in the policy."""
        torch.manual_seed(0)
        trunk = TensorDictModule(nn.Linear(OBSERVATION_DIM, 6), ["observation"], ["hidden"])
        head = nn.Sequential(make_mlp(6, 2 * ACTION_DIM), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictSequential(trunk, TensorDictModule(head, ["hidden"], ["loc", "scale"])),
            in_keys=["loc", "scale"],
            spec=Bounded(-1.0, 1.0, (ACTION_DIM,)),
            distribution_class=IndependentNormal,
        )
        value = ValueOperator(
            Concatenate(make_mlp(6 + ACTION_DIM, 1)), in_keys=["hidden", "action"]
        )
        critic = TensorDictSequential(trunk, value)
        loss = MPOLoss(actor, critic, num_action_samples=5, separate_losses=separate_losses)
        shared = {id(parameter) for parameter in trunk.parameters()}
        named = {name: p for name, p in loss.named_parameters() if id(p) in shared}
        assert len(named) == 2
        return with_updater(loss), named

    def test_two_optimizers_are_refused(self) -> None:
        loss, _ = self.make_loss(separate_losses=False)
        message = (
            r"^optimizer_critic and optimizer_actor hold the same parameter, of shape \(6, 3\)"
        )
        with pytest.raises(ValueError, match=message):
            make_stepper(loss)

    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    @pytest.mark.parametrize("separate_losses", [True, False])
    def test_one_optimizer(self, separate_losses: bool, dual_order: Any) -> None:
        """The actor's steps the trunk, with the gradient of its own loss or of both.

        That holds for one backward pass and for several; the duals stand still here.
        """
        loss, trunk = self.make_loss(separate_losses=separate_losses)
        reference, _ = self.make_loss(separate_losses=separate_losses)
        before = values(loss)
        inject(loss, reference)
        of_critic = [
            parameter
            for parameter in loss.qvalue_network_params.parameters()
            if all(parameter is not shared for shared in trunk.values())
        ]
        stepper = MPOOptimizationStepper(
            torch.optim.SGD(of_critic, lr=0.1),
            torch.optim.SGD(loss.actor_network_params.parameters(), lr=0.1),
            torch.optim.SGD(loss.dual_parameters(), lr=0.0),
            dual_order=dual_order,
        )
        stepper.update(loss, make_transitions(BATCH))
        e_step, _ = reference.e_step(make_transitions(BATCH))
        of_actor = gradients(reference, reference.actor_loss(e_step)[0])
        of_qvalue = gradients(reference, reference.qvalue_loss(e_step)[0])
        for name, moved in difference(values(loss), before).items():
            if name in trunk:
                assert of_qvalue[name].any() != separate_losses
                torch.testing.assert_close(moved, -0.1 * (of_actor[name] + of_qvalue[name]))


def test_vmpo_refuses_two_optimizers_of_a_multiplier() -> None:
    loss = vmpo_problem.make_loss()
    message = "^optimizer and optimizer_alpha hold the same parameter"
    with pytest.raises(ValueError, match=message):
        VMPOOptimizationStepper(
            torch.optim.SGD(loss.parameters(), lr=0.1),
            torch.optim.SGD(loss.alpha_parameters(), lr=0.1),
        )
