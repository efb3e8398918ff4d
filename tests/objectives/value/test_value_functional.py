"""The off-policy recursion: against sums written out, against TorchRL, and its boundaries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    td0_return_estimate,
    td1_return_estimate,
    td_lambda_return_estimate,
)

from minerva_torchrl.objectives.value import functional as V

GAMMA, LMBDA = 0.97, 0.9
RETRACE = pytest.mark.parametrize(
    "estimate", [V.retrace_return_estimate, V.vec_retrace_return_estimate]
)
GENERAL = pytest.mark.parametrize(
    "estimate", [V.off_policy_return_estimate, V.vec_off_policy_return_estimate]
)
Data = dict[str, Tensor]


def _data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Data:
    """Random steps; a fifth of them end a trajectory, half of those truly."""
    generator = torch.Generator().manual_seed(seed)
    names = ["log_pi", "log_mu", "state_action_value", "next_state_value", "reward"]
    data = {name: torch.randn(shape, generator=generator, dtype=dtype) for name in names}
    data["done"] = torch.rand(shape, generator=generator) < 0.2
    data["terminated"] = data["done"] & (torch.rand(shape, generator=generator) < 0.5)
    return data


def _without_ends(*shape: int, **kwargs) -> Data:
    data = _data(*shape, **kwargs)
    return data | {name: torch.zeros_like(data["done"]) for name in ("done", "terminated")}


def _coefficient(data: Data, lmbda: float = LMBDA) -> Tensor:
    return lmbda * torch.minimum((data["log_pi"] - data["log_mu"]).exp(), torch.tensor(1.0))


def _forward_sum(data: Data, coefficient: Tensor, gamma: float | Tensor = GAMMA) -> Tensor:
    r"""q_t + sum_k [prod_{t < i <= k} gamma (1 - done_{i-1}) c_i] delta_k, term by term."""
    q, v, reward = (data[k].mT for k in ("state_action_value", "next_state_value", "reward"))
    done, terminated, c = data["done"].mT, data["terminated"].mT, coefficient.mT
    gamma = torch.as_tensor(gamma, dtype=q.dtype).expand(data["reward"].shape).mT
    target = q.clone()
    length = q.shape[-1]
    for t in range(length):
        product = torch.ones_like(q[..., 0])
        for k in range(t, length):
            if k > t:
                product = product * gamma[..., k - 1] * ~done[..., k - 1] * c[..., k]
            delta = reward[..., k] + gamma[..., k] * ~terminated[..., k] * v[..., k] - q[..., k]
            target[..., t] += product * delta
    return target.mT


# Values -------------------------------------------------------------------------------------------


@RETRACE
def test_retrace_by_hand(estimate: Callable) -> None:
    # Ratios of 1/2 and 2 at the second and third step; the first one must not matter.
    log_ratio = torch.tensor([9.0, math.log(0.5), math.log(2.0)]).unsqueeze(-1)
    q = torch.tensor([[1.0], [2.0], [3.0]])
    v = torch.tensor([[4.0], [6.0], [8.0]])
    reward = torch.tensor([[1.0], [0.0], [-1.0]])
    done = torch.zeros(3, 1, dtype=torch.bool)
    target = estimate(0.5, 0.8, log_ratio, torch.zeros(3, 1), q, v, reward, done)
    # G_2 = -1 + 4; G_1 = 0.5 (6 + 0.8 (3 - 3)); G_0 = 1 + 0.5 (4 + 0.8 / 2 (3 - 2)).
    torch.testing.assert_close(target, torch.tensor([[3.2], [3.0], [3.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 200])
@pytest.mark.parametrize("batch", [(1,), (3,), (7, 3)])
@pytest.mark.parametrize("ends", [True, False])
def test_vectorised_form_equals_loop(
    batch: tuple[int, ...], length: int, dtype: torch.dtype, ends: bool
) -> None:
    data = (_data if ends else _without_ends)(*batch, length, 1, dtype=dtype)
    loop = V.retrace_return_estimate(GAMMA, LMBDA, **data)
    vectorised = V.vec_retrace_return_estimate(GAMMA, LMBDA, **data)
    assert vectorised.dtype == loop.dtype == dtype
    assert vectorised.shape == (*batch, length, 1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(vectorised, loop, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 9),
    features=st.integers(1, 3),
    lmbda=st.floats(0, 1),
    per_step_gamma=st.booleans(),
)
def test_both_forms_equal_the_forward_sum(
    seed: int, length: int, features: int, lmbda: float, per_step_gamma: bool
) -> None:
    data = _data(2, length, features, seed=seed)
    gamma = torch.rand_like(data["reward"]) if per_step_gamma else GAMMA
    expected = _forward_sum(data, _coefficient(data, lmbda), gamma)
    for estimate in (V.retrace_return_estimate, V.vec_retrace_return_estimate):
        torch.testing.assert_close(estimate(gamma, lmbda, **data), expected)


@GENERAL
@pytest.mark.parametrize(
    ("coefficient", "written_out"),
    [
        (
            lambda d: V.retrace_coefficient(d["log_pi"], d["log_mu"], LMBDA),
            lambda pi, mu: LMBDA * min(1.0, pi / mu),
        ),
        (lambda d: V.importance_coefficient(d["log_pi"], d["log_mu"]), lambda pi, mu: pi / mu),
        (lambda d: V.tree_backup_coefficient(d["log_pi"], LMBDA), lambda pi, mu: LMBDA * pi),
        (lambda d: V.q_lambda_coefficient(d["reward"], LMBDA), lambda pi, mu: LMBDA),
    ],
    ids=["retrace", "importance", "tree_backup", "q_lambda"],
)
def test_coefficients(estimate: Callable, coefficient: Callable, written_out: Callable) -> None:
    data = _data(3, 7, 1)
    found = coefficient(data)
    expected = torch.zeros_like(found)
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(7)).tolist():
        log_pi, log_mu = (data[k][index[0], index[1], 0].item() for k in ("log_pi", "log_mu"))
        expected[index[0], index[1], 0] = written_out(math.exp(log_pi), math.exp(log_mu))
    torch.testing.assert_close(found, expected)
    rest = {k: x for k, x in data.items() if k not in ("log_pi", "log_mu")}
    target = estimate(GAMMA, found, **rest)
    torch.testing.assert_close(target, _forward_sum(data, expected))


@RETRACE
def test_lambda_zero_is_one_step_expected_sarsa(estimate: Callable) -> None:
    data = _data(4, 9, 1)
    one_step = (data["next_state_value"], data["reward"], data["terminated"])
    target = estimate(GAMMA, 0.0, **data)
    torch.testing.assert_close(target, td0_return_estimate(GAMMA, *one_step))
    expected = data["reward"] + GAMMA * ~data["terminated"] * data["next_state_value"]
    torch.testing.assert_close(target, expected)


@RETRACE
def test_on_policy_lambda_one_is_the_corrected_n_step_return(estimate: Callable) -> None:
    data = _without_ends(4, 6, 1)
    data["log_mu"] = data["log_pi"]
    q, v, reward = (data[k] for k in ("state_action_value", "next_state_value", "reward"))
    discount = GAMMA ** torch.arange(6).unsqueeze(-1)
    corrected = reward + GAMMA * v
    corrected[:, :-1] -= GAMMA * q[:, 1:]  # every step but the last gives back what it expected
    target = estimate(GAMMA, 1.0, **data)
    torch.testing.assert_close(target[:, 0], (discount * corrected).sum(1))


@RETRACE
@pytest.mark.parametrize("lmbda", [0.0, 0.5, 1.0])
def test_on_policy_values_along_the_data_give_td_lambda(estimate: Callable, lmbda: float) -> None:
    data = _data(4, 11, 1)
    data["log_mu"] = data["log_pi"]
    following = data["state_action_value"].roll(-1, dims=-2)
    data["next_state_value"][:, :-1] = following[:, :-1].where(
        ~data["done"][:, :-1], data["next_state_value"][:, :-1]
    )
    rest = [data[k] for k in ("next_state_value", "reward", "done", "terminated")]
    target = estimate(GAMMA, lmbda, **data)
    torch.testing.assert_close(target, td_lambda_return_estimate(GAMMA, lmbda, *rest))
    if lmbda == 1.0:
        torch.testing.assert_close(target, td1_return_estimate(GAMMA, *rest))


@RETRACE
def test_is_generalised_advantage_estimation_with_lambda_of_the_next_step(
    estimate: Callable,
) -> None:
    data = _data(5, 12, 1)
    following = torch.cat([_coefficient(data)[:, 1:], torch.zeros(5, 1, 1)], 1)
    advantage, target = generalized_advantage_estimate(
        GAMMA,
        following,
        data["state_action_value"],
        data["next_state_value"],
        data["reward"],
        data["done"],
        data["terminated"],
    )
    found = estimate(GAMMA, LMBDA, **data)
    torch.testing.assert_close(found, target)
    torch.testing.assert_close(found - data["state_action_value"], advantage)


@RETRACE
def test_ratios_above_one_are_clipped(estimate: Callable) -> None:
    data = _without_ends(3, 6, 1)
    data["log_pi"] = data["log_mu"] + data["reward"].abs()
    on_policy = estimate(GAMMA, LMBDA, **(data | {"log_pi": data["log_mu"]}))
    torch.testing.assert_close(estimate(GAMMA, LMBDA, **data), on_policy, rtol=0, atol=0)


@RETRACE
@pytest.mark.parametrize("log_mu", [0.0, 300.0, -300.0])  # densities themselves over- or underflow
@pytest.mark.parametrize("log_ratio", [1e3, -1e3, -math.inf, math.inf])
def test_extreme_ratios(estimate: Callable, log_ratio: float, log_mu: float) -> None:
    data = _without_ends(3, 6, 1, dtype=torch.float32)
    data["log_mu"] = torch.full_like(data["log_mu"], log_mu)
    data["log_pi"] = data["log_mu"] + log_ratio
    target = estimate(GAMMA, LMBDA, **data)
    on_policy = data | {"log_pi": data["log_mu"]}
    expected = estimate(GAMMA, LMBDA if log_ratio > 0 else 0.0, **on_policy)
    torch.testing.assert_close(target, expected, rtol=0, atol=0)
    assert target.isfinite().all()


# Ends of trajectories -----------------------------------------------------------------------------


@RETRACE
def test_truncation_bootstraps_and_cuts_and_termination_only_cuts(estimate: Callable) -> None:
    data = _without_ends(3, 6, 1)
    data["done"][:, 2] = True
    bootstrapped = data["reward"] + GAMMA * data["next_state_value"]
    truncated = estimate(GAMMA, LMBDA, **data)
    torch.testing.assert_close(truncated[:, 2], bootstrapped[:, 2])
    data["terminated"][:, 2] = True
    terminated = estimate(GAMMA, LMBDA, **data)
    torch.testing.assert_close(terminated[:, 2], data["reward"][:, 2])
    torch.testing.assert_close(terminated[:, 3:], truncated[:, 3:])
    del data["terminated"]  # it defaults to done
    torch.testing.assert_close(estimate(GAMMA, LMBDA, **data), terminated)


@RETRACE
@pytest.mark.parametrize("terminates", [True, False])
def test_concatenated_trajectories_equal_split_ones(estimate: Callable, terminates: bool) -> None:
    pieces = [_without_ends(2, length, 1, seed=length) for length in (3, 1, 5, 4)]
    for piece in pieces[:-1]:
        piece["done"][:, -1] = True
        piece["terminated"][:, -1] = terminates
    joined = {k: torch.cat([piece[k] for piece in pieces], 1) for k in pieces[0]}
    split = torch.cat([estimate(GAMMA, LMBDA, **piece) for piece in pieces], 1)
    torch.testing.assert_close(estimate(GAMMA, LMBDA, **joined), split)


def _after_step_two(data: Data, change: Callable[[Tensor], Tensor | float]) -> Data:
    changed = {k: x.clone() for k, x in data.items()}
    for x in changed.values():
        x[:, 3:] = ~x[:, 3:] if x.dtype == torch.bool else change(x[:, 3:])
    return changed


@RETRACE
@pytest.mark.parametrize("terminated", [True, False])
def test_nothing_leaks_across_an_end(estimate: Callable, terminated: bool) -> None:
    data = _without_ends(2, 8, 1)
    data["done"][:, 2], data["terminated"][:, 2] = True, terminated
    before = estimate(GAMMA, LMBDA, **data)
    after = estimate(GAMMA, LMBDA, **_after_step_two(data, lambda x: 100 * x - 3))
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).any()


@RETRACE
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_rubbish_after_an_end_does_not_leak(estimate: Callable, rubbish: float) -> None:
    data = _without_ends(2, 8, 1)
    data["done"][:, 2] = True
    before = estimate(GAMMA, LMBDA, **data)
    after = estimate(GAMMA, LMBDA, **_after_step_two(data, lambda x: rubbish))
    assert torch.equal(before[:, :3], after[:, :3])


@RETRACE
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_next_value_of_a_terminal_step_may_be_anything(estimate: Callable, rubbish: float) -> None:
    data = _data(4, 9, 1)
    assert data["terminated"].any()
    expected = estimate(GAMMA, LMBDA, **data)
    data["next_state_value"][data["terminated"]] = rubbish
    data["reward"].requires_grad_()
    target = estimate(GAMMA, LMBDA, **data)
    assert torch.equal(target, expected)
    target.sum().backward()
    assert data["reward"].grad.isfinite().all()


# Shapes, gradients, devices, compilation ----------------------------------------------------------


@RETRACE
@pytest.mark.parametrize("time_dim", [0, 1, 2, -1, -2, -3])
def test_time_dim(estimate: Callable, time_dim: int) -> None:
    data = _data(4, 5, 3)  # five steps of three features
    expected = estimate(GAMMA, LMBDA, **data)
    per_feature = [
        estimate(GAMMA, LMBDA, **{k: x[..., [i]] for k, x in data.items()}) for i in (0, 1, 2)
    ]
    torch.testing.assert_close(expected, torch.cat(per_feature, -1))
    moved = {k: x.movedim(-2, time_dim) for k, x in data.items()}
    target = estimate(GAMMA, LMBDA, **moved, time_dim=time_dim)
    torch.testing.assert_close(target, expected.movedim(-2, time_dim))


@RETRACE
def test_time_only(estimate: Callable) -> None:
    data = _data(6)
    expected = estimate(GAMMA, LMBDA, **{k: x.unsqueeze(-1) for k, x in data.items()})
    torch.testing.assert_close(estimate(GAMMA, LMBDA, **data, time_dim=0), expected.squeeze(-1))


@RETRACE
def test_gamma_per_step(estimate: Callable) -> None:
    data = _data(3, 6, 1)
    expected = estimate(GAMMA, LMBDA, **data)
    for gamma in (torch.tensor(GAMMA).double(), torch.full((3, 6, 1), GAMMA).double()):
        torch.testing.assert_close(estimate(gamma, LMBDA, **data), expected, rtol=1e-6, atol=1e-6)
    gamma = torch.rand(3, 6, 1, dtype=torch.float64)
    target = estimate(gamma, LMBDA, **data)
    torch.testing.assert_close(target, _forward_sum(data, _coefficient(data), gamma))


@RETRACE
@pytest.mark.parametrize("ends", ["done", "terminated"])
def test_ends_as_numbers(estimate: Callable, ends: str) -> None:
    data = _data(3, 6, 1)
    expected = estimate(GAMMA, LMBDA, **data)
    torch.testing.assert_close(
        estimate(GAMMA, LMBDA, **(data | {ends: data[ends].double()})), expected
    )


@RETRACE
def test_gradient_to_the_reward(estimate: Callable) -> None:
    data = _data(1, 6, 1)
    coefficient = _coefficient(data)
    data["reward"].requires_grad_()
    (gradient,) = torch.autograd.grad(estimate(GAMMA, LMBDA, **data)[0, 0], data["reward"])
    expected = torch.zeros(1, 6, 1, dtype=torch.float64)
    product = 1.0
    for k in range(6):
        expected[0, k] = product
        if data["done"][0, k]:
            break
        product = product * GAMMA * coefficient[0, min(k + 1, 5)].item()
    torch.testing.assert_close(gradient, expected)


@RETRACE
@pytest.mark.parametrize("name", ["reward", "done", "terminated", "next_state_value"])
def test_rejects_shapes_that_differ(estimate: Callable, name: str) -> None:
    data = _data(3, 6, 1)
    data[name] = data[name].squeeze(-1)
    with pytest.raises(ValueError, match=rf"same shape, got .*{name} \(3, 6\)"):
        estimate(GAMMA, LMBDA, **data)


@GENERAL
def test_rejects_a_coefficient_of_another_shape(estimate: Callable) -> None:
    data = {k: x for k, x in _data(3, 6, 1).items() if not k.startswith("log")}
    with pytest.raises(ValueError, match=r"coefficient \(3, 6\), state_action_value \(3, 6, 1\)"):
        estimate(GAMMA, torch.ones(3, 6), **data)


@RETRACE
@pytest.mark.parametrize("time_dim", [3, -4])
def test_rejects_time_dim(estimate: Callable, time_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"time_dim must be .* shape \(3, 6, 1\), got {time_dim}"):
        estimate(GAMMA, LMBDA, **_data(3, 6, 1), time_dim=time_dim)


@RETRACE
def test_meta_device(estimate: Callable) -> None:
    target = estimate(GAMMA, LMBDA, **{k: x.to("meta") for k, x in _data(3, 6, 1).items()})
    assert target.is_meta
    assert target.shape == (3, 6, 1)
    assert target.dtype == torch.float64


def test_vectorised_form_compiles_as_one_graph() -> None:
    # Whether there is one graph does not depend on the code that a backend generates from it.
    compiled = torch.compile(V.vec_retrace_return_estimate, fullgraph=True, backend="aot_eager")
    results = []
    for estimate in (V.vec_retrace_return_estimate, compiled):
        data = _data(3, 13, 1)
        data["reward"].requires_grad_()
        target = estimate(GAMMA, LMBDA, **data)
        results.append((target, torch.autograd.grad(target.square().sum(), data["reward"])))
    torch.testing.assert_close(*results)
