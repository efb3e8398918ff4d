from __future__ import annotations

from inspect import signature

import pytest
import torch
from _objectives_common import _check_td_steady as check_td_steady, LossModuleTestBase
from hydra.utils import instantiate
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.modules.models import MLP
from torchrl.objectives import MPOLoss, SoftUpdate, ValueEstimators
from torchrl.testing import get_default_devices
from torchrl.trainers.algorithms.configs import MPOLossConfig

ESTIMATORS = [
    ValueEstimators.TD0,
    ValueEstimators.TD1,
    ValueEstimators.TDLambda,
    "retrace",
]


class TestMPO(LossModuleTestBase):
    seed = 0

    def _create_mock_actor(
        self, device="cpu", observation_key="observation", action_key="action"
    ):
        net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()).to(device)
        return ProbabilisticActor(
            TensorDictModule(net, [observation_key], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            out_keys=[action_key],
            spec=Bounded(-1, 1, (2,), device=device),
            distribution_class=IndependentNormal,
            return_log_prob=True,
        )

    def _create_mock_qvalue(
        self,
        device="cpu",
        observation_key="observation",
        action_key="action",
        out_key="state_action_value",
    ):
        return ValueOperator(
            MLP(in_features=5, out_features=1, num_cells=[8], device=device),
            in_keys=[observation_key, action_key],
            out_keys=[out_key],
        )

    def _create_mock_data(self, batch=(4, 3), device="cpu", group=None):
        data = TensorDict(
            {
                "observation": torch.randn(*batch, 3),
                "action": torch.randn(*batch, 2),
                "action_log_prob": -torch.rand(*batch) - 0.1,
                "next": {
                    "observation": torch.randn(*batch, 3),
                    "reward": torch.randn(*batch, 1),
                    "done": torch.zeros(*batch, 1, dtype=torch.bool),
                    "terminated": torch.zeros(*batch, 1, dtype=torch.bool),
                },
            },
            batch,
            device=device,
        )
        if group is None:
            return data
        following = data.pop("next")
        return TensorDict({group: data, "next": {group: following}}, batch, device)

    def _create_loss(self, td_est=None, device="cpu", **kwargs):
        loss_fn = MPOLoss(
            self._create_mock_actor(device), self._create_mock_qvalue(device), **kwargs
        )
        if td_est is not None:
            loss_fn.make_value_estimator(td_est)
        SoftUpdate(loss_fn, eps=0.5)
        return loss_fn

    def test_reset_parameters_recursive(self):
        self.reset_parameters_recursive_test(self._create_loss())

    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_mpo_tensordict_keys(self, td_est):
        default_keys = {
            "action": "action",
            "value": "state_value",
            "state_action_value": "state_action_value",
            "action_value": "action_value",
            "value_target": "value_target",
            "log_prob": "action_log_prob",
            "priority": "td_error",
            "priority_weight": "priority_weight",
            "reward": "reward",
            "done": "done",
            "terminated": "terminated",
        }
        loss_fn = self._create_loss()
        self.tensordict_keys_test(loss_fn, default_keys=default_keys)
        mapping = {
            "reward": ("reward", "reward_test"),
            "done": ("done", ("done", "test")),
            "terminated": ("terminated", ("terminated", "test")),
        }
        self.set_advantage_keys_through_loss_test(loss_fn, td_est, mapping)

    @pytest.mark.parametrize("td_est", [None, *ESTIMATORS])
    @pytest.mark.parametrize("num_qvalue", [1, 2])
    @pytest.mark.parametrize("device", get_default_devices())
    def test_mpo(self, td_est, num_qvalue, device):
        torch.manual_seed(self.seed)
        loss_fn = self._create_loss(td_est, device, num_qvalue_nets=num_qvalue)
        data = self._create_mock_data(device=device)
        with check_td_steady(data):
            losses = loss_fn(data)
        names = [key for key in losses.keys() if key.startswith("loss_")]
        sum(losses[name] for name in names).backward()
        for name, parameter in loss_fn.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.norm() > 0, name

    def test_mpo_gradients_are_apart(self):
        torch.manual_seed(self.seed)
        loss_fn = self._create_loss()
        losses = loss_fn(self._create_mock_data())
        losses["loss_qvalue"].backward(retain_graph=True)
        actor = list(loss_fn.actor_network_params.parameters())
        assert all(parameter.grad is None for parameter in actor)
        loss_fn.zero_grad()
        losses["loss_actor"].backward()
        assert all(parameter.grad is not None for parameter in actor)
        for parameter in loss_fn.qvalue_network_params.parameters():
            assert parameter.grad is None or not parameter.grad.any()

    @pytest.mark.parametrize("td_est", [None, *ESTIMATORS])
    def test_mpo_state_dict(self, td_est):
        torch.manual_seed(self.seed)
        state = self._create_loss(td_est).state_dict()
        self._create_loss(td_est).load_state_dict(state)

    @pytest.mark.parametrize("td_est", [ValueEstimators.TD0, "retrace"])
    def test_mpo_nested_keys(self, td_est):
        group, observation, action = "agent", ("agent", "observation"), ("agent", "action")
        value = (group, "state_action_value")
        torch.manual_seed(self.seed)
        flat = self._create_loss(td_est)
        torch.manual_seed(self.seed)
        loss_fn = MPOLoss(
            self._create_mock_actor(observation_key=observation, action_key=action),
            self._create_mock_qvalue("cpu", observation, action, value),
        )
        names = {name: (group, name) for name in ("reward", "done", "terminated")}
        loss_fn.set_keys(state_action_value=value, **names)
        loss_fn.make_value_estimator(td_est)
        SoftUpdate(loss_fn, eps=0.5)
        results = []
        for module, place in ((flat, None), (loss_fn, group)):
            torch.manual_seed(self.seed + 1)
            results.append(module(self._create_mock_data(group=place)))
        for key in flat.out_keys:
            torch.testing.assert_close(results[0][key], results[1][key])

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_mpo_reduction(self, reduction):
        mode = {"scalar_output_mode": "exclude"} if reduction == "none" else {}
        loss_fn = self._create_loss(reduction=reduction, **mode)
        losses = loss_fn(self._create_mock_data(batch=(6,)))
        expected = (6,) if reduction == "none" else ()
        assert losses["loss_qvalue"].shape == expected
        assert losses["loss_actor"].shape == expected

    def test_mpo_notensordict(self):
        loss_fn = self._create_loss()
        data = self._create_mock_data(batch=(6,))
        values = {
            key if isinstance(key, str) else "_".join(key): data.get(key)
            for key in loss_fn.in_keys
        }
        torch.manual_seed(self.seed)
        expected = loss_fn(data)
        torch.manual_seed(self.seed)
        actual = dict(zip(loss_fn.out_keys, loss_fn(**values)))
        for key in loss_fn.out_keys:
            torch.testing.assert_close(actual[key], expected[key])

    def test_mpo_config(self):
        fields = MPOLossConfig.__dataclass_fields__
        for name, parameter in signature(MPOLoss).parameters.items():
            assert name in fields
            if parameter.default is not parameter.empty:
                assert fields[name].default == parameter.default, name
        config = MPOLossConfig(
            actor_network=self._create_mock_actor(),
            qvalue_network=self._create_mock_qvalue(),
            value_estimator="retrace",
            lmbda=0.5,
        )
        loss_fn = instantiate(config, _convert_="object")
        assert loss_fn.value_estimator.lmbda == 0.5


if __name__ == "__main__":
    pytest.main([__file__])
