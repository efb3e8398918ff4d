"""Both losses over estimators, delayed or live targets, ensembles and separate losses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.postprocs import MultiStep
from torchrl.objectives import HardUpdate, SoftUpdate, ValueEstimators
from torchrl.objectives.common import LossModule

from minerva_torchrl import MPOLoss, VMPOLoss
from tests.objectives.base import (
    LossTestBase,
    assert_equal,
    gradients,
    make_actor,
    make_critic,
    make_transitions,
    run,
    total_loss,
)
from tests.objectives.vmpo_problem import make_actor as make_vmpo_actor
from tests.objectives.vmpo_problem import make_critic as make_vmpo_critic
from tests.objectives.vmpo_problem import make_rollout

MPO_ESTIMATORS = [ValueEstimators.TD0, ValueEstimators.TD1, ValueEstimators.TDLambda, "retrace"]
VMPO_ESTIMATORS = ["gae", "td0", "returns", "tdlambda"]


def step(loss: LossModule, data: TensorDict) -> None:
    """One step of a single optimiser."""
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    loss.zero_grad()
    total_loss(loss(data)).backward()
    optimizer.step()


class TestMPOVariants(LossTestBase):
    loss_parameters: ClassVar = {
        "loss_qvalue": "qvalue_network_params",
        "loss_actor": "actor_network_params",
        "loss_temperature": "duals.temperature",
        "loss_alpha_mean": "duals.alpha_mean",
        "loss_alpha_stddev": "duals.alpha_stddev",
        "loss_penalty_temperature": "duals.penalty_temperature",
    }

    def make_loss(self, td_est: Any = None, **kwargs: Any) -> MPOLoss:
        torch.manual_seed(0)
        loss = MPOLoss(make_actor(), make_critic(), num_action_samples=5, **kwargs)
        return loss.make_value_estimator(td_est, gamma=0.9)

    @pytest.mark.parametrize("num_qvalue", [1, 2])
    @pytest.mark.parametrize("delay_qvalue", [False, True])
    @pytest.mark.parametrize("delay_actor", [False, True])
    @pytest.mark.parametrize("td_est", MPO_ESTIMATORS)
    def test_mpo(self, td_est: Any, delay_actor: bool, delay_qvalue: bool, num_qvalue: int) -> None:
        kwargs = {"delay_actor": delay_actor, "delay_qvalue": delay_qvalue}
        loss, separate = (
            self.make_loss(td_est, num_qvalue_nets=num_qvalue, separate_losses=s, **kwargs)
            for s in (False, True)
        )
        data = make_transitions(4, 3)
        delayed = delay_actor or delay_qvalue
        with_warning = pytest.warns(UserWarning, match="No target network updater")
        with (
            with_warning if delayed else nullcontext(),
            self.input_steady_test(data, added=("td_error",)),
        ):
            loss(data)
        if delayed:
            SoftUpdate(loss, tau=0.1)
            SoftUpdate(separate, tau=0.1)
        self.no_duplicates_test(loss)
        if td_est == ValueEstimators.TD0:  # the estimator has no say in it
            self.gradient_isolation_test(loss, data.clone())
        # Networks that share nothing are separate anyway.
        outputs = [run(loss_fn, data.clone()) for loss_fn in (loss, separate)]
        assert_equal(*outputs, 0, 0)
        slopes = [
            gradients(loss, total_loss(outputs[0])),
            gradients(separate, total_loss(outputs[1])),
        ]
        assert_equal(*slopes, 0, 0)
        assert all(gradient.any() for gradient in slopes[0].values())
        # Delayed targets stay when the networks move, the others move with them.
        names = {"actor_network_params": delay_actor, "qvalue_network_params": delay_qvalue}
        before = {name: getattr(loss, f"target_{name}").clone() for name in names}
        step(loss, data)
        for name, is_delayed in names.items():
            target = getattr(loss, f"target_{name}")
            for key, value in before[name].items(True, True):
                assert torch.equal(target[key], value) is is_delayed, (name, key)
                if not is_delayed:
                    assert torch.equal(target[key], getattr(loss, name)[key].detach())

    def test_mpo_hard_update(self) -> None:
        loss = self.make_loss()
        updater = HardUpdate(loss, value_network_update_interval=1)
        step(loss, make_transitions(4, 3))
        for copies in (False, True):
            updater.step()
            for name in ("actor_network_params", "qvalue_network_params"):
                target = getattr(loss, f"target_{name}")
                for key, value in getattr(loss, name).items(True, True):
                    assert torch.equal(target[key], value.detach()) is copies

    @pytest.mark.parametrize("n", [1, 3])
    def test_mpo_multistep(self, n: int) -> None:
        """TorchRL's ``MultiStep`` makes n-step transitions, which the loss bootstraps from."""
        loss = self.make_loss(reduction="none", scalar_output_mode="exclude", delay_actor=False)
        SoftUpdate(loss, tau=0.1)
        data = make_transitions(4, 6)
        for key in ("done", "terminated", "truncated"):
            data["next", key].fill_(False)
        plain = run(loss, data.clone())
        several = MultiStep(gamma=0.9, n_steps=n)(data.clone())
        output = run(loss, several)
        if n == 1:
            assert_equal(output, plain)
            return
        reward = data["next", "reward"]
        discounted = reward[:, :4] + 0.9 * reward[:, 1:5] + 0.9**2 * reward[:, 2:]
        assert torch.allclose(several["next", "reward"][:, :4], discounted)
        following = data["next", "observation"][:, 2:]
        assert torch.equal(several["next", "observation"][:, :4], following)
        # Under the same noise the bootstrap is discounted three times.
        torch.manual_seed(0)
        trained, _ = loss.e_step(several)
        torch.manual_seed(0)
        one_step = several.clone().exclude("steps_to_next_obs")
        once, _ = loss.e_step(one_step)
        bootstrap = (once["value_target"] - several["next", "reward"]) / 0.9
        expected = several["next", "reward"] + 0.9**3 * bootstrap
        torch.testing.assert_close(trained["value_target"][:, :4], expected[:, :4])
        same = torch.isclose(output["loss_qvalue"], plain["loss_qvalue"])
        assert not same[:, :-1].any()
        assert same[:, -1].all()  # nothing follows the last step


class TestVMPOVariants(LossTestBase):
    def make_loss(self, td_est: Any = None, kind: str = "normal", **kwargs: Any) -> VMPOLoss:
        torch.manual_seed(0)
        loss = VMPOLoss(make_vmpo_actor(kind), make_vmpo_critic(), **kwargs)
        return loss.make_value_estimator(td_est, gamma=0.9)

    @pytest.mark.parametrize("kind", ["normal", "one-hot"])
    @pytest.mark.parametrize("old_policy", ["stored", "target"])
    @pytest.mark.parametrize("td_est", VMPO_ESTIMATORS)
    def test_vmpo(self, td_est: Any, old_policy: Any, kind: str) -> None:
        loss, separate = (
            self.make_loss(td_est, kind, old_policy=old_policy, separate_losses=s)
            for s in (False, True)
        )
        delayed = old_policy == "target"
        assert loss.delay_actor is delayed
        data = make_rollout(kind)
        with_warning = pytest.warns(UserWarning, match="No target network updater")
        added = ("advantage", "value_target", "state_value", ("next", "state_value"))
        with with_warning if delayed else nullcontext(), self.input_steady_test(data, added=added):
            loss(data)
        if delayed:
            SoftUpdate(loss, tau=0.1)
            SoftUpdate(separate, tau=0.1)
        self.no_duplicates_test(loss)
        outputs = [loss_fn(make_rollout(kind)) for loss_fn in (loss, separate)]
        assert_equal(*outputs, 0, 0)
        slopes = [
            gradients(loss, total_loss(outputs[0])),
            gradients(separate, total_loss(outputs[1])),
        ]
        assert_equal(*slopes, 0, 0)
        before = loss.target_actor_network_params.clone()
        step(loss, data)
        for key, value in before.items(True, True):
            assert torch.equal(loss.target_actor_network_params[key], value) is delayed, key
