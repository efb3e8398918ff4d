"""What TorchRL expects of a loss, checked on MPOLoss."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, TanhNormal
from torchrl.objectives import SoftUpdate, ValueEstimators
from torchrl.objectives.value import TD0Estimator, TDLambdaEstimator

from minerva_torchrl import MPOLoss, Retrace
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    LossTestBase,
    assert_equal,
    gradients,
    make_actor,
    make_critic,
    make_mlp,
    make_transitions,
    run,
    total_loss,
    with_updater,
)

POLICY_STATES = ["next", "current", "both"]
ESTIMATORS = [
    ValueEstimators.TD0,
    ValueEstimators.TD1,
    ValueEstimators.TDLambda,
    "retrace",
]
CRITICS = ["single", "count", "list"]


def make_loss(
    *,
    td_est: Any = None,
    distribution_class: Any = IndependentNormal,
    critics: str = "single",
    updater: bool = True,
    seed: int = 0,
    **kwargs: Any,
) -> MPOLoss:
    torch.manual_seed(seed)
    actor = make_actor(distribution_class=distribution_class)
    critic: Any = [make_critic(), make_critic()] if critics == "list" else make_critic()
    num_qvalue_nets = 2 if critics == "count" else 1
    kwargs = {"scalar_output_mode": "exclude"} | kwargs
    loss = MPOLoss(actor, critic, num_qvalue_nets=num_qvalue_nets, **kwargs)
    loss.make_value_estimator(td_est, gamma=0.9)
    return with_updater(loss) if updater else loss


def by_keyword(data: TensorDict) -> dict[str, Tensor]:
    """The entries as keyword arguments: the names of nested ones are joined."""
    return {
        key if isinstance(key, str) else "_".join(key): data.get(key)
        for key in data.keys(True, True)
    }


class TestMPO(LossTestBase):
    loss_parameters: ClassVar = {
        "loss_qvalue": "qvalue_network_params",
        "loss_actor": "actor_network_params",
        "loss_temperature": "duals.temperature",
        "loss_alpha_mean": "duals.alpha_mean",
        "loss_alpha_stddev": "duals.alpha_stddev",
        "loss_penalty_temperature": "duals.penalty_temperature",
    }

    def make_loss(self, **kwargs: Any) -> MPOLoss:
        return make_loss(**kwargs)

    def make_data(self, *batch: int) -> TensorDict:
        return make_transitions(*(batch or (8,)))

    # A call --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("distribution_class", [IndependentNormal, TanhNormal])
    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    @pytest.mark.parametrize("critics", CRITICS)
    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_mpo(
        self, td_est: Any, critics: str, policy_states: Any, distribution_class: Any
    ) -> None:
        loss = self.make_loss(
            td_est=td_est,
            critics=critics,
            policy_states=policy_states,
            distribution_class=distribution_class,
        )
        data = self.make_data(4, 3)
        if distribution_class is TanhNormal:
            data["action"] = data["action"].tanh()
        with self.input_steady_test(data, added=("td_error",)):
            output = loss(data)
        assert sorted(output.keys()) == sorted(loss.out_keys)
        assert all(value.isfinite().all() and value.shape == () for value in output.values())
        assert data["td_error"].shape == data.shape
        assert not data["td_error"].requires_grad
        assert (data["td_error"] >= 0).all()
        total_loss(output).backward()
        for name, parameter in loss.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.norm() > 0, name

    @pytest.mark.parametrize("batch", [(8,), (4, 3), (2, 3, 2)])
    def test_mpo_batch_shapes(self, batch: tuple[int, ...]) -> None:
        loss = self.make_loss(reduction="none")
        data = self.make_data(*batch)
        output = loss(data)
        assert output.shape == batch
        assert data["td_error"].shape == batch

    @pytest.mark.parametrize(
        "td_est", [ValueEstimators.GAE, ValueEstimators.VTrace, ValueEstimators.MAGAE, "vtrace"]
    )
    def test_mpo_unsupported_estimators(self, td_est: Any) -> None:
        loss = self.make_loss()
        supported = r"Supported value types: \['TD0', 'TD1', 'TDLambda', 'retrace'\]"
        with pytest.raises(NotImplementedError, match=supported):
            loss.make_value_estimator(td_est)
        assert isinstance(loss.value_estimator, TD0Estimator)

    def test_mpo_unknown_estimator(self) -> None:
        allowed = "Allowed: 'td0', 'td1', 'tdlambda', 'retrace', an"
        loss = self.make_loss()
        with pytest.raises(ValueError, match=f"no value estimator 'unheard of'. {allowed}"):
            loss.make_value_estimator("unheard of")
        with pytest.raises(ValueError, match=f"'retrac'. Did you mean 'retrace'\\? {allowed}"):
            loss.make_value_estimator("retrac")

    def test_mpo_make_value_estimator(self) -> None:
        loss = self.make_loss()
        assert isinstance(loss.value_estimator, TD0Estimator)
        estimator = TDLambdaEstimator(gamma=0.9, lmbda=0.8, value_network=None)
        for value_type, kwargs, kind in (
            (None, {}, TD0Estimator),
            (ValueEstimators.TDLambda, {"lmbda": 0.8}, TDLambdaEstimator),
            ("tdlambda", {}, TDLambdaEstimator),
            ("TD_lambda", {}, TDLambdaEstimator),
            ("retrace", {"lmbda": 0.8}, Retrace),
            (Retrace, {"gamma": 0.9, "value_network": None, "actor_network": None}, Retrace),
            (estimator, {}, TDLambdaEstimator),
        ):
            loss.set_keys(reward="reward_of_this")
            assert loss.make_value_estimator(value_type, **kwargs) is loss
            assert isinstance(loss.value_estimator, kind)
            assert loss.value_estimator.tensor_keys.reward == "reward_of_this"
            if "lmbda" in kwargs:
                assert loss.value_estimator.lmbda.item() == pytest.approx(0.8)
            loss.set_keys(reward=None)
            assert loss(self.make_data(4, 3)).isfinite().all()

    def test_mpo_updater_warning(self) -> None:
        loss = self.make_loss(updater=False)
        with pytest.warns(UserWarning, match="No target network updater has been associated"):
            loss(self.make_data())
        with_updater(loss)
        loss(self.make_data())  # a warning would be an error here

    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_mpo_gradient_isolation(self, td_est: Any, policy_states: Any) -> None:
        loss = self.make_loss(td_est=td_est, policy_states=policy_states, critics="count")
        self.gradient_isolation_test(loss, self.make_data(4, 3))

    def test_mpo_no_duplicates(self) -> None:
        for critics in CRITICS:
            self.no_duplicates_test(self.make_loss(critics=critics))

    # Ensemble ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_mpo_deactivate_vmap(self, td_est: Any) -> None:
        looped, mapped = (
            self.make_loss(td_est=td_est, critics="count", deactivate_vmap=x) for x in (True, False)
        )
        data = self.make_data(4, 3)
        with_loop, with_vmap = run(looped, data.clone()), run(mapped, data.clone())
        assert_equal(with_loop, with_vmap)
        assert_equal(
            gradients(looped, total_loss(with_loop)), gradients(mapped, total_loss(with_vmap))
        )

    def test_mpo_vmap_randomness(self) -> None:
        class Noisy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + torch.randn_like(x)

        network = nn.Sequential(make_mlp(OBSERVATION_DIM + ACTION_DIM, 1), Noisy())
        critic = make_critic(Concatenate(network))
        loss = with_updater(MPOLoss(make_actor(), [critic, copy.deepcopy(critic)]))
        data = self.make_data()
        with pytest.raises(RuntimeError, match="randomness"):
            loss(data)
        values = {}
        for randomness in ("same", "different"):
            loss.set_vmap_randomness(randomness)
            assert loss(data).isfinite().all()
            values[randomness] = loss._online_outputs(data)[..., 0, 0]
        assert torch.equal(*values["same"])
        assert not torch.isclose(*values["different"]).any()

    def test_mpo_dropout(self) -> None:
        network = nn.Sequential(make_mlp(OBSERVATION_DIM + ACTION_DIM, 8), nn.Dropout(0.5))
        critic = make_critic(Concatenate(nn.Sequential(network, nn.Linear(8, 1))))
        loss = with_updater(MPOLoss(make_actor(), critic, num_qvalue_nets=2))
        loss.set_vmap_randomness("different")
        data = self.make_data()
        total_loss(loss(data)).backward()
        assert all(p.grad.isfinite().all() for p in loss.parameters())

    def test_mpo_initial_weights(self) -> None:
        critics = [make_critic(), make_critic(), make_critic()]
        for critic in critics:
            for module in critic.modules():
                if isinstance(module, nn.Linear):
                    nn.init.orthogonal_(module.weight)
        stored = [{k: p.detach().clone() for k, p in c.named_parameters()} for c in critics]
        key = "module.network.0.weight"

        loss = MPOLoss(make_actor(), critics[0])
        assert_equal(dict(loss.qvalue_network_params.named_parameters()), stored[0], 0, 0)

        loss = MPOLoss(make_actor(), critics)
        assert loss.num_qvalue_nets == 3
        members = dict(loss.qvalue_network_params.named_parameters())
        for i in range(3):
            assert_equal({k: p[i] for k, p in members.items()}, stored[i], 0, 0)

        loss = MPOLoss(make_actor(), critics[0], num_qvalue_nets=3)
        members = dict(loss.qvalue_network_params.named_parameters())
        assert_equal({k: p[0] for k, p in members.items()}, stored[0], 0, 0)
        for weight in members.values():
            assert not torch.isclose(weight[0], weight[1]).any()
            assert not torch.isclose(weight[1], weight[2]).any()
        first = members[key][0]
        torch.testing.assert_close(first.T @ first, torch.eye(first.shape[1]))
        assert_equal({k: p.detach() for k, p in critics[0].named_parameters()}, stored[0], 0, 0)
        # The copies are drawn as nn.Linear draws: within 1 / sqrt(inputs).
        assert members[key][1:].abs().max() <= (OBSERVATION_DIM + ACTION_DIM) ** -0.5

    def test_mpo_shared_actor(self) -> None:
        actor = make_actor()
        loss = with_updater(MPOLoss(actor, make_critic()))
        shared = {p.data_ptr() for p in actor.parameters()}
        assert {p.data_ptr() for p in loss.actor_network_params.parameters()} == shared

    # Targets -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("critics", CRITICS)
    def test_mpo_list_qvalue_networks(self, critics: str) -> None:
        loss = self.make_loss(critics=critics, updater=False)
        updater = SoftUpdate(loss, tau=0.1)
        names = ("actor_network_params", "qvalue_network_params")
        pairs = [(getattr(loss, name), getattr(loss, f"target_{name}")) for name in names]
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        total_loss(loss(self.make_data())).backward()
        before = [(dict(s.clone().items(True, True)), t.clone()) for s, t in pairs]
        optimizer.step()
        for (source, target), (old_source, old_target) in zip(pairs, before, strict=True):
            assert_equal(dict(target.items(True, True)), dict(old_target.items(True, True)), 0, 0)
            assert all((source[k] != old_source[k]).any() for k in old_source)
        updater.step()
        for (source, target), (_, old_target) in zip(pairs, before, strict=True):
            for key, value in old_target.items(True, True):
                expected = 0.9 * value + 0.1 * source[key].detach()
                torch.testing.assert_close(target[key], expected)

    @pytest.mark.parametrize("name", ["actor", "qvalue"])
    def test_mpo_delay(self, name: str) -> None:
        loss = self.make_loss(**{f"delay_{name}": False})
        params = getattr(loss, f"{name}_network_params")
        with torch.no_grad():
            for parameter in params.parameters():
                parameter.add_(1.0)
        targets = dict(getattr(loss, f"target_{name}_network_params").items(True, True))
        for key, target in targets.items():
            assert torch.equal(target, params[key].detach())
            assert not target.requires_grad
        assert total_loss(loss(self.make_data())).isfinite()

    # State ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("critics", CRITICS)
    @pytest.mark.parametrize("td_est", [None, "retrace"])
    def test_mpo_state_dict(self, td_est: Any, critics: str) -> None:
        loss = self.make_loss(td_est=td_est, critics=critics)
        other = self.make_loss(td_est=td_est, critics=critics, seed=1)
        self.state_dict_test(loss, other, self.make_data(4, 3))

    @pytest.mark.parametrize("saved", ESTIMATORS)
    @pytest.mark.parametrize("present", ESTIMATORS)
    def test_mpo_state_dict_estimators(self, saved: Any, present: Any) -> None:
        """A state can be loaded whatever estimator it was saved with; shared settings are taken."""
        source = self.make_loss().make_value_estimator(saved, gamma=0.8)
        target = self.make_loss(seed=1).make_value_estimator(present, gamma=0.9)
        had_lmbda = getattr(target.value_estimator, "lmbda", None)
        target.load_state_dict(source.state_dict())
        assert target.value_estimator.gamma == source.value_estimator.gamma
        lmbda = getattr(source.value_estimator, "lmbda", had_lmbda)
        assert had_lmbda is None or target.value_estimator.lmbda == lmbda
        target.make_value_estimator(saved, gamma=0.8)
        data = self.make_data(4, 3)
        assert_equal(run(source, data.clone()), run(target, data.clone()))

    def test_mpo_state_dict_nested(self) -> None:
        modules = [nn.ModuleDict({"loss": self.make_loss(td_est=e)}) for e in ("retrace", None)]
        modules[1].load_state_dict(modules[0].state_dict())
        modules[0].load_state_dict(modules[1].state_dict())
        state = modules[0].state_dict()
        with pytest.raises(RuntimeError, match="Unexpected key"):
            modules[1].load_state_dict(state | {"loss.unheard_of": torch.ones(())})
        state.pop("loss.duals.temperature.raw")
        with pytest.raises(RuntimeError, match="Missing key"):
            modules[1].load_state_dict(state)

    def test_mpo_deepcopy(self) -> None:
        loss = self.make_loss(critics="count", td_est="retrace")
        data = self.make_data(4, 3)
        copied = copy.deepcopy(loss)
        expected = run(loss, data.clone())
        assert_equal(run(copied, data.clone()), expected)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.add_(1.0)
        assert_equal(run(loss, data.clone()), expected)
        assert not torch.isclose(run(copied, data)["loss_actor"], expected["loss_actor"])

    def test_reset_parameters_recursive(self) -> None:
        inits = {"temperature": 2.0, "alpha_mean": 3.0, "alpha_stddev": 4.0}
        for critics in CRITICS:
            loss = self.make_loss(critics=critics, **{f"init_{k}": v for k, v in inits.items()})
            self.reset_parameters_recursive_test(loss)
        for name, init in inits.items():
            torch.testing.assert_close(loss.dual_values()[name], torch.tensor(init))

    @pytest.mark.parametrize("critics", CRITICS)
    def test_mpo_reset_range(self, critics: str) -> None:
        """The members of an ensemble are reset as each of them by itself would be."""
        loss = self.make_loss(critics=critics)
        loss.reset_parameters_recursive()
        bound = (OBSERVATION_DIM + ACTION_DIM) ** -0.5  # of nn.Linear
        for params in (loss.qvalue_network_params, loss.target_qvalue_network_params):
            largest = params["module", "network", "0", "weight"].abs().max().item()
            assert 0.8 * bound < largest <= bound

    def test_mpo_dtype(self) -> None:
        """In double precision nothing falls back to single precision."""
        loss = self.make_loss(critics="count").double()
        data = make_transitions(8, dtype=torch.float64)
        output = loss(data)
        assert {value.dtype for value in output.values()} == {torch.float64}
        assert data["td_error"].dtype == torch.float64

    @pytest.mark.parametrize("td_est", [None, "retrace"])
    def test_mpo_spec_dtype(self, td_est: Any) -> None:
        """Bounds in double precision, as dm_control has them, do not promote the actions."""
        spec = Bounded(-1.0, 1.0, (ACTION_DIM,), dtype=torch.float64)
        loss = with_updater(MPOLoss(make_actor(spec=spec), make_critic()))
        loss.make_value_estimator(td_est)
        output = loss(self.make_data(4, 3))
        assert {value.dtype for value in output.values()} == {torch.float32}

    # Keys ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_mpo_tensordict_keys(self, td_est: Any) -> None:
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
        self.tensordict_keys_test(self.make_loss(), default_keys, td_est=td_est)
        mapping = {
            "reward": ("reward", "reward_test"),
            "done": ("done", ("agent", "done_test")),
            "terminated": ("terminated", "terminated_test"),
        }
        if td_est == "retrace":
            mapping["log_prob"] = ("sample_log_prob", "log_prob_test")
            mapping["action"] = ("action", "action_test")
            mapping["state_action_value"] = ("value", "state_action_value_test")
        else:
            mapping["value"] = ("value", "value_test")
        self.set_advantage_keys_through_loss_test(self.make_loss(), td_est, mapping)

    def test_mpo_in_keys(self) -> None:
        loss = self.make_loss()
        expected = {
            "observation",
            "action",
            ("next", "observation"),
            ("next", "reward"),
            ("next", "done"),
            ("next", "terminated"),
        }
        assert set(loss.in_keys) == expected
        loss.make_value_estimator("retrace")
        assert set(loss.in_keys) == expected | {"action_log_prob"}
        loss.set_keys(reward="r")
        assert ("next", "r") in loss.in_keys
        assert ("next", "reward") not in loss.in_keys

    @pytest.mark.parametrize("critics", CRITICS)
    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_mpo_tensordict_keys_run(self, td_est: Any, critics: str) -> None:
        """Nested names give what the default names give, and leave the data alone."""
        flat = self.make_loss(td_est=td_est, critics=critics)
        observation, action = ("agent", "observation"), ("agent", "action")
        value = ("agent", "q")
        torch.manual_seed(0)
        actor = make_actor(observation_key=observation, action_key=action)
        networks = [
            make_critic(observation_key=observation, action_key=action, value_key=value)
            for _ in range(2 if critics == "list" else 1)
        ]
        nested = MPOLoss(
            actor,
            networks if critics == "list" else networks[0],
            num_qvalue_nets=2 if critics == "count" else 1,
        )
        assert nested.action_penalization, "the spec is found under the nested name"
        names = {name: ("agent", name) for name in ("reward", "done", "terminated")}
        nested.set_keys(
            state_action_value=value, priority=("agent", "p"), priority_weight="weight", **names
        )
        with_updater(nested.make_value_estimator(td_est, gamma=0.9))

        data = self.make_data(4, 3)
        data["action"] *= 3
        data["priority_weight"] = torch.rand(4, 3)
        renamed = TensorDict(
            {
                "agent": data.select("observation", "action", "action_log_prob"),
                "weight": data["priority_weight"],
                "next": {"agent": data["next"]},
            },
            data.shape,
        )
        expected = run(flat, data)
        with self.input_steady_test(renamed, added=(("agent", "p"),)):
            actual = run(nested, renamed)
        assert_equal(actual, expected)
        torch.testing.assert_close(renamed["agent", "p"], data["td_error"])

    def test_mpo_nested_priority_weight(self) -> None:
        loss, nested = self.make_loss(), self.make_loss()
        nested.set_keys(priority_weight=("replay", "weight"))
        data = self.make_data()
        data["priority_weight"] = data["replay", "weight"] = torch.rand(8)
        assert_equal(run(nested, data.clone()), run(loss, data.clone()))

    @pytest.mark.parametrize("td_est", ESTIMATORS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_mpo_notensordict(self, reduction: Any, td_est: Any) -> None:
        loss = self.make_loss(td_est=td_est, reduction=reduction)
        # Keyword arguments make a flat batch.
        data = self.make_data(6)
        if td_est != ValueEstimators.TD0:
            with pytest.warns(UserWarning, match="without a time dimension"):
                loss(data.clone())
        expected = run(loss, data.clone())
        arguments = by_keyword(data.select(*loss.in_keys))
        torch.manual_seed(0)
        actual = loss(**arguments)
        assert len(actual) == len(loss.out_keys) == len(expected.keys())
        assert_equal(dict(zip(loss.out_keys, actual, strict=True)), expected)

        loss.select_out_keys("loss_alpha_mean", "loss_qvalue")
        torch.manual_seed(0)
        alpha_mean, qvalue = loss(**arguments)
        torch.testing.assert_close(alpha_mean, expected["loss_alpha_mean"])
        torch.testing.assert_close(qvalue, expected["loss_qvalue"])
