"""The nodes say what the classes say: the same arguments, with the same defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any

import pytest
from omegaconf import MISSING
from torchrl.trainers import Trainer

from minerva_torchrl import (
    MPOLoss,
    MPOOptimizationStepper,
    MPOTrainer,
    VMPOLoss,
    VMPOOptimizationStepper,
    VMPOTrainer,
    make_env,
)
from minerva_torchrl.trainers import configs

# Why a field of the classes is left out.

# Done by the optimisation stepper.
BY_STEPPER = {"optimizer", "optimization_stepper", "clip_grad_norm", "clip_norm"}
# For learners that the steppers refuse, and for collectors that write to the buffer themselves.
DISTRIBUTED = {
    "learner_backend",
    "learner_backend_options",
    "learner_poll_interval",
    "batch_size",
    "async_collection",
}
# V-MPO is on-policy, and takes its policy steps inside one step.
OFF_POLICY = {"replay_buffer", "optim_steps_per_batch"}


def defaults_of_fields(node: type) -> dict[str, Any]:
    return {f.name: f.default for f in fields(node) if not f.name.startswith("_")}


def defaults_of_arguments(function: Any, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    return {
        name: MISSING if parameter.default is Parameter.empty else parameter.default
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD and name not in leave_out
    }


class TestParity:
    @pytest.mark.parametrize(
        ("node", "loss", "estimator"),
        [(configs.MPOLossConfig, MPOLoss, "td0"), (configs.VMPOLossConfig, VMPOLoss, "gae")],
    )
    def test_losses(self, node: type, loss: type, estimator: str) -> None:
        expected = defaults_of_arguments(loss)
        expected = {k: None if v is MISSING else v for k, v in expected.items()}  # networks
        expected |= {"value_estimator": estimator, "gamma": 0.99, "lmbda": 0.95}
        assert defaults_of_fields(node) == expected

    @pytest.mark.parametrize(
        ("node", "trainer", "stepper", "critic", "leave_out"),
        [
            (
                configs.MPOTrainerConfig,
                MPOTrainer,
                MPOOptimizationStepper,
                "qvalue_network",
                set(),
            ),
            (
                configs.VMPOTrainerConfig,
                VMPOTrainer,
                VMPOOptimizationStepper,
                "critic_network",
                OFF_POLICY,
            ),
        ],
    )
    def test_trainers(
        self, node: type, trainer: type, stepper: type, critic: str, leave_out: set[str]
    ) -> None:
        leave_out = leave_out | BY_STEPPER | DISTRIBUTED
        base = {k: v for k, v in defaults_of_arguments(Trainer.__init__).items() if k != "self"}
        expected = {k: v for k, v in base.items() if k not in leave_out}
        expected |= defaults_of_arguments(trainer, leave_out)
        expected |= defaults_of_arguments(stepper)
        expected |= {"actor_network": None, critic: None, "hooks": None}
        assert defaults_of_fields(node) == expected

    def test_environment(self) -> None:
        expected = defaults_of_arguments(make_env)
        assert defaults_of_fields(configs.MinervaEnvConfig) == expected
