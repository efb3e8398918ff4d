"""What ``Retrace`` refuses, and where it runs."""

from __future__ import annotations

import math

import pytest
import torch

from tests.objectives.value.retrace_problem import (
    UNIT,
    make_actor,
    make_critic,
    make_data,
    make_retrace,
    next_value_of,
    with_values,
)

# Construction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gamma", "lmbda"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, torch.tensor(2.0)])
def test_rejects_discount_and_trace_parameter(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\], got"):
        make_retrace(**{name: value})


@pytest.mark.parametrize("name", ["gamma", "lmbda"])
def test_rejects_a_discount_per_step(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a scalar, got shape \(2,\)"):
        make_retrace(**{name: torch.tensor([0.5, 0.5])})


def test_rejects_arguments() -> None:
    with pytest.raises(ValueError, match=r"trace must be one of 'retrace', .* got 'vtrace'"):
        make_retrace(trace="vtrace")
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        make_retrace(num_samples=0)
    with pytest.raises(TypeError, match="num_samples must be an integer, got float"):
        make_retrace(num_samples=2.0)
    with pytest.raises(TypeError, match="'num_sample'"):
        make_retrace(num_sample=2)
    # Values shifted by one step would be those of the stored next action, not an expectation.
    with pytest.raises(NotImplementedError, match="does not support shifted=True"):
        make_retrace(shifted=True)


# Missing parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["state_action_value", ("next", "state_action_value")])
def test_missing_stored_values(missing: str | tuple[str, str]) -> None:
    retrace = make_retrace(value_network=None, actor_network=make_actor())
    data = with_values(make_data()).exclude(missing)
    name = missing if isinstance(missing, str) else missing[1]
    for method in (retrace, retrace.value_estimate):
        with pytest.raises(ValueError, match=rf"without value_network, .* the entry .*'{name}'"):
            method(data)


@pytest.mark.parametrize("trace", ["retrace", "importance", "tree_backup"])
def test_missing_actor(trace: str) -> None:
    retrace = make_retrace(value_network=None, actor_network=None, trace=trace)
    data = with_values(make_data())
    with pytest.raises(ValueError, match=r"built without actor_network: .* log_pi"):
        retrace(data)
    assert retrace.value_estimate(data, log_pi=data["action_log_prob"]).shape == (4, 7, 1)
    sampling = make_retrace(value_network=make_critic(), actor_network=None, trace="q_lambda")
    with pytest.raises(ValueError, match=r"built without actor_network: .* next_value"):
        sampling(make_data())


def test_value_network_that_writes_another_entry() -> None:
    critic = make_critic(value="value")
    with pytest.raises(KeyError, match="state_action_value"):
        make_retrace(value_network=critic, actor_network=make_actor())(make_data())


@pytest.mark.parametrize("trace", ["retrace", "importance"])
def test_missing_log_probs(trace: str) -> None:
    with pytest.raises(ValueError, match=r"'action_log_prob' is missing.*return_log_prob=True"):
        make_retrace(trace=trace).value_estimate(make_data().exclude("action_log_prob"))


# Data that would be misread -----------------------------------------------------------------------


def test_refuses_multi_step_data() -> None:
    data = make_data().set("steps_to_next_obs", torch.full((4, 7, 1), 3))
    with pytest.raises(ValueError, match="one-step data, but the entry 'steps_to_next_obs'"):
        make_retrace().value_estimate(data)


@pytest.mark.parametrize(("share", "said"), [(1.0, "100%"), (0.5, "50%")])
def test_refuses_log_probs_of_random_frames(share: float, said: str) -> None:
    retrace, data = make_retrace(), make_data(4, 8)
    data["action_log_prob"][: int(4 * share)] = 0.0
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{said} .*exactly zero.*init_random_frames"):
            retrace.value_estimate(data)
    data["collector", "mask"] = data["action_log_prob"] != 0  # what is left out does not count
    if share < 1:
        assert retrace.value_estimate(data).isfinite().all()


def test_log_probs_are_checked_once() -> None:
    retrace, data = make_retrace(), make_data()
    retrace.value_estimate(data)
    data["action_log_prob"].zero_()
    assert retrace.value_estimate(data).isfinite().all()


@pytest.mark.parametrize("trace", ["tree_backup", "q_lambda"])
def test_log_probs_that_are_not_read_are_not_checked(trace: str) -> None:
    data = make_data()
    expected = make_retrace(trace=trace).value_estimate(data, next_value=next_value_of(data))
    data["action_log_prob"].zero_()
    found = make_retrace(trace=trace).value_estimate(data, next_value=next_value_of(data))
    torch.testing.assert_close(found, expected)


def test_log_probs_may_have_a_feature_dimension() -> None:
    retrace, data = make_retrace(), make_data()
    expected = retrace.value_estimate(data, next_value=next_value_of(data))
    data["action_log_prob"] = data["action_log_prob"].unsqueeze(-1)
    found = retrace.value_estimate(data, next_value=next_value_of(data))
    torch.testing.assert_close(found, expected)


# Devices, compilation -----------------------------------------------------------------------------


def test_meta_device() -> None:
    networks = {
        "value_network": make_critic(device="meta"),
        "actor_network": make_actor(device="meta"),
    }
    # Values of next states are stored: the search for NaN in them needs numbers.
    retrace = make_retrace(**networks, action_spec=UNIT, device="meta", skip_existing=True)
    assert retrace.gamma.is_meta
    assert retrace.action_low.is_meta
    data = with_values(make_data()).exclude("state_action_value").to("meta")
    retrace(data)
    assert data["value_target"].is_meta
    assert data["value_target"].shape == data["advantage"].shape == (4, 7, 1)


@pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_modules:FutureWarning")
def test_compiles_as_one_graph_without_reading_the_data() -> None:
    retrace, data = make_retrace(action_spec=UNIT), make_data()
    expected = retrace.value_estimate(data, next_value=next_value_of(data))
    fresh = make_retrace(action_spec=UNIT)
    compiled = torch.compile(fresh.value_estimate, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(data, next_value=next_value_of(data)), expected)
    data["action_log_prob"].zero_()
    assert compiled(data, next_value=next_value_of(data)).isfinite().all()
    with pytest.raises(ValueError, match="exactly zero"):  # the compiled calls checked nothing
        fresh.value_estimate(data)
