"""What TorchRL expects of a loss, checked on VMPOLoss."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.objectives import HardUpdate, ValueEstimators
from torchrl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator

from minerva_torchrl import VMPOLoss
from tests.objectives import vmpo_problem
from tests.objectives.base import (
    OBSERVATION_DIM,
    LossTestBase,
    assert_equal,
    gradients,
    total_loss,
)
from tests.objectives.vmpo_problem import (
    CONTINUOUS,
    GAMMA,
    KINDS,
    by_keyword,
    loss_keys,
    make_actor,
    make_critic,
    make_loss,
    make_rollout,
    make_shared,
    parameter_names,
    with_advantage,
)

ESTIMATORS = {
    ValueEstimators.GAE: GAE,
    ValueEstimators.TD0: TD0Estimator,
    ValueEstimators.TD1: TD1Estimator,
    ValueEstimators.TDLambda: TDLambdaEstimator,
    "gae": GAE,
    "td0": TD0Estimator,
    "dae": TD0Estimator,
    "DAE": TD0Estimator,
    "td1": TD1Estimator,
    "returns": TD1Estimator,
    "tdlambda": TDLambdaEstimator,
}
PREFIXES = ("epsilon", "init_alpha")
ENUMS = [e for e in ESTIMATORS if isinstance(e, ValueEstimators)]
WRITTEN = ("advantage", "value_target", "state_value", ("next", "state_value"))


def make_loss_without_estimator() -> VMPOLoss:
    return VMPOLoss(make_actor("normal"), make_critic())


class TestVMPO(LossTestBase):
    loss_parameters: ClassVar = {
        "loss_actor": "actor_network_params",
        "loss_critic": "critic_network_params",
        "loss_temperature": "duals.temperature",
        "loss_alpha_mean": "duals.alpha_mean",
        "loss_alpha_stddev": "duals.alpha_stddev",
        "loss_alpha_policy": "duals.alpha_policy",
    }

    def make_loss(self, **kwargs: Any) -> VMPOLoss:
        return make_loss(**kwargs)

    def make_data(self, *batch: int) -> TensorDict:
        return make_rollout("normal", *batch)

    # A call --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("td_est", ESTIMATORS, ids=str)
    def test_vmpo(self, td_est: Any, kind: str) -> None:
        loss = make_loss(kind, td_est)
        assert type(loss.value_estimator) is ESTIMATORS[td_est]
        data = make_rollout(kind)
        with self.input_steady_test(data, added=WRITTEN):
            output = loss(data)
        assert sorted(output.keys()) == sorted(loss.out_keys)
        assert set(loss_keys(kind)) <= set(output.keys())
        assert all(value.isfinite() and value.shape == () for value in output.values())
        total_loss(output).backward()
        for name, parameter in loss.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert parameter.grad.norm() > 0, name
        assert not loss.temperature.raw.requires_grad  # it is solved for

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("temperature_update", ["solve", "gradient"])
    def test_vmpo_gradient_isolation(self, temperature_update: Any, kind: str) -> None:
        loss = make_loss(kind, temperature_update=temperature_update)
        if temperature_update == "gradient":
            self.gradient_isolation_test(loss, make_rollout(kind))
            return
        output = loss(make_rollout(kind))
        assert not output["loss_temperature"].requires_grad
        for key in set(loss_keys(kind)) - {"loss_temperature"}:
            reached = {name for name, g in gradients(loss, output[key]).items() if g.any()}
            own = {n for n, _ in loss.named_parameters() if n.startswith(self.loss_parameters[key])}
            assert reached == own

    @pytest.mark.parametrize("batch", [(12,), (4, 3), (2, 3, 2)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_vmpo_batch_shapes(self, kind: str, batch: tuple[int, ...]) -> None:
        """The batch is one set of samples, whatever its shape."""
        flat = with_advantage(make_rollout(kind, 12))
        expected = make_loss(kind)(flat.clone())
        assert_equal(make_loss(kind)(flat.reshape(batch)), expected)
        assert make_loss(kind, reduction="none")(flat.reshape(batch)).shape == batch

    @pytest.mark.parametrize(
        ("td_est", "message"),
        [
            (ValueEstimators.MAGAE, r"Supported value types: \['GAE', 'TD0', 'TD1', 'TDLambda'\]"),
            # On data of the policy itself it would be TD(1).
            (ValueEstimators.VTrace, "VMPOLoss takes no V-trace: its data is that of the policy"),
            ("vtrace", "VMPOLoss takes no V-trace.*Use GAE, TD0, TD1 or TDLambda"),
        ],
    )
    def test_vmpo_unsupported_estimators(self, td_est: Any, message: str) -> None:
        loss = make_loss()
        with pytest.raises(NotImplementedError, match=message):
            loss.make_value_estimator(td_est)
        with pytest.raises(ValueError, match=r"VMPOLoss .* 'gea'. Did you mean 'gae'\?"):
            loss.make_value_estimator("gea")
        assert isinstance(loss.value_estimator, GAE)

    def test_vmpo_make_value_estimator(self) -> None:
        loss = make_loss()
        instance = TDLambdaEstimator(gamma=0.5, lmbda=0.8, value_network=loss.critic_network)
        by_class = {"gamma": 0.5, "lmbda": 0.8, "value_network": loss.critic_network}
        for value_type, kwargs, kind in (
            (None, {"gamma": 0.5}, GAE),
            ("gae", {"gamma": 0.5, "lmbda": 0.8}, GAE),
            ("returns", {"gamma": 0.5}, TD1Estimator),
            (TDLambdaEstimator, by_class, TDLambdaEstimator),
            (instance, {}, TDLambdaEstimator),
        ):
            loss.set_keys(reward="reward_of_this")
            assert loss.make_value_estimator(value_type, **kwargs) is loss
            assert type(loss.value_estimator) is kind
            assert loss.value_estimator.gamma == 0.5
            assert "lmbda" not in kwargs or loss.value_estimator.lmbda.item() == pytest.approx(0.8)
            assert loss.value_estimator.tensor_keys.reward == "reward_of_this"
            loss.set_keys(reward=None)
            assert loss(make_rollout()).isfinite().all()

    @pytest.mark.parametrize("td_est", ENUMS, ids=str)
    def test_vmpo_advantage_inside(self, td_est: Any) -> None:
        """Advantages are estimated where there are none, and taken as they are where there are."""
        loss, data = make_loss(td_est=td_est), make_rollout()
        estimated = data.clone()
        params = loss.critic_network_params.detach()
        loss.value_estimator(estimated, params=params, target_params=params)
        output = loss(data)
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(data[key], estimated[key])
            assert not data[key].requires_grad

        data["advantage"] = data["advantage"].flip(1)
        data["value_target"] += 3.0
        with self.input_steady_test(data):
            changed = loss(data)
        assert_equal(changed, make_loss(td_est=td_est)(data.exclude("next")))
        for key in ("loss_actor", "loss_critic"):
            assert not torch.isclose(changed[key], output[key])

    @pytest.mark.parametrize("kind", KINDS)
    def test_vmpo_separate_calls(self, kind: str) -> None:
        """The parts of the loss are those of the whole."""
        loss, data = make_loss(kind), make_rollout(kind)
        output = loss(data.clone())
        actor, actor_metrics = loss.actor_loss(data.clone())
        critic, critic_metrics = loss.critic_loss(data.clone())
        parts = {"loss_actor": actor, "loss_critic": critic, **actor_metrics, **critic_metrics}
        assert_equal(parts, output.select(*parts))

    # Parameters ----------------------------------------------------------------------------------

    def test_vmpo_initial_weights(self) -> None:
        """The networks' weights stay as they are, and stay those of the modules given."""
        for kind in KINDS:
            actor, critic = make_actor(kind), make_critic()
            modules = {"actor_network_params": actor, "critic_network_params": critic}
            before = {name: copy.deepcopy(module) for name, module in modules.items()}
            loss = VMPOLoss(actor, critic)
            for name, module in modules.items():
                for p, q in zip(module.parameters(), before[name].parameters(), strict=True):
                    assert torch.equal(p, q)
                shared = {p.data_ptr() for p in getattr(loss, name).parameters()}
                assert shared == {p.data_ptr() for p in module.parameters()}

    def test_vmpo_no_duplicates(self) -> None:
        for kind in KINDS:
            self.no_duplicates_test(make_loss(kind))

    def test_reset_parameters_recursive(self) -> None:
        for kind in KINDS:
            for old_policy in ("stored", "target"):
                loss = make_loss(kind, old_policy=old_policy, init_temperature=3.0)
                self.reset_parameters_recursive_test(loss)
                values = {k: v.item() for k, v in loss.dual_values().items()}
                alphas = {"alpha_mean": 1.0, "alpha_stddev": 1.0}
                alphas = alphas if kind in CONTINUOUS else {"alpha_policy": 5.0}
                assert values == pytest.approx({"temperature": 3.0, **alphas})

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("temperature_update", ["solve", "gradient"])
    def test_vmpo_state_dict(self, temperature_update: Any, kind: str) -> None:
        losses = [
            make_loss(kind, temperature_update=temperature_update, seed=seed) for seed in (0, 1)
        ]
        self.state_dict_test(*losses, make_rollout(kind))

    @pytest.mark.parametrize("saved", ENUMS, ids=str)
    @pytest.mark.parametrize("present", ENUMS, ids=str)
    def test_vmpo_state_dict_estimators(self, saved: Any, present: Any) -> None:
        """A state can be loaded whatever estimator it was saved with; shared settings are taken."""
        source = make_loss().make_value_estimator(saved, gamma=0.8)
        target = make_loss(seed=1).make_value_estimator(present, gamma=0.9)
        had_lmbda = getattr(target.value_estimator, "lmbda", None)
        target.load_state_dict(source.state_dict())
        assert target.value_estimator.gamma == source.value_estimator.gamma
        lmbda = getattr(source.value_estimator, "lmbda", had_lmbda)
        assert had_lmbda is None or target.value_estimator.lmbda == lmbda
        target.make_value_estimator(saved, gamma=0.8)
        assert_equal(source(make_rollout()), target(make_rollout()))

    @pytest.mark.parametrize("kind", KINDS)
    def test_vmpo_deepcopy(self, kind: str) -> None:
        loss, data = make_loss(kind), make_rollout(kind)
        expected = loss(data.clone())
        copied = copy.deepcopy(loss)
        assert_equal(copied(data.clone()), expected)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.add_(0.5)
        assert_equal(loss(data.clone()), expected)
        changed = copied(data.clone())
        assert not torch.isclose(changed["loss_actor"], expected["loss_actor"])
        assert not torch.isclose(changed["loss_critic"], expected["loss_critic"])

    def test_vmpo_dtype(self) -> None:
        """In double precision nothing falls back to single precision."""
        for kind in KINDS:
            output = make_loss(kind).double()(make_rollout(kind, dtype=torch.float64))
            assert {k: v.dtype for k, v in output.items() if v.dtype != torch.float64} == {}

    def test_vmpo_schedulable_bounds(self) -> None:
        """Bounds are set in place and take effect at once."""
        for kind in KINDS:
            loss = make_loss(kind, temperature_update="gradient")
            bounds = {f"epsilon_{key.removeprefix('loss_alpha_')}": key for key in loss_keys(kind)}
            bounds = {k: v for k, v in bounds.items() if "alpha" in v}
            data = with_advantage(make_rollout(kind))
            before = loss(data)
            for name, key in {**bounds, "epsilon": "loss_temperature"}.items():
                buffer, value = getattr(loss, name), getattr(loss, name).item()
                setattr(loss, name, value + 0.5)
                assert getattr(loss, name) is buffer
                dual = loss.temperature if name == "epsilon" else getattr(loss, key[5:])
                torch.testing.assert_close(loss(data)[key], before[key] + 0.5 * dual())
            loss.critic_coeff = 1.5
            torch.testing.assert_close(loss(data)["loss_critic"], 3 * before["loss_critic"])

    # Old policy ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    def test_vmpo_target(self, kind: str) -> None:
        """With a target actor, divergences are from it and the stored parameters are not read."""
        loss = make_loss(kind, old_policy="target")
        data = with_advantage(make_rollout(kind)).exclude(*parameter_names(kind))
        assert not set(parameter_names(kind)) & set(loss.in_keys)
        with pytest.warns(UserWarning, match="No target network updater has been associated"):
            loss(data)
        updater = HardUpdate(loss, value_network_update_interval=1)
        kls = [key for key in loss.out_keys if key.startswith("kl_") and key.count("_") == 1]
        assert all(loss(data)[key] == 0 for key in kls)
        stored = make_loss(kind)  # with the same networks
        with torch.no_grad():
            written = stored.actor_network(data.clone()).select(*parameter_names(kind))
            for loss_fn in (loss, stored):
                torch.manual_seed(1)
                for parameter in loss_fn.actor_network_params.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
        moved = loss(data)
        assert all(moved[key] > 0 for key in kls)
        assert_equal(stored(data.clone().update(written)), moved)
        updater.step()
        assert all(loss(data)[key] > 0 for key in kls)
        updater.step()
        assert all(loss(data)[key] == 0 for key in kls)

    # Shared networks -----------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("by", ["sequence", "operator"])
    @pytest.mark.parametrize("separate_losses", [False, True])
    def test_vmpo_shared(self, separate_losses: bool, by: str, kind: str) -> None:
        encoder, actor, critic = make_shared(kind, by)
        loss = VMPOLoss(actor, critic, separate_losses=separate_losses)
        data = make_rollout(kind)
        output = loss(data)
        assert output.isfinite().all()
        weights = list(encoder.parameters())
        by_actor = torch.autograd.grad(output["loss_actor"], weights, retain_graph=True)
        assert all(g.any() for g in by_actor)
        output["loss_critic"].backward()
        assert all((p.grad is None) is separate_losses for p in weights)
        heads = [p for p in critic.parameters() if all(p is not w for w in weights)]
        assert all(p.grad.any() for p in heads)
        assert data["advantage"].isfinite().all()

    # Keys ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("td_est", ENUMS, ids=str)
    def test_vmpo_tensordict_keys(self, td_est: Any) -> None:
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

        # Without an estimator the names are free; it is made when it is needed.
        self.tensordict_keys_test(make_loss_without_estimator(), default_keys)

        class Repeat(nn.Linear):
            def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
                return (super().forward(observation),) * 4

        # The estimator accepts no name for the value that the critic does not write.
        names = ["state_value", "value_test", ("nested", "value"), ("agent", "value")]
        critic = TensorDictModule(Repeat(OBSERVATION_DIM, 1), ["observation"], names)
        loss = VMPOLoss(make_actor("normal"), critic)
        self.tensordict_keys_test(loss, default_keys, td_est=td_est)
        passed_on = ("advantage", "value_target", "value", "reward", "done", "terminated")
        mapping: dict[str, Any] = {name: (name, ("agent", name)) for name in passed_on}
        self.set_advantage_keys_through_loss_test(loss, td_est, mapping)

    def test_vmpo_in_keys(self) -> None:
        for kind in KINDS:
            loss = make_loss(kind)
            following = {("next", k) for k in ("observation", "reward", "done", "terminated")}
            assert set(loss.in_keys) == {
                "observation", "action", *parameter_names(kind), *following
            }  # fmt: skip
            loss.set_keys(reward=("agent", "r"), action="a")
            assert {("next", "agent", "r"), "a"} <= set(loss.in_keys)
            assert not {("next", "reward"), "action"} & set(loss.in_keys)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("td_est", ENUMS, ids=str)
    @pytest.mark.parametrize("value_key", ["state_value", ("agent", "value")], ids=str)
    def test_vmpo_tensordict_keys_run(self, value_key: Any, td_est: Any, kind: str) -> None:
        """Nested names give what the default names give, and are the only ones written."""
        torch.manual_seed(0)
        actor = make_actor(kind, agent="agent")
        critic = make_critic(observation_key=("agent", "observation"), value_key=value_key)
        nested = VMPOLoss(actor, critic)
        assert nested.tensor_keys.action == ("agent", "action")
        settings = ("advantage", "value_target", "reward", "done", "terminated")
        settings += ("restarting_weight", "importance_weight")
        nested.set_keys(value=value_key, **{name: ("agent", name) for name in settings})
        nested.make_value_estimator(td_est, gamma=GAMMA)
        flat, data = make_loss(kind, td_est), make_rollout(kind)
        data["restarting_weight"] = (torch.rand(4, 5) < 0.7).float()
        data["importance_weight"] = torch.rand(4, 5)
        renamed = TensorDict(
            {"agent": data.exclude("next").clone(), "next": {"agent": data["next"].clone()}},
            data.shape,
        )
        added = [("agent", "advantage"), ("agent", "value_target"), value_key, ("next", value_key)]
        with self.input_steady_test(renamed, added=tuple(added)):
            actual = nested(renamed)
        assert_equal(actual, flat(data))
        torch.testing.assert_close(renamed["agent", "advantage"], data["advantage"])
        assert ("saturation" in actual.keys()) is (kind in CONTINUOUS)  # the spec was found

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("td_est", ENUMS, ids=str)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_vmpo_notensordict(self, reduction: Any, td_est: Any, kind: str) -> None:
        loss = make_loss(kind, td_est, reduction=reduction)
        data = make_rollout(kind, 6)  # keyword arguments make a flat batch
        expected = loss(data.clone())
        arguments = by_keyword(data.select(*loss.in_keys))
        actual = loss(**arguments)
        assert len(actual) == len(loss.out_keys) == len(expected.keys())
        assert_equal(dict(zip(loss.out_keys, actual, strict=True)), expected)

        chosen = (loss_keys(kind)[-1], "loss_critic")
        loss.select_out_keys(*chosen)
        for key, value in zip(chosen, loss(**arguments), strict=True):
            torch.testing.assert_close(value, expected[key])

    # Reduction -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("kl_samples", ["all", "selected"])
    def test_vmpo_reduction(self, kl_samples: Any, kind: str) -> None:
        data = with_advantage(make_rollout(kind))
        output = {
            reduction: make_loss(kind, reduction=reduction, kl_samples=kl_samples)(data)
            for reduction in (None, "mean", "sum", "none")
        }
        assert_equal(output[None], output["mean"], 0, 0)
        assert set(output["none"].keys()) == set(loss_keys(kind))
        for key in loss_keys(kind):
            mean, total, elements = (output[r][key] for r in ("mean", "sum", "none"))
            assert elements.shape == data.shape
            assert mean.shape == total.shape == ()
            torch.testing.assert_close(elements.mean(), mean)
            if key == "loss_temperature":  # one number for the batch
                assert (elements == elements[0, 0]).all()
                torch.testing.assert_close(total, mean)
            else:
                assert elements.std() > 0
                torch.testing.assert_close(total, elements.sum())

    @pytest.mark.parametrize("kind", KINDS)
    def test_vmpo_scalar_output_mode(self, kind: str) -> None:
        data = with_advantage(make_rollout(kind))
        scalars = make_loss(kind)(data)
        metrics = set(scalars.keys()) - set(loss_keys(kind))
        match = r"leaves out its 0-d metrics.*scalar_output_mode="
        with pytest.warns(UserWarning, match=match) as warned:
            loss = make_loss(kind, reduction="none", scalar_output_mode=None)
        assert warned[0].filename == vmpo_problem.__file__  # where the loss is made
        assert loss.scalar_output_mode == "exclude"
        for mode, expected in (("exclude", set()), ("non_tensor", metrics)):
            loss = make_loss(kind, reduction="none", scalar_output_mode=mode)
            output = loss(data)
            assert set(output.keys()) == set(loss.out_keys) == set(loss_keys(kind)) | expected
        # Without reduction "none" it changes nothing.
        for mode in (None, "exclude", "non_tensor"):
            assert_equal(make_loss(kind, scalar_output_mode=mode)(data), scalars, 0, 0)
        for key in metrics:
            torch.testing.assert_close(output[key], scalars[key])
