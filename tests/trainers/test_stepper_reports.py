"""What steppers say besides their losses: learning rates, change of the policy, M policy steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minerva_torchrl import MPOOptimizationStepper
from minerva_torchrl.objectives.reductions import explained_variance
from minerva_torchrl.trainers.stepping import GuardedStepper, scale_of_lr
from tests.objectives.base import assert_equal, make_transitions
from tests.trainers.test_mpo_stepper import BATCH, make_loss, make_stepper, values


class TestLearningRates:
    def test_by_optimizer_and_group(self) -> None:
        a, b, c = (nn.Parameter(torch.zeros(())) for _ in range(3))
        named = torch.optim.SGD([{"params": [a], "lr": 1.0, "name": "actor"}])
        plain = torch.optim.SGD([{"params": [b]}, {"params": [c], "lr": 3.0}], lr=2.0)
        stepper = GuardedStepper({"optimizer": named, "optimizer_dual": plain, "other": None})
        assert stepper.learning_rates == {"lr_actor": 1.0, "lr_dual": 2.0, "lr_dual_1": 3.0}
        plain.param_groups[1]["lr"] = 0.5
        assert stepper.learning_rates["lr_dual_1"] == 0.5

    def test_keep_their_names_when_an_older_state_is_loaded(self) -> None:
        parameter = nn.Parameter(torch.zeros(()))
        stepper = GuardedStepper(
            {"optimizer": torch.optim.SGD([{"params": [parameter], "lr": 1.0, "name": "actor"}])}
        )
        state = stepper.state_dict()
        del state["optimizer"]["param_groups"][0]["name"]
        state["optimizer"]["param_groups"][0]["lr"] = 0.25
        stepper.load_state_dict(state)
        assert stepper.learning_rates == {"lr_actor": 0.25}

    @pytest.mark.parametrize("scaling", ["1/sqrt(M)", "1/M"])
    def test_of_several_policy_steps(self, scaling: Any) -> None:
        """What a step is taken with, not what it is scaled from."""
        rates = [
            make_stepper(make_loss(), num_policy_steps=4, lr_scaling=chosen).learning_rates
            for chosen in (None, scaling)
        ]
        factors = {name: rates[1][name] / rate for name, rate in rates[0].items()}
        assert factors.pop("lr_actor") == pytest.approx(scale_of_lr(scaling, 4))
        assert set(factors.values()) == {1.0}


class TestParamDelta:
    @pytest.mark.parametrize("num_policy_steps", [1, 3])
    def test_is_the_norm_of_the_change(self, num_policy_steps: int) -> None:
        loss = make_loss()
        stepper = make_stepper(loss, num_policy_steps=num_policy_steps)
        stepper.reports_param_delta = True
        before = values(loss)
        metrics = stepper.update(loss, make_transitions(BATCH))
        change = [
            (value - before[name]).flatten()
            for name, value in values(loss).items()
            if name.startswith("actor_network_params")
        ]
        expected = torch.cat(change).norm()
        assert expected > 0
        torch.testing.assert_close(metrics["param_delta"], expected)

    def test_changes_nothing_else_and_is_off_by_default(self) -> None:
        results = []
        for reported in (False, True):
            loss = make_loss()
            stepper = make_stepper(loss)
            stepper.reports_param_delta |= reported
            torch.manual_seed(1)
            metrics = stepper.update(loss, make_transitions(BATCH))
            assert ("param_delta" in metrics) is reported
            results.append(values(loss))
        assert_equal(*results, rtol=0, atol=0)


class TestScaledRates:
    @pytest.mark.parametrize(
        ("scaling", "factor"), [(None, 1.0), ("1/sqrt(M)", 0.5), ("1/M", 0.25)]
    )
    def test_factor(self, scaling: Any, factor: float) -> None:
        assert scale_of_lr(scaling, 4) == factor
        assert scale_of_lr(scaling, 1) == 1.0

    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    def test_only_the_policy_of_mpo(self, dual_order: Any) -> None:
        """Four steps with a quarter of the rate; critic and duals keep theirs."""
        results = []
        for scaling, lr_actor in (("1/M", 0.1), (None, 0.025)):
            loss = make_loss()
            stepper: MPOOptimizationStepper = make_stepper(
                loss, num_policy_steps=4, dual_order=dual_order, lr_scaling=scaling
            )
            stepper.optimizer_actor.param_groups[0]["lr"] = lr_actor
            torch.manual_seed(1)
            stepper.update(loss, make_transitions(BATCH))
            results.append(values(loss))
            assert stepper.optimizer_actor.param_groups[0]["lr"] == lr_actor
        assert_equal(*results, rtol=1e-6, atol=1e-7)

    def test_refuses_another_rule(self) -> None:
        with pytest.raises(ValueError, match=r"lr_scaling must be one of.*1/M.*got 'M'"):
            make_stepper(make_loss(), lr_scaling="M")


def test_explained_variance() -> None:
    target, value = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1.0, 2.0, 4.0, -7.0])
    mask = torch.tensor([True, True, True, False])
    # Residuals 0, 0, -1 have variance 2/9, targets 2/3.
    torch.testing.assert_close(explained_variance(target, value, mask), torch.tensor(2 / 3))
    torch.testing.assert_close(explained_variance(target[:3], value[:3]), torch.tensor(2 / 3))
