"""A ``CompositeDistribution`` of one part is that part, for both losses."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ValueEstimators

from minerva_torchrl import MPOLoss, VMPOLoss
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    LossTestBase,
    assert_equal,
    gradients,
    make_mlp,
    make_transitions,
    run,
    total_loss,
    with_updater,
)
from tests.objectives.discrete_problem import NUM_ACTIONS, ActionTable
from tests.objectives.family_problem import Payoff, make_family_actor, make_family_data
from tests.objectives.vmpo_problem import (
    CONTINUOUS,
    DISTRIBUTIONS,
    KINDS,
    make_policy_network,
    make_rollout,
    make_spec,
    parameter_names,
    with_advantage,
)

# Where the part is: where the actor says, inside the action under its own name (as in TorchRL's
# tests of SAC), or in the place of the action.
STYLES = ["inside", "unnamed", "renamed"]
LEAF: dict[str, NestedKey] = {
    "inside": ("action", "arm"),
    "unnamed": ("action", "arm"),
    "renamed": "action",
}
ESTIMATORS = [ValueEstimators.TDLambda, "retrace"]


class Whole(nn.Module):
    """A critic that may be given the action with its parts."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, observation: Tensor, action: Tensor | TensorDictBase) -> Tensor:
        return self.critic(observation, action if isinstance(action, Tensor) else action["arm"])


def make_composite_actor(kind: str, style: str, network: nn.Module) -> ProbabilisticActor:
    written = [("params", "arm", name) for name in parameter_names(kind)]
    settings: dict[str, Any] = {"distribution_map": {"arm": DISTRIBUTIONS[kind]}}
    if style != "unnamed":
        settings["name_map"] = {"arm": LEAF[style]}
    by_partial = style == "inside"
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], written),
        in_keys=["params"],
        out_keys=["action" if style == "unnamed" else LEAF[style]],
        distribution_class=functools.partial(CompositeDistribution, **settings)
        if by_partial
        else CompositeDistribution,
        distribution_kwargs=None if by_partial else settings,
        return_log_prob=True,
    )


def make_plain_actor(kind: str, network: nn.Module) -> ProbabilisticActor:
    names = parameter_names(kind)
    module = TensorDictModule(network, ["observation"], names)
    return ProbabilisticActor(
        module, names, distribution_class=DISTRIBUTIONS[kind], return_log_prob=True
    )


def composite_spec(kind: str, style: str) -> Any:
    spec = make_spec(kind)
    return spec if style == "renamed" else Composite(action=Composite(arm=spec))


def rename(data: TensorDict, kind: str, style: str) -> TensorDict:
    """The same data with action and old policy where a composite has them."""
    data = data.clone()
    for name in parameter_names(kind):
        if name in data.keys():
            data["params", "arm", name] = data.pop(name)
    action = data.pop("action")
    return data.set(LEAF[style], action)


# MPO ---------------------------------------------------------------------------------------------


def make_mpo_losses(kind: str, style: str, td_est: Any = None, **kwargs: Any) -> list[MPOLoss]:
    """The loss of a plain policy and that of a composite, with the same weights."""
    losses = []
    kwargs = {"num_action_samples": 5, "scalar_output_mode": "exclude"} | kwargs
    for composite in (False, True):
        torch.manual_seed(0)
        network = make_policy_network(kind)
        actor = (
            make_composite_actor(kind, style, network)
            if composite
            else make_plain_actor(kind, network)
        )
        critic: nn.Module = ActionTable(OBSERVATION_DIM, NUM_ACTIONS)
        if kind in CONTINUOUS:
            critic = Concatenate(make_mlp(OBSERVATION_DIM + ACTION_DIM, 1))
        value = ValueOperator(
            Whole(critic), in_keys=["observation", "action"], out_keys=["state_action_value"]
        )
        spec = composite_spec(kind, style) if composite else make_spec(kind)
        loss = MPOLoss(actor, value, action_spec=spec, **kwargs)
        loss.make_value_estimator(td_est, gamma=0.9)
        if composite:
            loss.set_keys(log_prob="action_log_prob")
        with torch.no_grad():
            for parameter in loss.actor_network_params.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        losses.append(loss if not (loss.delay_actor or loss.delay_qvalue) else with_updater(loss))
    return losses


def make_mpo_data(kind: str, *batch: int) -> TensorDict:
    data = make_transitions(*(batch or (4, 3)), action_scale=0.3)
    if kind not in CONTINUOUS:
        index = torch.randint(NUM_ACTIONS, data.shape, generator=torch.Generator().manual_seed(0))
        one_hot = nn.functional.one_hot(index, NUM_ACTIONS)
        data["action"] = one_hot if kind == "one-hot" else index
    return data


def with_mask_and_weights(data: TensorDict) -> TensorDict:
    data["priority_weight"] = torch.linspace(0.5, 1.5, data.numel()).reshape(data.shape)
    data["collector", "mask"] = torch.arange(data.numel()).reshape(data.shape) % 5 != 2
    data["next", "reward"][~data["collector", "mask"]] = math.nan
    return data


def without_terminal_observations(data: TensorDict) -> TensorDict:
    data["next", "observation"][data["next", "terminated"].squeeze(-1)] = math.nan
    return data


class TestMPOComposite(LossTestBase):
    def make_loss(self, **kwargs: Any) -> MPOLoss:
        return make_mpo_losses("tanh", "inside", **kwargs)[1]

    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("td_est", ESTIMATORS)
    def test_mpo(self, td_est: Any, kind: str, style: str) -> None:
        """The same losses, metrics, priorities and gradients; the data is left as it is."""
        plain, composite = make_mpo_losses(kind, style, td_est, num_qvalue_nets=2)
        assert composite.tensor_keys.action == LEAF[style]
        data = make_mpo_data(kind)
        renamed = rename(data, kind, style)
        expected = run(plain, data)
        with self.input_steady_test(renamed, added=("td_error",)):
            output = run(composite, renamed)
        assert_equal(output, expected)
        slopes = gradients(composite, total_loss(output))
        assert_equal(slopes, gradients(plain, total_loss(expected)))
        assert all(gradient.any() for gradient in slopes.values())
        torch.testing.assert_close(renamed["td_error"], data["td_error"])

    @pytest.mark.parametrize("kind", ["tanh", "one-hot"])
    @pytest.mark.parametrize(
        ("change", "kwargs"),
        [
            (None, {"delay_actor": False, "delay_qvalue": False}),
            (None, {"delay_actor": False, "num_qvalue_nets": 2, "deactivate_vmap": True}),
            (None, {"reduction": "none", "policy_states": "both"}),
            (None, {"reduction": "sum", "separate_losses": True}),
            (None, {"temperature_update": "solve", "sequence_steps": "first"}),
            (with_mask_and_weights, {"num_qvalue_nets": 2}),
            (without_terminal_observations, {"skip_done_states": True}),
        ],
        ids=lambda x: getattr(x, "__name__", str(x)),
    )
    def test_mpo_options(self, change: Any, kwargs: dict[str, Any], kind: str) -> None:
        plain, composite = make_mpo_losses(kind, "inside", **kwargs)
        data = make_mpo_data(kind)
        data = data if change is None else change(data)
        renamed = rename(data, kind, "inside")
        output = run(composite, renamed)
        assert_equal(output, run(plain, data))
        losses = [value for key, value in output.items() if key.startswith("loss_")]
        assert all(loss.isfinite().all() for loss in losses)
        assert all(g.isfinite().all() for g in gradients(composite, total_loss(output)).values())

    def test_mpo_keys(self) -> None:
        """What the actor writes and reads again is not asked of the data."""
        for style in STYLES:
            _, loss = make_mpo_losses("tanh", style)
            following = {("next", k) for k in ("observation", "reward", "done", "terminated")}
            assert set(loss.in_keys) == {"observation", LEAF[style], *following}

    @pytest.mark.parametrize("style", ["inside", "renamed"])
    def test_mpo_collected(self, style: str) -> None:
        """What a composite actor writes is what the loss reads, log-probabilities included."""
        torch.manual_seed(0)
        actor = make_composite_actor("tanh", style, make_policy_network("tanh"))
        critic = Whole(Concatenate(make_mlp(OBSERVATION_DIM + ACTION_DIM, 1)))
        value = ValueOperator(
            critic, in_keys=["observation", LEAF[style]], out_keys=["state_action_value"]
        )
        loss = with_updater(MPOLoss(actor, value, action_spec=composite_spec("tanh", style)))
        loss.make_value_estimator("retrace")
        data = make_transitions(4, 3).exclude("action", "action_log_prob")
        with torch.no_grad():
            data = actor(data)
        assert loss.tensor_keys.log_prob in loss.in_keys
        assert set(loss.in_keys) <= set(data.keys(True, True))
        assert loss(data).isfinite().all()

    def test_mpo_spec_of_actor(self) -> None:
        """A spec that the actor does not carry under the action's name must be given."""
        network, spec = make_policy_network("tanh"), composite_spec("tanh", "unnamed")
        actor = ProbabilisticActor(
            TensorDictModule(
                network, ["observation"], [("params", "arm", k) for k in ("loc", "scale")]
            ),
            in_keys=["params"],
            out_keys=["action"],
            spec=spec,
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"arm": TanhNormal}},
        )
        critic = Whole(Concatenate(make_mlp(OBSERVATION_DIM + ACTION_DIM, 1)))
        value = ValueOperator(
            critic, in_keys=["observation", "action"], out_keys=["state_action_value"]
        )
        with pytest.raises(ValueError, match=r"needs the size of the action: pass action_spec="):
            MPOLoss(actor, value)
        assert MPOLoss(actor, value, per_dim_constraining=False).alpha_mean().shape == ()
        assert MPOLoss(actor, value, action_spec=spec).alpha_mean().shape == (ACTION_DIM,)

    def test_mpo_critic_of_part(self) -> None:
        """A critic may read the part itself."""
        _, whole = make_mpo_losses("tanh", "inside")
        torch.manual_seed(0)
        actor = make_composite_actor("tanh", "inside", make_policy_network("tanh"))
        critic = Whole(Concatenate(make_mlp(OBSERVATION_DIM + ACTION_DIM, 1)))
        value = ValueOperator(
            critic, in_keys=["observation", LEAF["inside"]], out_keys=["state_action_value"]
        )
        spec = composite_spec("tanh", "inside")
        loss = with_updater(MPOLoss(actor, value, action_spec=spec, num_action_samples=5))
        loss.make_value_estimator(gamma=0.9)
        loss.load_state_dict(whole.state_dict())
        data = rename(make_mpo_data("tanh"), "tanh", "inside")
        assert_equal(run(loss, data.clone()), run(whole, data.clone()))

    def test_mpo_notensordict(self) -> None:
        _, loss = make_mpo_losses("tanh", "inside")
        data = rename(make_mpo_data("tanh", 6), "tanh", "inside")
        expected = run(loss, data.clone())
        keys = data.select(*loss.in_keys).keys(True, True)
        arguments = {k if isinstance(k, str) else "_".join(k): data.get(k) for k in keys}
        assert "action_arm" in arguments
        torch.manual_seed(0)
        assert_equal(dict(zip(loss.out_keys, loss(**arguments), strict=True)), expected)

    def test_mpo_state(self) -> None:
        loss, other = self.make_loss(), self.make_loss(init_temperature=2.0)
        self.no_duplicates_test(loss)
        self.state_dict_test(loss, other, rename(make_mpo_data("tanh"), "tanh", "inside"))
        data = rename(make_mpo_data("tanh"), "tanh", "inside")
        assert_equal(run(copy.deepcopy(loss), data.clone()), run(loss, data.clone()))


# V-MPO -------------------------------------------------------------------------------------------


def make_vmpo_losses(kind: str, style: str, td_est: Any = None, **kwargs: Any) -> list[VMPOLoss]:
    losses = []
    kwargs = {"scalar_output_mode": "exclude"} | kwargs
    for composite in (False, True):
        torch.manual_seed(0)
        network = make_policy_network(kind)
        actor = (
            make_composite_actor(kind, style, network)
            if composite
            else make_plain_actor(kind, network)
        )
        spec = composite_spec(kind, style) if composite else make_spec(kind)
        value = ValueOperator(make_mlp(OBSERVATION_DIM, 1), in_keys=["observation"])
        loss = VMPOLoss(actor, value, action_spec=spec, **kwargs)
        loss.make_value_estimator(td_est, gamma=0.9)
        losses.append(with_updater(loss) if loss.delay_actor else loss)
    return losses


class TestVMPOComposite(LossTestBase):
    def make_loss(self, **kwargs: Any) -> VMPOLoss:
        return make_vmpo_losses("tanh", "inside", **kwargs)[1]

    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_vmpo(self, kind: str, style: str) -> None:
        """The same losses, metrics and gradients, with the old policy's parameters stored."""
        plain, composite = make_vmpo_losses(kind, style)
        data = make_rollout(kind)
        renamed = rename(data, kind, style)
        expected = plain(data)
        added = ("advantage", "value_target", "state_value", ("next", "state_value"))
        with self.input_steady_test(renamed, added=added):
            output = composite(renamed)
        assert_equal(output, expected)
        assert_equal(
            gradients(composite, total_loss(output)), gradients(plain, total_loss(expected))
        )

    @pytest.mark.parametrize("kind", ["tanh", "categorical"])
    @pytest.mark.parametrize(
        "kwargs",
        [
            {"td_est": "td0", "temperature_update": "gradient"},
            {"td_est": "tdlambda", "old_policy": "target"},
            {"td_est": "returns", "separate_losses": True, "kl_samples": "selected"},
            {"reduction": "none"},
        ],
        ids=str,
    )
    def test_vmpo_options(self, kwargs: dict[str, Any], kind: str) -> None:
        plain, composite = make_vmpo_losses(kind, "inside", **kwargs)
        data = make_rollout(kind)
        output = composite(rename(data, kind, "inside"))
        assert_equal(output, plain(data))

    @pytest.mark.parametrize("kind", ["tanh", "categorical"])
    def test_vmpo_mask(self, kind: str) -> None:
        plain, composite = make_vmpo_losses(kind, "inside")
        data = with_advantage(make_rollout(kind))
        data["collector", "mask"] = torch.arange(5).expand(4, 5) < 4
        data["advantage"][:, 4] = math.nan
        assert_equal(composite(rename(data, kind, "inside")), plain(data))

    def test_vmpo_missing_parameters(self) -> None:
        _, loss = make_vmpo_losses("tanh", "inside")
        data = rename(with_advantage(make_rollout("tanh")), "tanh", "inside").exclude("params")
        with pytest.raises(ValueError, match=r"the entries \['params'\] are missing"):
            loss(data)

    def test_vmpo_state(self) -> None:
        settings = {"temperature_update": "gradient"}
        loss, other = self.make_loss(**settings), self.make_loss(init_temperature=2.0, **settings)
        self.no_duplicates_test(loss)
        data = rename(with_advantage(make_rollout("tanh")), "tanh", "inside")
        self.state_dict_test(loss, other, data)


# Several parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_class", [MPOLoss, VMPOLoss])
def test_parts_in_several_places_are_refused(loss_class: Any) -> None:
    parts = {"arm": TanhNormal, ("body", "leg"): TanhNormal}
    actor = ProbabilisticActor(
        TensorDictModule(make_policy_network("tanh"), ["observation"], ["a", "b"]),
        in_keys=["a", "b"],
        out_keys=["arm", ("body", "leg")],
        distribution_class=functools.partial(CompositeDistribution, distribution_map=parts),
    )
    critic = ValueOperator(nn.Linear(OBSERVATION_DIM, 1), in_keys=["observation"])
    message = r"must be inside one entry, .* got \['arm', \('body', 'leg'\)\]"
    with pytest.raises(ValueError, match=message):
        loss_class(actor, critic)


# Several parts -----------------------------------------------------------------------------------


def test_retrace_weighs_all_parts() -> None:
    """The ratio is that of the whole action: the sum of what the parts have in the data."""

    def target(loss: MPOLoss, data: TensorDict) -> Tensor:
        torch.manual_seed(1)
        return loss.e_step(data)[0]["value_target"]

    actor = make_family_actor("hybrid")
    critic = ValueOperator(
        Payoff(), in_keys=["observation", "action"], out_keys=["state_action_value"]
    )
    loss = with_updater(MPOLoss(actor, critic, num_action_samples=5))
    loss.make_value_estimator("retrace", gamma=0.9)
    data = make_family_data("hybrid", 4, 6, actor=actor)
    data["action", "arm_log_prob"] += 0.3 * torch.randn(4, 6)
    data["action", "tool_log_prob"] += 0.3 * torch.randn(4, 6)
    of_parts = target(loss, data)
    joint = data["action", "arm_log_prob"] + data["action", "tool_log_prob"]
    loss.set_keys(log_prob="joint")
    torch.testing.assert_close(of_parts, target(loss, data.set("joint", joint)))
    arm_only = target(loss, data.set("joint", data["action", "arm_log_prob"]))
    assert (arm_only - of_parts).abs().max() > 1e-3


def test_retrace_names_the_part_without_log_probability() -> None:
    actor = make_family_actor("hybrid")
    critic = ValueOperator(
        Payoff(), in_keys=["observation", "action"], out_keys=["state_action_value"]
    )
    loss = with_updater(MPOLoss(actor, critic)).make_value_estimator("retrace")
    data = make_family_data("hybrid", 4, 6, actor=actor)
    del data["action", "tool_log_prob"]
    with pytest.raises(ValueError, match=r"tool_log_prob.*return_log_prob=True"):
        loss(data)
