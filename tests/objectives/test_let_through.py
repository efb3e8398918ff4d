"""What the losses refuse when they are built, and what they make of unusual data and precision."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded
from torchrl.modules import (
    IndependentNormal,
    ProbabilisticActor,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
)

from minerva_torchrl import MPOLoss, VMPOLoss
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    gradients,
    make_transitions,
    total_loss,
    with_updater,
)

SPEC = Bounded(-0.4, 0.4, (ACTION_DIM,))
LOSSES = pytest.mark.parametrize("loss_class", [MPOLoss, VMPOLoss])


class Concatenated(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(torch.cat(inputs, -1))


class InLowPrecision(nn.Module):
    """A module under autocast, whatever is around it, with outputs in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.module(*inputs)
        return outputs.float() if isinstance(outputs, Tensor) else tuple(x.float() for x in outputs)


def make_actor(distribution: Any = IndependentNormal, **kwargs: Any) -> ProbabilisticActor:
    network = nn.Sequential(Concatenated(OBSERVATION_DIM, 2 * ACTION_DIM), NormalParamExtractor())
    module = kwargs.pop("wrap", lambda x: x)(network)
    return ProbabilisticActor(
        TensorDictModule(module, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=distribution,
        return_log_prob=True,
        **{"spec": SPEC} | kwargs,
    )


def make_critic(loss_class: type, wrap: Any = lambda x: x) -> ValueOperator:
    if loss_class is VMPOLoss:
        return ValueOperator(wrap(Concatenated(OBSERVATION_DIM, 1)), in_keys=["observation"])
    return ValueOperator(
        wrap(Concatenated(OBSERVATION_DIM + ACTION_DIM, 1)), in_keys=["observation", "action"]
    )


def make_loss(loss_class: type, wrap: Any = lambda x: x, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    loss = loss_class(make_actor(wrap=wrap), make_critic(loss_class, wrap), **kwargs)
    return with_updater(loss) if loss_class is MPOLoss else loss


def make_data(*shape: int) -> TensorDict:
    data = make_transitions(*shape)
    data["loc"], data["scale"] = (
        torch.randn(*shape, ACTION_DIM),
        torch.rand(*shape, ACTION_DIM) + 0.5,
    )
    return data


# At construction ---------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize(
    "distribution",
    [
        TruncatedNormal,
        functools.partial(TruncatedNormal, low=-0.4, high=0.4),
        D.Laplace,
        lambda loc, scale: D.Independent(D.Laplace(loc, scale), 1),
        lambda loc, scale: D.Independent(D.Cauchy(loc, scale), 1),
    ],
)
def test_other_distributions(distribution: Any, loss_class: Any) -> None:
    instead = "must be a diagonal Gaussian .* use IndependentNormal, .* or TanhNormal"
    with pytest.raises(NotImplementedError, match=instead):
        loss_class(make_actor(distribution), make_critic(loss_class))


@LOSSES
def test_truncated_part_of_a_composite(loss_class: Any) -> None:
    network = nn.Sequential(Concatenated(OBSERVATION_DIM, 2 * ACTION_DIM), NormalParamExtractor())
    names = [("params", "arm", "loc"), ("params", "arm", "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], names),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"arm": TruncatedNormal}},
        return_log_prob=True,
    )
    with pytest.raises(NotImplementedError, match="got TruncatedNormal"):
        loss_class(actor, make_critic(loss_class), per_dim_constraining=False)


@LOSSES
def test_range_of_a_tanh(loss_class: Any) -> None:
    def make(distribution: Any = TanhNormal, spec: Any = SPEC, **arguments: Any) -> Any:
        actor = make_actor(distribution, spec=spec, distribution_kwargs=arguments)
        return loss_class(actor, make_critic(loss_class))

    low, high = SPEC.space.low, SPEC.space.high
    make(low=low, high=high)
    make(low=-0.4, high=0.4)
    make(functools.partial(TanhNormal, low=-0.4, high=0.4))
    make(spec=Bounded(-1, 1, (ACTION_DIM,)))
    make(spec=Bounded(-1, 1, (5, ACTION_DIM)))
    with pytest.raises(ValueError, match=r"TanhNormal has low=-1.0, but .* low=\[-0.4.*low': spec"):
        make()
    with pytest.raises(ValueError, match=r"has high=2.0, but its action_spec has high="):
        make(low=low, high=2.0)
    with pytest.raises(ValueError, match=r"has low=-2.0"):
        make(functools.partial(TanhNormal, low=-2.0, high=2.0), spec=Bounded(-1, 1, (ACTION_DIM,)))


def test_state_values_need_no_action() -> None:
    for names in (["observation", "action"], ["action"]):
        inputs = OBSERVATION_DIM * (len(names) - 1) + ACTION_DIM
        critic = ValueOperator(Concatenated(inputs, 1), in_keys=names, out_keys=["state_value"])
        with pytest.raises(ValueError, match="critic_network reads the action 'action', but VMPO"):
            VMPOLoss(make_actor(), critic)


# Data --------------------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0)])
def test_empty_batch(shape: tuple[int, ...], loss_class: Any) -> None:
    loss, data = make_loss(loss_class), make_data(4, 5).flatten(0, 1)[:0].reshape(shape)
    parts = ["forward", "e_step", "actor_loss", "dual_loss"]
    parts += ["qvalue_loss" if loss_class is MPOLoss else "critic_loss"]
    for part in parts:
        with pytest.raises(ValueError, match=r"at least one step, got an empty batch of shape \("):
            getattr(loss, part)(data)


@LOSSES
@pytest.mark.parametrize("temperature_update", ["gradient", "solve"])
def test_no_valid_state(temperature_update: Any, loss_class: Any) -> None:
    """Whatever the data holds: losses are zero, metrics finite."""
    loss, data = make_loss(loss_class, temperature_update=temperature_update), make_data(4, 5)
    data["collector", "mask"] = torch.zeros(4, 5, dtype=torch.bool)
    if loss_class is MPOLoss:
        for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
            data[key].fill_(torch.nan)
    output = loss(data)
    for name in loss.out_keys:
        assert output[name].isfinite(), name
        if name.startswith("loss_"):
            assert output[name] == 0, name
    assert all(not g.any() for g in gradients(loss, total_loss(output)).values())


@pytest.mark.parametrize("estimator", ["td0", "tdlambda", "retrace"])
@pytest.mark.parametrize("policy_states", ["next", "current", "both"])
def test_padding_may_hold_anything(policy_states: Any, estimator: Any) -> None:
    """NaN in the observations, actions and rewards of padded steps changes nothing."""
    loss = make_loss(MPOLoss, policy_states=policy_states).make_value_estimator(estimator)
    data = make_data(3, 5)
    data["collector", "mask"] = torch.arange(5) < torch.tensor([[5], [3], [1]])
    outputs = []
    for filled in (0.0, torch.nan):
        padded = data.clone()
        for key, entry in list(padded.items(True, True)):
            if entry.is_floating_point():
                entry[~data["collector", "mask"]] = filled
                padded.set(key, entry)
        torch.manual_seed(1)
        output = loss(padded)
        found = gradients(loss, total_loss(output))
        outputs.append([*output.values(), *found.values()])
    for left, right in zip(*outputs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


# A second call -----------------------------------------------------------------------------------


def test_second_call_of_vmpo() -> None:
    """Advantages and targets of the first one stay, until they are taken out of the data."""
    loss, data = make_loss(VMPOLoss), make_data(4, 5)
    before = set(data.keys(True, True))
    loss(data)
    written = set(data.keys(True, True)) - before
    assert {"advantage", "value_target"} <= written
    assert written <= {"advantage", "value_target", "state_value", ("next", "state_value")}
    first = data.clone()
    with torch.no_grad():
        for parameter in loss.critic_network_params.values(True, True):
            parameter.mul_(2)
    loss(data)
    for key in written:
        assert torch.equal(data[key], first[key]), key
    loss(data.exclude("advantage", inplace=True))
    assert not torch.equal(data["advantage"], first["advantage"])


def test_second_call_of_mpo() -> None:
    """Nothing is kept but the priority, which is written anew."""
    loss, data = make_loss(MPOLoss), make_data(4)
    before = set(data.keys(True, True))
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(loss(data))
        assert set(data.keys(True, True)) - before == {"td_error"}
        data["td_error"].zero_()
    for name in outputs[0].keys():
        assert torch.equal(outputs[0][name], outputs[1][name]), name
    torch.manual_seed(2)
    assert loss(data)["loss_actor"] != outputs[0]["loss_actor"]  # samples of its own
    assert data["td_error"].any()


# Precision ---------------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize("in_parts", [False, True])
def test_autocast(loss_class: Any, in_parts: bool) -> None:
    """The equations are those of float32 on what the networks return in bfloat16."""
    low, full = make_loss(loss_class), make_loss(loss_class, InLowPrecision)
    for ours, theirs in zip(low.parameters(), full.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    data = make_data(64, 2) if loss_class is VMPOLoss else make_data(128)
    if loss_class is VMPOLoss:
        data["advantage"] = torch.randn(64, 2, 1)
        data["value_target"] = torch.randn(64, 2, 1)

    def evaluate(loss: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        if not in_parts:
            return dict(loss(data.clone()).items())
        batch, metrics = loss.e_step(data.clone())
        critic = loss.qvalue_loss if loss_class is MPOLoss else loss.critic_loss
        results = [critic(batch), loss.actor_loss(batch), loss.dual_loss(batch)]
        for i, (value, of_part) in enumerate(results):
            metrics |= {f"loss {i}": value, **of_part}
        return metrics

    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = evaluate(low)
        assert torch.is_autocast_enabled("cpu")
    expected = evaluate(full)
    assert under_autocast.keys() == expected.keys()
    for name, value in expected.items():
        assert under_autocast[name].dtype == torch.float32, name
        torch.testing.assert_close(under_autocast[name], value, rtol=1e-6, atol=1e-7, msg=name)
    in_float32 = evaluate(make_loss(loss_class))
    assert any(not torch.equal(in_float32[name], expected[name]) for name in expected)
    if not in_parts:
        total = sum(value for name, value in under_autocast.items() if name.startswith("loss_"))
        total.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in low.parameters())


@pytest.mark.parametrize("estimator", ["tdlambda", "retrace"])
def test_autocast_of_estimators(estimator: Any) -> None:
    low, full = make_loss(MPOLoss), make_loss(MPOLoss, InLowPrecision)
    data = make_data(8, 6)
    targets = []
    for loss in (low, full):
        loss.make_value_estimator(estimator)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=loss is low):
            targets.append(loss.e_step(data.clone())[0]["value_target"])
    torch.testing.assert_close(*targets, rtol=1e-6, atol=1e-6)
