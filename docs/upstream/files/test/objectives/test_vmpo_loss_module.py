from __future__ import annotations

from inspect import signature

import pytest
import torch
from _objectives_common import _check_td_steady as check_td_steady, LossModuleTestBase
from hydra.utils import instantiate
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, OneHot
from torchrl.modules import IndependentNormal, OneHotCategorical
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ValueEstimators, VMPOLoss
from torchrl.testing import get_default_devices
from torchrl.trainers.algorithms.configs import VMPOLossConfig

ESTIMATORS = [
    ValueEstimators.GAE,
    ValueEstimators.TD0,
    ValueEstimators.TD1,
    ValueEstimators.TDLambda,
]


class TestVMPO(LossModuleTestBase):
    seed = 0

    def _create_mock_actor(self, device="cpu", discrete=False, key="observation"):
        if discrete:
            return ProbabilisticActor(
                TensorDictModule(nn.Linear(3, 4, device=device), [key], ["logits"]),
                in_keys=["logits"],
                spec=OneHot(4, device=device),
                distribution_class=OneHotCategorical,
                return_log_prob=True,
            )
        net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()).to(device)
        return ProbabilisticActor(
            TensorDictModule(net, [key], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=Bounded(-1, 1, (2,), device=device),
            distribution_class=IndependentNormal,
            return_log_prob=True,
        )

    def _create_mock_value(self, device="cpu", key="observation", out_key="state_value"):
        net = nn.Linear(3, 1, device=device)
        return ValueOperator(net, in_keys=[key], out_keys=[out_key])

    def _create_mock_data(self, actor, batch=(4, 3), device="cpu", key="observation"):
        data = TensorDict({key: torch.randn(*batch, 3)}, batch, device=device)
        with torch.no_grad():
            data = actor(data)
        following = {
            key: torch.randn(*batch, 3),
            "reward": torch.randn(*batch, 1),
            "done": torch.zeros(*batch, 1, dtype=torch.bool),
            "terminated": torch.zeros(*batch, 1, dtype=torch.bool),
        }
        return data.set("next", TensorDict(following, batch, device=device))

    def _create_loss(self, td_est=None, device="cpu", discrete=False, **kwargs):
        actor = self._create_mock_actor(device, discrete)
        loss_fn = VMPOLoss(actor, self._create_mock_value(device), **kwargs)
        if td_est is not None:
            loss_fn.make_value_estimator(td_est)
        return loss_fn, actor

    def test_reset_parameters_recursive(self):
        self.reset_parameters_recursive_test(self._create_loss()[0])

    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_vmpo_tensordict_keys(self, td_est):
        default_keys = {
            "action": "action",
            "advantage": "advantage",
            "value_target": "value_target",
            "value": "state_value",
            "sample_log_prob": "action_log_prob",
            "restarting_weight": "restarting_weight",
            "importance_weight": "importance_weight",
            "reward": "reward",
            "done": "done",
            "terminated": "terminated",
        }
        loss_fn, _ = self._create_loss()
        self.tensordict_keys_test(loss_fn, default_keys=default_keys)
        mapping = {
            "advantage": ("advantage", "advantage_test"),
            "value_target": ("value_target", "value_target_test"),
            "reward": ("reward", "reward_test"),
            "done": ("done", ("done", "test")),
            "terminated": ("terminated", ("terminated", "test")),
        }
        self.set_advantage_keys_through_loss_test(loss_fn, td_est, mapping)

    @pytest.mark.parametrize("td_est", [None, *ESTIMATORS])
    @pytest.mark.parametrize("discrete", [False, True])
    @pytest.mark.parametrize("device", get_default_devices())
    def test_vmpo(self, td_est, discrete, device):
        torch.manual_seed(self.seed)
        loss_fn, actor = self._create_loss(td_est, device, discrete)
        data = self._create_mock_data(actor, device=device)
        with check_td_steady(data):
            losses = loss_fn(data)
        names = [key for key in losses.keys() if key.startswith("loss_")]
        sum(losses[name] for name in names).backward()
        networks = [loss_fn.actor_network_params, loss_fn.critic_network_params]
        for parameters in networks:
            for parameter in parameters.parameters():
                assert parameter.grad is not None
                assert parameter.grad.norm() > 0

    @pytest.mark.parametrize("td_est", [None, *ESTIMATORS])
    def test_vmpo_state_dict(self, td_est):
        torch.manual_seed(self.seed)
        state = self._create_loss(td_est)[0].state_dict()
        self._create_loss(td_est)[0].load_state_dict(state)

    def test_vmpo_nested_keys(self):
        key, value = ("agent", "observation"), ("agent", "state_value")
        torch.manual_seed(self.seed)
        actor = self._create_mock_actor(key=key)
        loss_fn = VMPOLoss(actor, self._create_mock_value("cpu", key, value))
        loss_fn.set_keys(value=value, advantage=("agent", "advantage"))
        loss_fn.make_value_estimator(ValueEstimators.GAE)
        data = self._create_mock_data(actor, key=key)
        torch.manual_seed(self.seed)
        flat, _ = self._create_loss(ValueEstimators.GAE)
        renamed = data.clone()
        renamed.rename_key_(key, "observation")
        renamed["next"].rename_key_(key, "observation")
        expected, actual = flat(renamed), loss_fn(data)
        for name in flat.out_keys:
            torch.testing.assert_close(actual[name], expected[name])

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_vmpo_reduction(self, reduction):
        mode = {"scalar_output_mode": "exclude"} if reduction == "none" else {}
        loss_fn, actor = self._create_loss(reduction=reduction, **mode)
        losses = loss_fn(self._create_mock_data(actor, batch=(6, 2)))
        expected = (6, 2) if reduction == "none" else ()
        assert losses["loss_critic"].shape == expected

    def test_vmpo_config(self):
        fields = VMPOLossConfig.__dataclass_fields__
        for name, parameter in signature(VMPOLoss).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            assert name in fields
            if parameter.default is not parameter.empty:
                assert fields[name].default == parameter.default, name
        config = VMPOLossConfig(
            actor_network=self._create_mock_actor(),
            critic_network=self._create_mock_value(),
            gamma=0.5,
        )
        loss_fn = instantiate(config, _convert_="object")
        assert loss_fn.value_estimator.gamma == 0.5


if __name__ == "__main__":
    pytest.main([__file__])
