"""State dicts of this and former versions, copies, pickles, and the attributes of a loss."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import ValueEstimators

from minerva_torchrl import MPOLoss, VMPOLoss
from tests.objectives.base import (
    assert_equal,
    make_actor,
    make_critic,
    make_transitions,
    run,
    with_updater,
)
from tests.objectives.vmpo_problem import make_actor as make_vmpo_actor
from tests.objectives.vmpo_problem import make_critic as make_vmpo_critic
from tests.objectives.vmpo_problem import make_rollout, with_advantage

LOSSES = ["mpo", "mpo-ensemble", "vmpo", "vmpo-discrete"]
# Names of version 0.1 by the present ones.
DUALS = {"duals.temperature.raw": "temperature.raw"}
GAUSSIAN = {
    "duals.alpha_mean.raw": "alpha_mean.raw",
    "duals.alpha_mean.epsilon": "epsilon_mean",
    "duals.alpha_stddev.raw": "alpha_stddev.raw",
    "duals.alpha_stddev.epsilon": "epsilon_stddev",
}
MPO = {
    **DUALS,
    **GAUSSIAN,
    "duals.temperature.epsilon": "epsilon",
    "duals.penalty_temperature.raw": "penalty_temperature.raw",
    "duals.penalty_temperature.epsilon": "epsilon_penalty",
}
VMPO = {**DUALS, "duals.temperature.epsilon": "epsilon_eta"}
FORMER = {
    "mpo": MPO,
    "mpo-ensemble": MPO,
    "vmpo": {**VMPO, **GAUSSIAN},
    "vmpo-discrete": {
        **VMPO,
        "duals.alpha_policy.raw": "alpha_policy.raw",
        "duals.alpha_policy.epsilon": "epsilon_policy",
    },
}


def make_loss(name: str, seed: int = 0, **kwargs: Any) -> Any:
    """A loss without an estimator, which is made when it is needed."""
    torch.manual_seed(seed)
    if name.startswith("mpo"):
        num_qvalue_nets = 2 if name == "mpo-ensemble" else 1
        loss = MPOLoss(make_actor(), make_critic(), num_qvalue_nets=num_qvalue_nets, **kwargs)
        return with_updater(loss)
    kind = "normal" if name == "vmpo" else "categorical"
    kwargs = {"temperature_update": "gradient"} | kwargs
    return VMPOLoss(make_vmpo_actor(kind), make_vmpo_critic(), **kwargs)


def make_data(name: str) -> TensorDict:
    if name.startswith("mpo"):
        return make_transitions(8)
    return with_advantage(make_rollout("normal" if name == "vmpo" else "categorical"))


def trained(name: str) -> Any:
    """A loss whose parameters and bounds are not the initial ones."""
    loss = make_loss(name)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    for bound in loss._bounds:
        setattr(loss, bound, 0.037)
    return loss


# State dicts -------------------------------------------------------------------------------------


def former_state(name: str, loss: Any) -> dict[str, Any]:
    """The state of a loss as version 0.1 would have saved it."""
    state = loss.state_dict()
    assert set(FORMER[name]) <= set(state)
    assert {key for key in state if key.startswith("duals.")} == set(FORMER[name])
    return {FORMER[name].get(key, key): value for key, value in state.items()}


@pytest.mark.parametrize("with_estimator", [True, False])
@pytest.mark.parametrize("prefix", ["", "inside."])
@pytest.mark.parametrize("name", LOSSES)
def test_former_state(name: str, prefix: str, with_estimator: bool) -> None:
    """A state of version 0.1 loads, with and without the settings of an estimator."""
    source, target = trained(name), make_loss(name, seed=1)
    if with_estimator:
        source.make_value_estimator(gamma=0.7)
    state = former_state(name, source)
    assert any(key.startswith("_value_estimator.") for key in state) is with_estimator
    data = make_data(name)
    source.make_value_estimator(gamma=0.7)
    expected = run(source, data.clone())
    if not with_estimator:
        target.make_value_estimator(gamma=0.7)
    module = target if not prefix else nn.ModuleDict({"inside": target})
    state = {prefix + key: value for key, value in state.items()}
    given = dict(state)
    module.load_state_dict(state)
    assert state.keys() == given.keys(), "the state itself is left as it is"
    assert_equal(run(target, data.clone()), expected, 0, 0)
    for key, value in source.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(target.state_dict()[key], value), key


@pytest.mark.parametrize("name", LOSSES)
def test_present_state(name: str) -> None:
    source, target = trained(name), make_loss(name, seed=1)
    target.load_state_dict(source.state_dict())
    data = make_data(name)
    assert_equal(run(target, data.clone()), run(source, data.clone()), 0, 0)
    assert target.epsilon.item() == pytest.approx(0.037)


@pytest.mark.parametrize("former", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_strict(name: str, former: bool) -> None:
    """Entries that are missing or too many are refused under either version's names."""
    source, target = trained(name), make_loss(name, seed=1)
    state = former_state(name, source) if former else dict(source.state_dict())
    own = FORMER[name].values() if former else FORMER[name]
    for key in own:
        part = {k: v for k, v in state.items() if k != key}
        with pytest.raises(RuntimeError, match="Missing key"):
            target.load_state_dict(part)
        missing = target.load_state_dict(part, strict=False).missing_keys
        assert len(missing) == 1
        assert missing[0].startswith("duals.")
    for extra in ("unheard_of", "duals.unheard_of.raw", "alpha_unheard_of.raw"):
        with pytest.raises(RuntimeError, match=rf"Unexpected key.*{extra}"):
            target.load_state_dict({**state, extra: torch.ones(())})


def test_lazily_made_estimator() -> None:
    """No estimator is made before it is needed: by a call, or by a state that has its settings."""
    for name in LOSSES:
        loss, data = make_loss(name), make_data(name)
        assert loss._value_estimator is None
        assert not any(key.startswith("_value_estimator") for key in loss.state_dict())
        data = data.exclude("advantage", "value_target")
        run(loss, data)
        assert loss._value_estimator is not None
        other = make_loss(name, seed=1)
        loss.make_value_estimator(gamma=0.6)
        other.load_state_dict(loss.state_dict())
        assert other.value_estimator.gamma == loss.value_estimator.gamma
        # Back: a state without them leaves the settings as they are.
        state = {k: v for k, v in other.state_dict().items() if "_value_estimator" not in k}
        loss.load_state_dict(state)
        assert loss.value_estimator.gamma.item() == pytest.approx(0.6)


def test_estimator_of_other_kind() -> None:
    """Settings that both estimators have are loaded, the others are left as they are."""
    source = make_loss("mpo").make_value_estimator(ValueEstimators.TDLambda, gamma=0.6, lmbda=0.4)
    target = make_loss("mpo", seed=1).make_value_estimator("retrace", gamma=0.9, lmbda=0.8)
    target.load_state_dict(source.state_dict())
    assert target.value_estimator.gamma.item() == pytest.approx(0.6)
    assert target.value_estimator.lmbda.item() == pytest.approx(0.4)
    td0 = make_loss("mpo").make_value_estimator(gamma=0.5)
    target.load_state_dict(td0.state_dict())
    assert target.value_estimator.gamma.item() == pytest.approx(0.5)
    assert target.value_estimator.lmbda.item() == pytest.approx(0.4)
    td0.load_state_dict(target.state_dict())
    assert not hasattr(td0.value_estimator, "lmbda")


# Copies ------------------------------------------------------------------------------------------


def by_pickle(loss: Any) -> Any:
    return pickle.loads(pickle.dumps(loss))


@pytest.mark.parametrize("copied_by", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("name", LOSSES)
def test_copies(name: str, copied_by: Any) -> None:
    """A copy is a loss of its own, in which every name means the copy's variables."""
    loss, data = trained(name), make_data(name)
    expected = run(loss, data.clone())
    copied = copied_by(loss)
    assert_equal(run(copied, data.clone()), expected, 0, 0)
    assert set(copied.state_dict()) == set(loss.state_dict())
    for key, dual in copied.duals.items():
        assert getattr(copied, key) is dual
        assert dual is not loss.duals[key]
    assert {id(dual) for dual in copied._bounds.values()} == {id(d) for d in copied.duals.values()}
    parts = (*copied.temperatures.values(), *copied.constraints.values())
    assert {id(dual) for dual in parts} == {id(dual) for dual in copied.duals.values()}
    assert {id(p) for p in copied.dual_parameters()} <= {id(p) for p in copied.parameters()}

    for bound in loss._bounds:
        setattr(copied, bound, 0.5)
        assert getattr(copied, bound).item() == 0.5
        assert getattr(loss, bound).item() == pytest.approx(0.037)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(0.5)
    assert_equal(run(loss, data.clone()), expected, 0, 0)
    changed = run(copied, data.clone())
    for key in ("loss_actor", "loss_temperature"):
        assert not torch.isclose(changed[key], expected[key]), key


def test_copies_train() -> None:
    """An unpickled ensemble maps its own critics."""
    loss = by_pickle(make_loss("mpo-ensemble"))
    before = [p.detach().clone() for p in loss.qvalue_network_params.parameters()]
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    loss(make_data("mpo"))["loss_qvalue"].backward()
    optimizer.step()
    after = loss.qvalue_network_params.parameters()
    assert all((p != q).any() for p, q in zip(after, before, strict=True))


# Attributes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_duals_by_name(name: str) -> None:
    inits = {"init_temperature": 3.0}
    inits |= {"init_alpha_policy": 2.0} if name == "vmpo-discrete" else {"init_alpha_mean": 2.0}
    loss = make_loss(name, **inits)
    values = loss.dual_values()
    for argument, value in inits.items():
        dual = getattr(loss, argument.removeprefix("init_"))
        torch.testing.assert_close(dual().detach(), torch.full_like(dual(), value))
        assert values[argument.removeprefix("init_")].item() == pytest.approx(value)
    assert set(values) == set(loss.duals)
    names = [key.removesuffix(".raw") for key, _ in loss.duals.named_parameters()]
    assert names == list(loss.duals)
    assert [id(p) for p in loss.dual_parameters()] == [id(p) for p in loss.duals.parameters()]
    both = [*loss.temperature_parameters(), *loss.alpha_parameters()]
    assert {id(p) for p in both} == {id(p) for p in loss.dual_parameters()}
    assert not loss.solved_parameters()
    with pytest.raises(AttributeError, match="alpha_unheard_of"):
        _ = loss.alpha_unheard_of
    assert not hasattr(loss, "epsilon_unheard_of")


@pytest.mark.parametrize("name", LOSSES)
def test_solved_temperatures(name: str) -> None:
    loss = make_loss(name, temperature_update="solve")
    assert not loss.temperature_parameters()
    temperatures = [id(dual.raw) for dual in loss.temperatures.values()]
    assert [id(p) for p in loss.solved_parameters()] == temperatures
    assert [id(p) for p in loss.dual_parameters()] == [id(p) for p in loss.alpha_parameters()]


@pytest.mark.parametrize("name", LOSSES)
def test_bounds_by_name(name: str) -> None:
    """A bound is set in place, in its own precision, where state dict and loss see it."""
    loss = make_loss(name).double()
    for bound in [key for key in FORMER[name].values() if key.startswith("epsilon")]:
        buffer = getattr(loss, bound)
        for value in (0.3, 1, torch.tensor(0.25)):
            setattr(loss, bound, value)
            assert getattr(loss, bound) is buffer
            assert buffer.item() == pytest.approx(float(value), abs=1e-15)
            assert buffer.dtype == torch.float64
            assert not buffer.requires_grad
        ((key, _),) = [(k, v) for k, v in FORMER[name].items() if v == bound]
        assert loss.state_dict()[key] == 0.25
        for value in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"^{bound} must be positive and finite, got"):
                setattr(loss, bound, value)
        with pytest.raises(TypeError, match=f"^{bound} must be a number, got str"):
            setattr(loss, bound, "0.1")
        assert buffer == 0.25
        assert bound not in dict(loss.named_buffers()), "it is listed once, with its dual"


def test_cast_keeps_names() -> None:
    for name in LOSSES:
        loss = make_loss(name).double()
        assert loss.temperature is loss.duals["temperature"] is loss.temperatures["value"]
        assert loss.temperature().dtype == loss.epsilon.dtype == torch.float64


def test_projection_after_the_optimiser() -> None:
    loss = make_loss("mpo")
    optimizer = torch.optim.SGD(loss.dual_parameters(), lr=1.0)
    handle = loss.project_duals_after(optimizer)
    for project in (True, False):
        for dual in loss.duals.values():
            dual.raw.data.fill_(-40.0)
        optimizer.step()
        above = all(dual().min() >= dual.floor * (1 - 1e-5) for dual in loss.duals.values())
        assert above is project
        handle.remove()


@pytest.mark.parametrize("name", LOSSES)
def test_projection_ends_multipliers_that_step_in_proportion(name: str) -> None:
    loss = make_loss(name, alpha_update="relative")
    for constraint in loss.constraints.values():
        constraint.raw.data.fill_(30.0)  # a logarithm
    loss.project_duals_()
    for constraint in loss.constraints.values():
        ceiling = 2 / math.sqrt(constraint.epsilon.item())
        assert constraint().tolist() == pytest.approx(
            [ceiling] * constraint.raw.numel() if constraint.raw.ndim else ceiling
        )


def test_former_name_of_the_bound() -> None:
    """V-MPO's bound was called ``epsilon_eta``."""
    with pytest.warns(DeprecationWarning, match="epsilon_eta is now called epsilon") as warned:
        loss = make_loss("vmpo", epsilon_eta=0.3)
    assert warned[0].filename.endswith(("vmpo_problem.py", "test_loss_state.py"))  # makes the loss
    data = make_data("vmpo")
    assert_equal(loss(data), make_loss("vmpo", epsilon=0.3)(data), 0, 0)
    loss.epsilon_eta = 0.2
    assert loss.epsilon is loss.epsilon_eta
    assert loss.epsilon.item() == pytest.approx(0.2)
    with pytest.raises(AttributeError, match="epsilon_eta"):
        _ = make_loss("mpo").epsilon_eta


def test_arguments_of_torchrl() -> None:
    """``device=`` and ``clip_value=False`` are taken as TorchRL's PPO takes them."""
    data = make_data("vmpo")
    expected = make_loss("vmpo")(data)
    loss = make_loss("vmpo", device=torch.device("cpu"), clip_value=False)
    assert_equal(loss(data), expected, 0, 0)
    assert loss.clip_value is None
    assert loss.critic_coeff.device == torch.device("cpu")
    on_meta = make_loss("vmpo", device=torch.device("meta"))
    assert on_meta.critic_coeff.is_meta
    for delay in (True, False):
        mpo = make_loss("mpo", delay_actor=delay, delay_qvalue=not delay)
        assert (mpo.delay_actor, mpo.delay_qvalue) == (delay, not delay)
    assert not make_loss("vmpo").delay_actor
    assert make_loss("vmpo", old_policy="target").delay_actor
