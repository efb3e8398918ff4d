"""``Retrace`` does what every value estimator of TorchRL does."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import set_skip_existing
from torchrl.data import Composite
from torchrl.objectives.utils import build_value_estimator, default_value_kwargs

from minerva_torchrl.objectives import Retrace
from tests.objectives.value.retrace_problem import (
    LMBDA,
    TRACES,
    UNIT,
    expected_target,
    make_actor,
    make_critic,
    make_data,
    make_retrace,
    next_value_of,
    seeded,
    with_values,
)

STATES = ["observation", "action"]
ENDS = [("next", "reward"), ("next", "done"), ("next", "terminated")]
VALUES = ["state_action_value", ("next", "state_action_value")]


def _forward(retrace: Retrace, data: TensorDict, **kwargs: Any) -> TensorDict:
    return seeded(retrace, data.clone(), **kwargs)


def _assert_same(found: TensorDict, expected: TensorDict) -> None:
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(found[key], expected[key])


# Calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("has_value_network", [True, False])
def test_dispatch(trace: str, has_value_network: bool) -> None:
    retrace, data = make_retrace(trace=trace), make_data()
    if not has_value_network:
        retrace = make_retrace(trace=trace, value_network=None, actor_network=make_actor())
        data = with_values(data)
    arguments = {
        "_".join([key] if isinstance(key, str) else key): data[key] for key in retrace.in_keys
    }
    advantage, target = seeded(retrace, **arguments)
    expected = _forward(retrace, data)
    torch.testing.assert_close(advantage, expected["advantage"])
    torch.testing.assert_close(target, expected["value_target"])


def test_in_keys() -> None:
    following = [("next", "observation"), *ENDS]
    assert make_retrace().in_keys == [*STATES, "action_log_prob", *following]
    assert make_retrace(trace="tree_backup").in_keys == [*STATES, *following]
    stored = make_retrace(value_network=None, actor_network=make_actor(), group_key="task")
    before, after = VALUES
    assert stored.in_keys == [*STATES, before, "action_log_prob", "task", after, *ENDS]


def test_writes_the_values() -> None:
    retrace, data = make_retrace(), make_data()
    before = data.clone()
    assert retrace(data) is data
    assert set(data.keys()) == {*before.keys(), "value_target", "advantage", "state_action_value"}
    _assert_same(data.select(*before.keys(True, True)), before)
    value = retrace.value_network.module(data["observation"], data["action"]).detach()
    next_value = data["next", "state_action_value"]
    expected = expected_target(retrace, data, next_value)
    torch.testing.assert_close(data["state_action_value"], value)
    torch.testing.assert_close(data["value_target"], expected)
    torch.testing.assert_close(data["advantage"], expected - value)


def test_value_estimate_writes_nothing() -> None:
    retrace, data = make_retrace(), make_data()
    target = seeded(retrace.value_estimate, data)
    _assert_same(data, make_data())
    torch.testing.assert_close(target, _forward(retrace, data)["value_target"])


def test_stored_values() -> None:
    data = with_values(make_data())
    retrace = make_retrace(value_network=None, actor_network=make_actor())
    stored = {"state_action_value": data[VALUES[0]], "next_value": data[VALUES[1]]}
    expected = retrace.value_estimate(data.exclude(*VALUES), **stored)
    torch.testing.assert_close(retrace.value_estimate(data), expected)
    retrace(data)
    torch.testing.assert_close(data["value_target"], expected)
    torch.testing.assert_close(data["advantage"], expected - stored["state_action_value"])
    _assert_same(data.exclude("value_target", "advantage"), with_values(make_data()))


@pytest.mark.parametrize("has_value_network", [True, False])
@pytest.mark.parametrize("setting", [True, False, None])
@pytest.mark.parametrize("context", [True, False, None])
def test_skip_existing(has_value_network: bool, setting: bool | None, context: bool | None) -> None:
    networks = {"value_network": make_critic() if has_value_network else None}
    retrace = make_retrace(**networks, actor_network=make_actor(), skip_existing=setting)
    data = with_values(make_data())
    with nullcontext() if context is None else set_skip_existing(context):
        found = _forward(retrace, data)
    skip = context if setting is None else setting
    if skip or not has_value_network:
        reader = make_retrace(value_network=None, actor_network=retrace.actor_network)
        _assert_same(found, _forward(reader, data))
    else:
        _assert_same(found, _forward(retrace, make_data()))


@pytest.mark.parametrize("name", ["params", "target_params"])
def test_parameters_given(name: str) -> None:
    torch.manual_seed(2)
    critic, actor = make_critic(), make_actor()
    expected = _forward(make_retrace(value_network=critic, actor_network=actor), make_data())
    given = {name: TensorDict.from_module(critic), "actor_params": TensorDict.from_module(actor)}
    if name == "target_params":  # they take precedence
        given["params"] = TensorDict.from_module(make_critic())
    retrace = make_retrace(differentiable=True)
    own = TensorDict.from_module(retrace.value_network).clone()
    found = _forward(retrace, make_data(), **given)
    _assert_same(found, expected)
    assert not found["value_target"].requires_grad
    assert (TensorDict.from_module(retrace.value_network) == own).all()


# Calls of the critic in parts ---------------------------------------------------------------------

CHUNKS = [
    {"value_chunk_size": 3},
    {"num_chunks": 3},
    {"num_chunk": 3},
    {"value_chunk_size": 3, "value_chunk_dim": 1},
    {"num_chunks": 3, "value_chunk_dim": -1},
    {"num_chunks": 100},
]


@pytest.mark.parametrize("deactivate_vmap", [True, False])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunked_calls_equal_unchunked_ones(chunks: dict[str, int], deactivate_vmap: bool) -> None:
    expected = _forward(make_retrace(), make_data())
    retrace = make_retrace(**chunks, deactivate_vmap=deactivate_vmap)
    _assert_same(_forward(retrace, make_data()), expected)


def _shapes_of_calls(retrace: Retrace) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    retrace.value_network.register_forward_pre_hook(
        lambda _, args: shapes.append(tuple(args[0].shape))
    )
    retrace(make_data())
    return shapes


def test_size_of_chunks() -> None:
    """First the stored actions, then the sampled ones."""
    assert _shapes_of_calls(make_retrace(num_samples=5)) == [(4, 7), (5, 4, 7)]
    halves = [(2, 7), (2, 7), (5, 2, 7), (5, 2, 7)]
    assert _shapes_of_calls(make_retrace(num_samples=5, num_chunks=2)) == halves
    along_time = {"value_chunk_size": 4, "value_chunk_dim": 1}
    parts = [(4, 4), (4, 3), (5, 4, 4), (5, 4, 3)]
    assert _shapes_of_calls(make_retrace(num_samples=5, **along_time)) == parts
    one_by_one = make_retrace(num_samples=5, deactivate_vmap=True)
    assert _shapes_of_calls(one_by_one) == [(4, 7)] * 6


def test_rejects_chunks() -> None:
    with pytest.raises(ValueError, match="value_chunk_size and num_chunks cannot both be set"):
        make_retrace(value_chunk_size=3, num_chunks=2)
    with pytest.raises(ValueError, match="num_chunks and num_chunk cannot both be set"):
        make_retrace(num_chunks=2, num_chunk=3)
    with pytest.raises(ValueError, match=r"value_chunk_size must be >= 1, got 0"):
        make_retrace(value_chunk_size=0)
    with pytest.raises(ValueError, match="value_chunk_dim=2 is out of bounds"):
        make_retrace(num_chunks=2, value_chunk_dim=2)(make_data())


# Gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("frozen", [None, "first", "last"])
def test_gradient_to_the_reward_only(trace: str, frozen: str | None) -> None:
    retrace, data = make_retrace(differentiable=True, trace=trace), make_data()
    networks = retrace.value_network, retrace.actor_network
    for network in networks if frozen else ():
        list(network.parameters())[0 if frozen == "first" else -1].requires_grad_(False)
    flags = [[p.requires_grad for p in network.parameters()] for network in networks]
    data["next", "reward"].requires_grad_()
    retrace(data)["advantage"].sum().backward()
    assert (data["next", "reward"].grad > 0).all()
    assert flags == [[p.requires_grad for p in network.parameters()] for network in networks]
    assert all(p.grad is None for network in networks for p in network.parameters())


@pytest.mark.parametrize("average_adv", [True, False])
def test_not_differentiable(average_adv: bool) -> None:
    retrace, data = make_retrace(differentiable=False, average_adv=average_adv), make_data()
    data["next", "reward"].requires_grad_()
    retrace(data)
    for key in ("value_target", "advantage", *VALUES):
        assert data[key].is_leaf
        assert not data[key].requires_grad


# Time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorized", [True, False])
def test_time_dim(vectorized: bool) -> None:
    def make(**kwargs: Any) -> Retrace:
        return make_retrace(
            value_network=None, actor_network=actor, vectorized=vectorized, **kwargs
        )

    actor, data = make_actor(), with_values(make_data())
    turned = data.transpose(0, 1).contiguous()
    expected = _forward(make(), data)  # the last dimension
    _assert_same(_forward(make(time_dim=1), data), expected)
    _assert_same(_forward(make(time_dim=0), data, time_dim=-1), expected)
    _assert_same(_forward(make(time_dim=0), turned).transpose(0, 1), expected)
    _assert_same(_forward(make(), turned, time_dim=-2).transpose(0, 1), expected)
    turned.names = ["time", None]
    found = make().value_estimate(turned)
    torch.testing.assert_close(found.transpose(0, 1), expected["value_target"])


@pytest.mark.parametrize(("batch", "time_dim"), [((4, 7), 2), ((4, 7), -3), ((), None)])
def test_rejects_time_dim(batch: tuple[int, ...], time_dim: int | None) -> None:
    data = make_data()[(0,) * (2 - len(batch))]
    with pytest.raises(ValueError, match="time_dim must be a dimension of the data"):
        make_retrace().value_estimate(data, time_dim=time_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spec", [None, UNIT])
def test_dtypes(dtype: torch.dtype, spec: Any) -> None:
    networks = {"value_network": make_critic().to(dtype), "actor_network": make_actor().to(dtype)}
    data = make_data().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    retrace = make_retrace(**networks, action_spec=spec)
    assert all(retrace(data)[key].dtype == dtype for key in ("value_target", "advantage", *VALUES))
    target = retrace.value_estimate(data, next_value=next_value_of(data))
    expected = expected_target(retrace, data, next_value_of(data), clip=spec is not None)
    torch.testing.assert_close(target, expected)


# Data ---------------------------------------------------------------------------------------------


def test_next_observation_of_a_terminal_step_may_be_nan() -> None:
    retrace, data = make_retrace(), make_data()
    terminated = data["next", "terminated"].squeeze(-1)
    assert terminated.any()
    expected = _forward(retrace, data)
    data["next", "observation"][terminated] = math.nan
    found = _forward(retrace, data)
    assert found["next", "state_action_value"].isfinite().all()
    for key in ("value_target", "advantage"):
        torch.testing.assert_close(found[key], expected[key])


def test_missing_next_observation_of_a_truncated_step() -> None:
    """As in TorchRL's estimators the observation itself stands for the one that is missing."""
    retrace, data = make_retrace(), make_data()
    truncated = (data["next", "done"] & ~data["next", "terminated"]).squeeze(-1)
    assert truncated.any()
    data["next", "observation"][truncated] = data["observation"][truncated]
    expected = _forward(retrace, data)["value_target"]
    data["next", "observation"][truncated] = math.nan
    torch.testing.assert_close(_forward(retrace, data)["value_target"], expected)


def test_terminated_defaults_to_done() -> None:
    data = make_data()
    data["next", "terminated"] = data["next", "done"].clone()
    expected = _forward(make_retrace(), data)
    found = _forward(make_retrace(), data.exclude(("next", "terminated")))
    _assert_same(found, expected.exclude(("next", "terminated")))


# Keys ---------------------------------------------------------------------------------------------

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


def _renamed_retrace(**kwargs: Any) -> Retrace:
    torch.manual_seed(1)
    critic = make_critic(RENAMED["action"], RENAMED["value"])
    actor = make_actor(action=RENAMED["action"], **kwargs)
    retrace = make_retrace(value_network=critic, actor_network=actor)
    retrace.set_keys(**RENAMED)
    return retrace


def test_set_keys() -> None:
    retrace = make_retrace()
    assert retrace.tensor_keys.value == "state_action_value"
    assert retrace.tensor_keys.sample_log_prob == "action_log_prob"
    with pytest.raises(KeyError, match="unknown is not an accepted tensordict key"):
        retrace.set_keys(unknown="value")
    with pytest.raises(KeyError, match="value key 'value' not found in value network out_keys"):
        retrace.set_keys(value="value")
    with pytest.raises(RuntimeError, match="via constructor is deprecated"):
        make_retrace(value_key="state_action_value")


def test_custom_and_nested_keys() -> None:
    expected, retrace = _forward(make_retrace(), make_data()), _renamed_retrace()
    data = _forward(retrace, _renamed(make_data()))
    torch.testing.assert_close(data["target"], expected["value_target"])
    torch.testing.assert_close(data["out", "advantage"], expected["advantage"])
    torch.testing.assert_close(data["agent", "q"], expected["state_action_value"])
    torch.testing.assert_close(data["next", "agent", "q"], expected[VALUES[1]])
    assert retrace.out_keys == [("out", "advantage"), "target"]
    assert {("next", "agent", "gain"), ("agent", "move")} < set(retrace.in_keys)


def test_custom_action_key_with_the_spec_of_the_actor() -> None:
    retrace = _renamed_retrace(spec=Composite({RENAMED["action"]: UNIT}))
    data = make_data()
    torch.testing.assert_close(
        retrace.value_estimate(_renamed(data), next_value=next_value_of(data)),
        make_retrace(action_spec=UNIT).value_estimate(data, next_value=next_value_of(data)),
    )


# The registry -------------------------------------------------------------------------------------


def test_registered() -> None:
    defaults = default_value_kwargs("retrace")
    assert defaults == {"gamma": 0.99, "lmbda": 0.95, "differentiable": True}
    retrace = build_value_estimator(None, "retrace", lmbda=LMBDA, trace="q_lambda")
    assert isinstance(retrace, Retrace)
    assert retrace.gamma.item() == pytest.approx(0.99)
    assert retrace.lmbda == LMBDA
    assert retrace.trace == "q_lambda"
    assert retrace.value_network is retrace.actor_network is None
    assert set(retrace.state_dict()) == {"gamma", "lmbda"}


def test_a_loss_gives_the_values_of_an_estimator_without_a_critic() -> None:
    data, without = with_values(make_data()), build_value_estimator(None, "retrace")
    assert without.needs_action_values
    assert not make_retrace().needs_action_values
    actor = make_actor()
    given = {
        "next_value": data[VALUES[1]],
        "state_action_value": data[VALUES[0]],
        "log_pi": actor.get_dist(data).log_prob(data["action"]),
    }
    expected = make_retrace(
        gamma=0.99, lmbda=0.95, value_network=None, actor_network=actor
    ).value_estimate(data)
    torch.testing.assert_close(without.value_estimate(data.exclude(*VALUES), **given), expected)
