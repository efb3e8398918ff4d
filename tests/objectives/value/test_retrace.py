"""Retrace as a value estimator of TorchRL."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, set_skip_existing
from torch import Tensor, nn
from torchrl.data import (
    Bounded,
    Composite,
    LazyTensorStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives.utils import build_value_estimator, default_value_kwargs

from minerva_torchrl.objectives import Retrace
from minerva_torchrl.objectives.value.functional import retrace_return_estimate

OBSERVATION, ACTION = 3, 2
GAMMA, LMBDA = 0.5, 0.75  # exact in any precision
UNIT = Bounded(-1.0, 1.0, (ACTION,))


def _actor(spec=None, action: str | tuple = "action", **kwargs) -> ProbabilisticActor:
    network = nn.Sequential(nn.Linear(OBSERVATION, 2 * ACTION, **kwargs), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=[action],
        distribution_class=IndependentNormal,
        spec=spec,
    )


def _critic(action: str | tuple = "action", out_keys: list | None = None, **kwargs):
    network = MLP(in_features=OBSERVATION + ACTION, out_features=1, num_cells=[8], **kwargs)
    keys = {"out_keys": out_keys or ["state_action_value"]}
    return ValueOperator(network, in_keys=["observation", action], **keys)


def _retrace(**kwargs) -> Retrace:
    defaults = {"gamma": GAMMA, "lmbda": LMBDA}
    if "value_network" not in kwargs:
        torch.manual_seed(1)
        defaults |= {"value_network": _critic(), "actor_network": _actor()}
    return Retrace(**(defaults | kwargs))


def _data(*batch: int, seed: int = 0, ends: bool = True) -> TensorDict:
    batch = batch or (4, 7)
    torch.manual_seed(seed)
    done = torch.rand(*batch, 1) < 0.2 * ends
    following = {
        "observation": torch.randn(*batch, OBSERVATION),
        "reward": torch.randn(*batch, 1),
        "done": done,
        "terminated": done & (torch.rand(*batch, 1) < 0.5),
    }
    current = {
        "observation": torch.randn(*batch, OBSERVATION),
        "action": 2 * torch.randn(*batch, ACTION),
        "action_log_prob": torch.randn(*batch) - 3,
    }
    return TensorDict(current | {"next": following}, batch)


def _next_value(data: TensorDict) -> Tensor:
    return data["next", "observation"].sum(-1, keepdim=True)


def _expected(retrace: Retrace, data: TensorDict, next_value: Tensor, clip: bool = False) -> Tensor:
    action = data["action"].clamp(-1, 1) if clip else data["action"]
    q = retrace.value_network.module(data["observation"], action)
    log_pi = retrace.actor_network.get_dist(data).log_prob(data["action"])
    following = [data["next", key] for key in ("reward", "done", "terminated")]
    log_probs = log_pi.unsqueeze(-1), data["action_log_prob"].unsqueeze(-1)
    return retrace_return_estimate(GAMMA, LMBDA, *log_probs, q, next_value, *following).detach()


# The target ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorized", [True, False])
def test_forward_writes_target_and_advantage(vectorized: bool) -> None:
    retrace, data = _retrace(vectorized=vectorized, skip_existing=True), _data()
    data["next", "state_action_value"] = _next_value(data)
    before = data.clone()
    assert retrace(data) is data
    assert set(data.keys()) == set(before.keys()) | {"value_target", "advantage"}
    assert (data.select(*before.keys(True, True)) == before).all()
    expected = _expected(retrace, data, _next_value(data))
    torch.testing.assert_close(data["value_target"], expected)
    value = retrace.value_network.module(data["observation"], data["action"])
    torch.testing.assert_close(data["advantage"], expected - value.detach())


def test_keyword_call_equals_tensordict_call() -> None:
    retrace, data = _retrace(), _data()
    assert retrace.in_keys == [
        "observation",
        "action",
        "action_log_prob",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "done"),
        ("next", "terminated"),
    ]
    arguments = {
        "_".join([key] if isinstance(key, str) else key): data[key] for key in retrace.in_keys
    }
    torch.manual_seed(3)
    advantage, target = retrace(**arguments)
    torch.manual_seed(3)
    retrace(data)
    torch.testing.assert_close(target, data["value_target"])
    torch.testing.assert_close(advantage, data["advantage"])


def test_expectation_is_the_mean_over_sampled_actions() -> None:
    retrace, data = _retrace(num_samples=5, action_spec=UNIT), _data()
    torch.manual_seed(3)
    with set_exploration_type(ExplorationType.DETERMINISTIC):  # samples all the same
        target = retrace.value_estimate(data)
    torch.manual_seed(3)
    action = retrace.actor_network.get_dist(data["next"]).sample((5,)).clamp(-1, 1)
    observation = data["next", "observation"].expand(5, 4, 7, OBSERVATION)
    next_value = retrace.value_network.module(observation, action).mean(0)
    torch.testing.assert_close(target, retrace.value_estimate(data, next_value=next_value))
    torch.testing.assert_close(target, _expected(retrace, data, next_value, clip=True))


def test_many_samples_approach_the_expectation() -> None:
    critic = TensorDictModule(
        lambda x, a: (x.sum(-1) + a.sum(-1)).unsqueeze(-1),
        in_keys=["observation", "action"],
        out_keys=["state_action_value"],
    )
    retrace = _retrace(value_network=critic, actor_network=_actor(), num_samples=20_000)
    data = _data(2, 3)
    next_value = _next_value(data) + retrace.actor_network.get_dist(data["next"]).mean.sum(-1, True)
    expected = retrace.value_estimate(data, next_value=next_value)
    torch.testing.assert_close(retrace.value_estimate(data), expected, rtol=0, atol=0.1)


def test_scores_the_stored_raw_action() -> None:
    retrace, data = _retrace(action_spec=UNIT), _data(ends=False)
    log_pi = retrace.actor_network.get_dist(data).log_prob(data["action"]).detach()
    data["action_log_prob"] = log_pi + 0.5  # ratios below one are not clipped
    values = {"next_value": _next_value(data)}

    def targets(action: float) -> tuple[Tensor, Tensor]:
        moved = data.clone()
        moved["action"][:, 3] = action
        return (
            retrace.value_estimate(moved, **values)[:, :3],
            retrace.value_estimate(moved, **values, log_pi=log_pi)[:, :3],
        )

    (far, far_at_fixed_ratio), (further, further_at_fixed_ratio) = targets(1.5), targets(2.5)
    (inside, inside_at_fixed_ratio) = targets(0.5)
    # The critic sees the clipped action, the ratio the raw one.
    torch.testing.assert_close(far_at_fixed_ratio, further_at_fixed_ratio, rtol=0, atol=0)
    assert not torch.isclose(far, further).any()
    assert not torch.isclose(inside_at_fixed_ratio, far_at_fixed_ratio).any()
    assert not torch.isclose(inside, far).any()


SPECS = {
    "tensor": UNIT,
    "composite": Composite(action=UNIT),
    "batch of environments": Bounded(-1.0, 1.0, (4, ACTION)),
    "double": Bounded(-1.0, 1.0, (ACTION,), dtype=torch.float64),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("source", ["argument", "actor"])
def test_clips_to_the_spec(spec, source: str) -> None:
    actor = _actor(spec=spec if source == "actor" else None)
    retrace = _retrace(
        value_network=_critic(),
        actor_network=actor,
        action_spec=spec if source == "argument" else None,
    )
    data = _data()
    target = retrace.value_estimate(data, next_value=_next_value(data))
    torch.testing.assert_close(target, _expected(retrace, data, _next_value(data), clip=True))


@pytest.mark.parametrize("spec", [None, Unbounded((ACTION,)), Bounded(-100.0, 100.0, (ACTION,))])
def test_clips_to_nothing_else(spec) -> None:
    # A spec that is given wins over that of the actor.
    actor = _actor(spec=None if spec is None else UNIT)
    retrace, data = (
        _retrace(value_network=_critic(), actor_network=actor, action_spec=spec),
        _data(),
    )
    target = retrace.value_estimate(data, next_value=_next_value(data))
    torch.testing.assert_close(target, _expected(retrace, data, _next_value(data)))


# Time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "negative", "constructor", "name", "name and forward"])
def test_time_dim(how: str) -> None:
    retrace, data = _retrace(skip_existing=True), _data()
    data["next", "state_action_value"] = _next_value(data)
    expected = retrace.value_estimate(data)  # the last dimension
    torch.testing.assert_close(retrace.value_estimate(data, time_dim=1), expected)
    turned = data.transpose(0, 1).contiguous()
    if how == "constructor":
        found = _retrace(skip_existing=True, time_dim=0).value_estimate(turned)
    elif how.startswith("name"):
        turned.names = ["time", None]
        found = (
            retrace(turned)["value_target"] if "forward" in how else retrace.value_estimate(turned)
        )
    else:
        found = retrace.value_estimate(turned, time_dim=0 if how == "argument" else -2)
    torch.testing.assert_close(found, expected.transpose(0, 1))


def test_concatenated_trajectories_equal_split_ones() -> None:
    retrace = _retrace()
    pieces = [_data(2, length, seed=length, ends=False) for length in (3, 1, 4)]
    for piece, terminated in zip(pieces, (True, False, False), strict=True):
        piece["next", "done"][:, -1] = True
        piece["next", "terminated"][:, -1] = terminated
    split = [retrace.value_estimate(piece, next_value=_next_value(piece)) for piece in pieces]
    joined = torch.cat(pieces, 1)
    found = retrace.value_estimate(joined, next_value=_next_value(joined))
    torch.testing.assert_close(found, torch.cat(split, 1))


def test_ends_of_sampled_slices_do_not_leak() -> None:
    stored = _data(60, ends=False)
    stored["collector", "traj_ids"] = torch.arange(60) // 20
    stored["next", "done"][19::20] = stored["next", "terminated"][19::20] = True
    stored["next", "truncated"] = torch.zeros(60, 1, dtype=torch.bool)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60),
        sampler=SliceSampler(slice_len=5, traj_key=("collector", "traj_ids")),
        batch_size=40,
    )
    buffer.extend(stored)
    flat = buffer.sample()
    retrace = _retrace()
    in_one_row = retrace.value_estimate(flat, next_value=_next_value(flat))
    data = flat.reshape(-1, 5)
    target = retrace.value_estimate(data, next_value=_next_value(data))
    torch.testing.assert_close(in_one_row.reshape(-1, 5, 1), target)
    last = data[:, -1]
    bootstrap = GAMMA * ~last["next", "terminated"] * _next_value(last)
    torch.testing.assert_close(target[:, -1], last["next", "reward"] + bootstrap)


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [True, False, None])
@pytest.mark.parametrize("context", [True, False, None])
def test_skip_existing(setting: bool | None, context: bool | None) -> None:
    retrace, data = _retrace(skip_existing=setting, num_samples=1), _data()
    torch.manual_seed(3)
    fresh = retrace.value_estimate(data)
    value, next_value = torch.randn(2, 4, 7, 1)
    existing = retrace.value_estimate(data, next_value=next_value, state_action_value=value)
    data["state_action_value"], data["next", "state_action_value"] = value, next_value
    torch.manual_seed(3)
    with nullcontext() if context is None else set_skip_existing(context):
        retrace(data)
    used = context if setting is None else setting
    torch.testing.assert_close(data["value_target"], existing if used else fresh)
    if used:
        torch.testing.assert_close(data["advantage"], existing - value)


def test_rejects_unknown_keys() -> None:
    retrace = _retrace()
    assert retrace.tensor_keys.value == "state_action_value"
    assert retrace.tensor_keys.sample_log_prob == "action_log_prob"
    with pytest.raises(KeyError, match="state_value is not an accepted tensordict key"):
        retrace.set_keys(state_value="value")
    with pytest.raises(KeyError, match="value key 'value' not found in value network out_keys"):
        retrace.set_keys(value="value")


RENAMED = {
    "action": ("agent", "move"),
    "sample_log_prob": ("agent", "log_prob"),
    "value": ("agent", "q"),
    "reward": ("agent", "gain"),
    "done": "over",
    "terminated": ("agent", "dead"),
    "advantage": ("out", "advantage"),
    "value_target": "target",
}


def _renamed(data: TensorDict) -> TensorDict:
    renamed = data.clone()
    renamed.rename_key_("action", RENAMED["action"])
    renamed.rename_key_("action_log_prob", RENAMED["sample_log_prob"])
    for key in ("reward", "done", "terminated"):
        renamed["next"].rename_key_(key, RENAMED[key])
    return renamed


def _renamed_retrace(**kwargs) -> Retrace:
    torch.manual_seed(1)
    critic = _critic(RENAMED["action"], out_keys=[RENAMED["value"]])
    actor = _actor(action=RENAMED["action"], **kwargs)
    retrace = _retrace(value_network=critic, actor_network=actor)
    retrace.set_keys(**RENAMED)
    return retrace


def test_custom_and_nested_keys() -> None:
    expected, data = _data(), _renamed(_data())
    plain, retrace = _retrace(), _renamed_retrace()
    torch.manual_seed(3)
    plain(expected)
    torch.manual_seed(3)
    retrace(data)
    torch.testing.assert_close(data["target"], expected["value_target"])
    torch.testing.assert_close(data["out", "advantage"], expected["advantage"])
    assert retrace.out_keys == [("out", "advantage"), "target"]
    assert ("next", "agent", "gain") in retrace.in_keys
    assert ("agent", "move") in retrace.in_keys


def test_custom_action_key_with_the_spec_of_the_actor() -> None:
    retrace = _renamed_retrace(spec=Composite({RENAMED["action"]: UNIT}))
    expected = _retrace(action_spec=UNIT)
    data = _data()
    torch.testing.assert_close(
        retrace.value_estimate(_renamed(data), next_value=_next_value(data)),
        expected.value_estimate(data, next_value=_next_value(data)),
    )


# Gradients and parameters -------------------------------------------------------------------------


def test_differentiable() -> None:
    retrace, data = _retrace(differentiable=True), _data()
    data["next", "reward"].requires_grad_()
    retrace(data)["value_target"].sum().backward()
    assert (data["next", "reward"].grad > 0).all()
    for network in (retrace.value_network, retrace.actor_network):
        assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_not_differentiable() -> None:
    retrace, data = _retrace(differentiable=False), _data()
    data["next", "reward"].requires_grad_()
    retrace(data)
    assert data["value_target"].is_leaf
    assert not data["value_target"].requires_grad
    assert not data["advantage"].requires_grad


@pytest.mark.parametrize("frozen", ["first", "last"])
def test_frozen_layers_stay_frozen_and_get_no_gradient(frozen: str) -> None:
    retrace, data = _retrace(differentiable=True), _data()
    networks = retrace.value_network, retrace.actor_network
    for network in networks:
        list(network.parameters())[0 if frozen == "first" else -1].requires_grad_(False)
    flags = [[p.requires_grad for p in network.parameters()] for network in networks]
    data["next", "reward"].requires_grad_()
    retrace(data)["value_target"].sum().backward()
    assert flags == [[p.requires_grad for p in network.parameters()] for network in networks]
    assert all(p.grad is None for network in networks for p in network.parameters())


@pytest.mark.parametrize("name", ["params", "target_params"])
def test_parameters_given(name: str) -> None:
    torch.manual_seed(2)
    critic, actor = _critic(), _actor()
    expected, data = _data(), _data()
    torch.manual_seed(3)
    _retrace(value_network=critic, actor_network=actor)(expected)
    given = {
        name: TensorDict.from_module(critic),
        "actor_params": TensorDict.from_module(actor),
    }
    if name == "target_params":  # they take precedence
        given["params"] = TensorDict.from_module(_critic())
    retrace = _retrace(differentiable=True)
    own = TensorDict.from_module(retrace.value_network).clone()
    torch.manual_seed(3)
    retrace(data, **given)
    torch.testing.assert_close(data["value_target"], expected["value_target"])
    torch.testing.assert_close(data["advantage"], expected["advantage"])
    assert not data["value_target"].requires_grad
    assert (TensorDict.from_module(retrace.value_network) == own).all()


# Construction -------------------------------------------------------------------------------------


def test_registered() -> None:
    defaults = default_value_kwargs("retrace")
    assert defaults == {"gamma": 0.99, "lmbda": 0.95, "differentiable": True}
    retrace = build_value_estimator(None, "retrace", lmbda=0.5)
    assert isinstance(retrace, Retrace)
    assert retrace.gamma.item() == pytest.approx(0.99)
    assert retrace.lmbda == 0.5
    assert retrace.value_network is retrace.actor_network is None
    assert set(retrace.state_dict()) == {"gamma", "lmbda"}


@pytest.mark.parametrize("name", ["gamma", "lmbda"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, torch.tensor(2.0)])
def test_rejects_discount_and_trace_parameter(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\], got"):
        _retrace(**{name: value})


def test_rejects_number_of_samples_and_shift() -> None:
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        _retrace(num_samples=0)
    with pytest.raises(TypeError, match="num_samples must be an integer, got float"):
        _retrace(num_samples=2.0)
    with pytest.raises(NotImplementedError, match="does not support shifted=True"):
        _retrace(shifted=True)


@pytest.mark.parametrize("name", ["value_network", "actor_network"])
def test_missing_network(name: str) -> None:
    networks = {"value_network": _critic(), "actor_network": _actor(), name: None}
    retrace, data = _retrace(**networks), _data()
    with pytest.raises(ValueError, match=f"built without {name}: pass it .* next_value"):
        retrace.value_estimate(data)
    values = torch.randn(2, 4, 7, 1)
    given = {"next_value": values[0], "state_action_value": values[1]}
    target = retrace.value_estimate(data, **given, log_pi=data["action_log_prob"])
    assert target.shape == (4, 7, 1)
    with pytest.raises(TypeError, match=r"unexpected arguments \['next_values'\]"):
        retrace.value_estimate(data, next_values=values[0])


# Checks of the data -------------------------------------------------------------------------------


def test_missing_log_probs() -> None:
    with pytest.raises(ValueError, match=r"'action_log_prob' is missing.*return_log_prob=True"):
        _retrace().value_estimate(_data().exclude("action_log_prob"))


def test_refuses_multi_step_data() -> None:
    data = _data().set("steps_to_next_obs", torch.full((4, 7, 1), 3))
    with pytest.raises(ValueError, match="one-step data, but the entry 'steps_to_next_obs'"):
        _retrace().value_estimate(data)


@pytest.mark.parametrize(("share", "said"), [(1.0, "100%"), (0.5, "50%")])
def test_refuses_log_probs_of_random_frames(share: float, said: str) -> None:
    retrace, data = _retrace(), _data(4, 8)
    data["action_log_prob"][: int(4 * share)] = 0.0
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{said} .*\n?exactly zero.*init_random_frames"):
            retrace.value_estimate(data)
    data["collector", "mask"] = data["action_log_prob"] != 0  # what is left out does not count
    if share < 1:
        assert retrace.value_estimate(data).isfinite().all()


def test_log_probs_are_checked_once() -> None:
    retrace, data = _retrace(), _data()
    retrace.value_estimate(data)
    data["action_log_prob"].zero_()
    assert retrace.value_estimate(data).isfinite().all()


def test_log_probs_may_have_a_feature_dimension() -> None:
    retrace, data = _retrace(), _data()
    expected = retrace.value_estimate(data, next_value=_next_value(data))
    data["action_log_prob"] = data["action_log_prob"].unsqueeze(-1)
    torch.testing.assert_close(retrace.value_estimate(data, next_value=_next_value(data)), expected)


def test_next_observation_of_a_terminal_step_may_be_nan() -> None:
    retrace, data = _retrace(), _data()
    terminated = data["next", "terminated"].squeeze(-1)
    assert terminated.any()
    torch.manual_seed(3)
    expected = retrace.value_estimate(data)
    data["next", "observation"][terminated] = math.nan
    torch.manual_seed(3)
    torch.testing.assert_close(retrace.value_estimate(data), expected)


# Types, devices, compilation ----------------------------------------------------------------------


def test_double_precision() -> None:
    networks = {"value_network": _critic().double(), "actor_network": _actor().double()}
    data = _data().apply(lambda x: x.double() if x.is_floating_point() else x)
    for spec in (None, UNIT):
        retrace = _retrace(**networks, action_spec=spec)
        assert retrace(data)["value_target"].dtype == torch.float64
        target = retrace.value_estimate(data, next_value=_next_value(data))
        expected = _expected(retrace, data, _next_value(data), clip=spec is not None)
        torch.testing.assert_close(target, expected, rtol=1e-12, atol=1e-12)


def test_meta_device() -> None:
    networks = {"value_network": _critic(device="meta"), "actor_network": _actor(device="meta")}
    retrace = _retrace(**networks, action_spec=UNIT, device="meta")
    assert retrace.gamma.is_meta
    assert retrace.action_low.is_meta
    data = retrace(_data().to("meta"))
    assert data["value_target"].is_meta
    assert data["value_target"].shape == data["advantage"].shape == (4, 7, 1)


@pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_modules:FutureWarning")
def test_compiles_as_one_graph_without_reading_the_data() -> None:
    retrace, data = _retrace(action_spec=UNIT), _data()
    expected = retrace.value_estimate(data, next_value=_next_value(data))
    fresh = _retrace(action_spec=UNIT)
    compiled = torch.compile(fresh.value_estimate, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(data, next_value=_next_value(data)), expected)
    data["action_log_prob"].zero_()
    assert compiled(data, next_value=_next_value(data)).isfinite().all()
    with pytest.raises(ValueError, match="exactly zero"):  # the compiled calls checked nothing
        fresh.value_estimate(data)
