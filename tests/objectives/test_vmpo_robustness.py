"""What VMPOLoss refuses, and that it says why."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded
from torchrl.modules import Delta, IndependentNormal, ProbabilisticActor, TruncatedNormal

from minerva_torchrl import VMPOLoss
from tests.objectives.base import ACTION_DIM, OBSERVATION_DIM, assert_equal
from tests.objectives.vmpo_problem import (
    CONTINUOUS,
    DISCRETE,
    KINDS,
    make_actor,
    make_critic,
    make_loss,
    make_policy_network,
    make_rollout,
    parameter_names,
    with_advantage,
)

PREFIXES = ("epsilon", "init_alpha")


def independent(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.Independent(D.Normal(loc, scale), 1)


class TestVMPORefuses:
    @pytest.mark.parametrize(
        ("kind", "name", "value", "error", "message"),
        [
            *(("normal", "top_k_fraction", v, ValueError, r"in \(0, 1\]") for v in (0, 1.5, -0.1)),
            ("normal", "top_k_fraction", math.nan, ValueError, r"in \(0, 1\]"),
            *(("normal", "top_k_fraction", v, TypeError, "a number") for v in ("a", True, None)),
            *(
                (kind, name, value, ValueError, "positive and finite")
                for kind, names in (
                    ("normal", ["epsilon", "critic_coeff", "clip_value", "init_temperature"]),
                    ("normal", ["epsilon_mean", "epsilon_stddev", "init_alpha_mean"]),
                    ("one-hot", ["epsilon_policy", "init_alpha_policy"]),
                )
                for name in names
                for value in (0.0, -0.1, math.inf, math.nan)
            ),
            ("normal", "epsilon", "0.1", TypeError, "a number"),
            ("normal", "temperature_update", "newton", ValueError, "'solve', 'gradient'"),
            ("normal", "kl_samples", "best", ValueError, "'all', 'selected'"),
            ("normal", "old_policy", "older", ValueError, "'stored', 'target'"),
            ("normal", "loss_critic_type", "l3", ValueError, "'l2', 'l1', 'smooth_l1'"),
            ("normal", "reduction", "median", ValueError, "'mean', 'sum', 'none'"),
            ("normal", "scalar_output_mode", "list", ValueError, "None, 'exclude', 'non_tensor'"),
        ],
    )
    def test_values(
        self, kind: str, name: str, value: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=f"^{name} must be .*{message}.*, got "):
            VMPOLoss(make_actor(kind), make_critic(), **{name: value})

    @pytest.mark.parametrize(
        ("kind", "name", "value", "message"),
        [
            *(
                (k, f"{n}_mean", 0.1, "constraints are policy; got 0.1")
                for k in DISCRETE
                for n in PREFIXES
            ),
            *(
                (k, f"{n}_stddev", 0.1, "constraints are policy; got 0.1")
                for k in DISCRETE
                for n in PREFIXES
            ),
            *(
                (k, f"{n}_policy", 0.1, "constraints are mean, stddev; got 0.1")
                for k in CONTINUOUS
                for n in PREFIXES
            ),
            *((kind, "per_dim_constraining", True, "not discrete ones") for kind in DISCRETE),
        ],
    )
    def test_other_kind(self, kind: str, name: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{name}.* {message}"):
            VMPOLoss(make_actor(kind), make_critic(), **{name: value})

    @pytest.mark.parametrize("kind", CONTINUOUS)
    def test_per_dim_without_spec(self, kind: str) -> None:
        with pytest.raises(ValueError, match=r"per_dim_constraining=True needs .* action_spec="):
            VMPOLoss(make_actor(kind, spec=None), make_critic(), per_dim_constraining=True)

    def test_distributions(self) -> None:
        """Every other distribution is refused, at the first call if not before."""

        def make(network: nn.Module, names: list[str], distribution: Any) -> ProbabilisticActor:
            module = TensorDictModule(network, ["observation"], names)
            return ProbabilisticActor(module, names, distribution_class=distribution)

        delta = make(nn.Linear(OBSERVATION_DIM, 2), ["param"], Delta)
        with pytest.raises(NotImplementedError, match=r"diagonal Gaussian .*Categorical .*Delta"):
            VMPOLoss(delta, make_critic())
        bounded = functools.partial(TruncatedNormal, low=-1.0, high=1.0)
        truncated = make(make_policy_network("normal"), ["loc", "scale"], bounded)
        with pytest.raises(NotImplementedError, match=r"diagonal Gaussian .*TruncatedNormal"):
            VMPOLoss(truncated, make_critic())(with_advantage(make_rollout()))
        deterministic = TensorDictModule(nn.Linear(OBSERVATION_DIM, 2), ["observation"], ["action"])
        with pytest.raises(TypeError, match="must be a ProbabilisticTensorDictSequential"):
            VMPOLoss(deterministic, make_critic())

    @pytest.mark.parametrize("maker", [functools.partial(IndependentNormal), independent])
    def test_distribution_makers(self, maker: Any) -> None:
        """A factory of a supported distribution gives what the distribution gives."""
        torch.manual_seed(0)
        names = ["loc", "scale"]
        module = TensorDictModule(make_policy_network("normal"), ["observation"], names)
        spec = Bounded(-1.0, 1.0, (ACTION_DIM,))
        actor = ProbabilisticActor(module, names, spec=spec, distribution_class=maker)
        loss, data = VMPOLoss(actor, make_critic()), with_advantage(make_rollout())
        assert_equal(loss(data), make_loss()(data))

    @pytest.mark.parametrize("critic", [nn.Linear(OBSERVATION_DIM, 1), None], ids=["plain", "none"])
    def test_critic(self, critic: Any) -> None:
        with pytest.raises(TypeError, match="critic_network must be a TensorDictModule"):
            VMPOLoss(make_actor("normal"), critic)

    @pytest.mark.parametrize(
        ("kind", "missing"), [(kind, name) for kind in KINDS for name in parameter_names(kind)]
    )
    def test_missing_old_policy(self, kind: str, missing: str) -> None:
        data = with_advantage(make_rollout(kind)).exclude(missing)
        names = re.escape(str(parameter_names(kind)))
        message = rf"\['{missing}'\] are missing.*out_keys={names}.*old_policy='target'"
        with pytest.raises(ValueError, match=message):
            make_loss(kind)(data)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("missing", ["value_target", "action", "observation"])
    def test_missing_entries(self, missing: str, kind: str) -> None:
        data = with_advantage(make_rollout(kind)).exclude(missing)
        with pytest.raises(ValueError, match=rf"VMPOLoss needs the entries \['{missing}'"):
            make_loss(kind)(data)

    @pytest.mark.parametrize("missing", ["observation", "reward", "done", "terminated"])
    def test_missing_for_estimation(self, missing: str) -> None:
        data = make_rollout().exclude(("next", missing))
        with pytest.raises(ValueError, match=rf"needs the entries \[\('next', '{missing}'\)\]"):
            make_loss()(data)
        assert make_loss()(with_advantage(data)).isfinite().all()

    def test_critic_output_shape(self) -> None:
        """When the loss is made if the network says how wide it is, otherwise at its first call."""
        network = nn.Linear(OBSERVATION_DIM, 2)
        critic = TensorDictModule(network, ["observation"], ["state_value"])
        with pytest.raises(ValueError, match=r"must write 1 outputs .* got a last layer of 2"):
            VMPOLoss(make_actor("normal"), critic)
        silent = nn.Sequential(network, nn.Identity())
        critic = TensorDictModule(silent, ["observation"], ["state_value"])
        loss = VMPOLoss(make_actor("normal"), critic)
        message = r"critic_network must write 'state_value' of shape \(4, 5, 1\).*got \(4, 5, 2\)"
        with pytest.raises(ValueError, match=message):
            loss(with_advantage(make_rollout()))

    @pytest.mark.parametrize("key", ["advantage", "value_target"])
    def test_flat_advantage_raises(self, key: str) -> None:
        data = with_advantage(make_rollout())
        data[key] = data[key].squeeze(-1)
        with pytest.raises(ValueError, match=rf"'{key}' must have shape \(4, 5, 1\).*got \(4, 5\)"):
            make_loss()(data)

    @pytest.mark.parametrize("kind", CONTINUOUS)
    def test_action_size(self, kind: str) -> None:
        """An action of another size would be broadcast."""
        data = with_advantage(make_rollout(kind))
        data["action"] = data["action"][..., :1]
        with pytest.raises(ValueError, match="'action' must have"):
            make_loss(kind)(data)

    @pytest.mark.parametrize(
        ("kind", "shape", "message"),
        [
            ("categorical", (4, 5, 1), r"'action' is an index and must have shape \(4, 5\), got"),
            ("one-hot", (4, 5), r"'action' is one-hot and must have shape \(4, 5, 'A'\), got"),
        ],
    )
    def test_action_shape(self, kind: str, shape: tuple[int, ...], message: str) -> None:
        data = with_advantage(make_rollout(kind))
        data["action"] = torch.zeros(shape, dtype=torch.long)
        with pytest.raises(ValueError, match=message):
            make_loss(kind)(data)

    @pytest.mark.parametrize("kind", CONTINUOUS)
    @pytest.mark.parametrize(
        ("key", "value"),
        [("scale", 0.0), ("scale", math.nan), ("loc", math.nan), ("loc", math.inf)],
    )
    def test_degenerate_old_policy(self, key: str, value: float, kind: str) -> None:
        """As frames drawn without the policy have it, or a log-deviation of minus infinity."""
        data = with_advantage(make_rollout(kind))
        data[key][1, 2, 0] = value
        with pytest.raises(ValueError, match=r"old policy's .*finite with positive standard dev"):
            make_loss(kind)(data)
