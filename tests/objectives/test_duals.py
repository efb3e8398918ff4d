"""Dual variables and the exact solution of the temperature."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minerva_torchrl.objectives import DualVariable
from minerva_torchrl.objectives.functional import (
    mpo_weights_and_temperature_loss,
    sample_kl_to_uniform,
    solve_temperature,
    vmpo_weights_and_temperature_loss,
)

# The variable -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1000.0, 10.0, 1.0, 1e-3, 1e-6, 2.5e-8])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_real_units_in_and_out(value: float, dtype: torch.dtype, rtol: float) -> None:
    dual = DualVariable(value).to(dtype)
    dual.reset_parameters()
    expected = torch.tensor(value, dtype=dtype)
    torch.testing.assert_close(dual(), expected, rtol=rtol, atol=0)
    dual.raw.data.fill_(0.0)
    dual.set_(expected)
    torch.testing.assert_close(dual(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize(("raw", "expected"), [(0.0, math.log(2)), (1.0, 1.3132617), (50.0, 50.0)])
def test_value_is_the_softplus_of_the_parameter(raw: float, expected: float) -> None:
    dual = DualVariable(1.0)
    dual.raw.data.fill_(raw)
    torch.testing.assert_close(dual().item(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("raw", [-1e4, -100.0, -18.0, 0.0, 1e4])
def test_value_is_positive_and_finite(raw: float) -> None:
    dual = DualVariable(1.0)
    dual.raw.data.fill_(raw)
    assert 0 < dual().item() < math.inf


def test_one_value_per_dimension() -> None:
    dual = DualVariable(10.0, (3,))
    torch.testing.assert_close(dual(), torch.full((3,), 10.0))
    values = torch.tensor([1e-3, 1.0, 1e3])
    dual.set_(values)
    torch.testing.assert_close(dual().detach(), values)
    dual()[1].backward()
    assert dual.raw.grad[0] == dual.raw.grad[2] == 0
    assert dual.raw.grad[1] > 0
    assert repr(dual) == "DualVariable(init=10, shape=(3,), floor=2.5e-08, scale=raw)"


def test_projection_moves_only_what_is_below_the_floor() -> None:
    dual = DualVariable(1.0, (3,), floor=0.1)
    values = torch.tensor([1e-3, 0.5, 7.0])
    dual.raw.data.copy_(torch.log(torch.expm1(values)))
    torch.testing.assert_close(dual().detach(), values)
    dual.project_()
    torch.testing.assert_close(dual().detach(), torch.tensor([0.1, 0.5, 7.0]))
    dual.set_(torch.tensor([-1.0, 0.0, 0.2]))
    torch.testing.assert_close(dual().detach(), torch.tensor([0.1, 0.1, 0.2]))


def test_default_floor_is_a_raw_parameter_of_minus_18() -> None:
    dual = DualVariable(1.0)
    dual.raw.data.fill_(-30.0)
    dual.project_()
    assert dual.raw.item() == pytest.approx(-18.0, abs=0.03)
    assert dual().item() == pytest.approx(dual.floor, rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [(torch.optim.SGD, {"lr": 1e7}), (torch.optim.Adam, {"lr": 0.1})],
)
def test_a_variable_below_the_floor_recovers(optimizer: type, settings: dict) -> None:
    def steps(raw: torch.nn.Parameter, value, project) -> list[float]:
        history, optim = [], optimizer([raw], **settings)
        for _ in range(5):
            optim.zero_grad()
            (value() * (0.1 - 10.0)).backward()  # a constraint that is violated
            optim.step()
            project()
            history.append(value().item())
        return history

    dual = DualVariable(1.0)
    dual.raw.data.fill_(-25.0)
    dual.project_()
    dual().backward()
    assert dual.raw.grad > 0
    history = steps(dual.raw, dual, dual.project_)
    assert history[0] > dual.floor
    assert history == sorted(history)
    assert history[-1] > 1.2 * dual.floor

    # A floor in the forward pass would keep it there for good.
    raw = torch.nn.Parameter(torch.tensor(-25.0))
    history = steps(raw, lambda: torch.nn.functional.softplus(raw.clamp(min=-18.0)), lambda: None)
    assert len(set(history)) == 1


def test_gradient_is_that_of_the_softplus() -> None:
    dual = DualVariable(1.0, (2,)).double()
    dual.raw.data.copy_(torch.tensor([-3.0, 2.0]))
    dual().sum().backward()
    torch.testing.assert_close(dual.raw.grad, dual.raw.detach().sigmoid())


def test_reset() -> None:
    dual = DualVariable(3.0, (2,))
    dual.set_(torch.tensor([0.1, 50.0]))
    dual.reset_parameters()
    torch.testing.assert_close(dual().detach(), torch.full((2,), 3.0))


@pytest.mark.parametrize("learnable", [True, False])
def test_learnable(learnable: bool) -> None:
    dual = DualVariable(3.0, learnable=learnable)
    assert dual().requires_grad is dual.raw.requires_grad is learnable
    dual.set_(torch.tensor(4.0))
    torch.testing.assert_close(dual().item(), 4.0)
    assert dual.raw.requires_grad is learnable
    assert list(dual.state_dict()) == ["raw"]


def test_state_dict_round_trip() -> None:
    source, target = DualVariable(3.0, (2,)), DualVariable(1.0, (2,))
    source.set_(torch.tensor([0.25, 40.0]))
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(), source())
    with pytest.raises(RuntimeError, match="size mismatch"):
        DualVariable(1.0).load_state_dict(source.state_dict())


@pytest.mark.parametrize("init", [0.0, -1.0, math.inf, math.nan, 1e-9])
def test_rejects_init(init: float) -> None:
    with pytest.raises(ValueError, match="init must be finite and at least the floor"):
        DualVariable(init)


@pytest.mark.parametrize("floor", [0.0, -1.0, 1e-8, math.nan])
def test_rejects_floor(floor: float) -> None:
    with pytest.raises(ValueError, match="floor must be greater than 1e-08, got"):
        DualVariable(1.0, floor=floor)


def test_solve_sets_the_variable() -> None:
    dual = DualVariable(1.0, learnable=False)
    q_value = 5 * _randn(0, 20, 32).float()
    eta = dual.solve_(q_value, 0.1)
    assert eta.shape == ()
    assert not eta.requires_grad
    assert torch.equal(eta, dual())
    weights, _ = mpo_weights_and_temperature_loss(q_value, eta, 0.1)
    assert sample_kl_to_uniform(weights).mean().item() == pytest.approx(0.1, rel=1e-4)


def test_solve_passes_its_arguments_on() -> None:
    dual = DualVariable(1.0, floor=1e-3).double()
    value, keep = _randn(0, 6, 20), torch.tensor([True, False, True, True, True, True])
    arguments = {"sample_dim": -1, "log_prior": _randn(1, 6, 20), "mask": keep}
    torch.testing.assert_close(
        dual.solve_(value, 0.2, **arguments), solve_temperature(value, 0.2, **arguments)
    )
    torch.testing.assert_close(dual.solve_(torch.ones(20), 0.2).item(), 1e-3)


def test_solve_needs_a_scalar() -> None:
    dual = DualVariable(1.0, (3,))
    with pytest.raises(ValueError, match=r"scalar variable, but this one has shape \(3,\)"):
        dual.solve_(torch.randn(20), 0.1)
    torch.testing.assert_close(dual(), torch.ones(3))


# The exact temperature ----------------------------------------------------------------------------


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _values(kind: str, seed: int, n: int, states: int) -> Tensor:
    value = _randn(seed, n, states)
    if kind == "heavy-tailed":
        return value / _randn(seed + 1, n, states)
    if kind == "two-point":
        return (value == value.amax(0)).double()
    if kind == "mixed-scale":
        return value * 10 ** (2 * _randn(seed + 1, states))
    return value


KINDS = ["normal", "heavy-tailed", "two-point", "mixed-scale"]


def _divergence(value: Tensor, eta: Tensor, **kwargs) -> float:
    weights = mpo_weights_and_temperature_loss(value, eta, 0.0, **kwargs)[0]
    return sample_kl_to_uniform(weights, **kwargs).mean().item()


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(2, 40),
    states=st.integers(1, 20),
    scale=st.floats(0, 6).map(lambda exponent: 10.0**exponent),
    fraction=st.floats(1e-3, 0.95),
)
def test_solution_meets_any_bound(
    kind: str, seed: int, n: int, states: int, scale: float, fraction: float
) -> None:
    value = scale * _values(kind, seed, n, states)
    epsilon = fraction * math.log(n)
    eta = solve_temperature(value, epsilon, num_iterations=32)
    assert eta.shape == ()
    assert _divergence(value, eta) == pytest.approx(epsilon, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [1e-3, 0.01, 0.1, 0.5])
@pytest.mark.parametrize(("n", "states"), [(20, 256), (4096, 1)])
def test_default_iterations_suffice(kind: str, epsilon: float, n: int, states: int) -> None:
    value = 3 * _values(kind, 0, n, states)
    eta = solve_temperature(value, epsilon)
    assert _divergence(value, eta) == pytest.approx(epsilon, abs=1e-6)
    single = solve_temperature(value.float(), epsilon)
    assert _divergence(value, single.double()) == pytest.approx(epsilon, rel=1e-2)


@pytest.mark.parametrize("seed", [5, 7, 103])
def test_default_iterations_suffice_for_a_bound_between_two_scales(seed: int) -> None:
    # Half of log 20 is reached by one state alone; the other sets in at a far lower temperature.
    value = _randn(seed, 20, 2) * torch.tensor([1e4, 1.0], dtype=torch.float64)
    assert _divergence(value, solve_temperature(value, 1.5)) == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0])
def test_solution_minimises_the_dual(kind: str, epsilon: float) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    value = _values(kind, 3, 20, 16)

    def dual(log_eta: float) -> float:
        eta = torch.tensor(log_eta, dtype=torch.float64).exp()
        # The part that does not depend on the temperature would only cost accuracy.
        centred = value - value.amax(0)
        return mpo_weights_and_temperature_loss(centred, eta, epsilon)[1].mean().item()

    expected = solve_temperature(value, epsilon).log().item()
    found = optimize.minimize_scalar(
        dual, bounds=(expected - 3, expected + 2), method="bounded", options={"xatol": 1e-9}
    )
    assert found.x == pytest.approx(expected, abs=1e-5)


def _truncated_normal_divergence(eta: float, fraction: float) -> float:
    """Divergence of the weights exp(A / eta) for A the upper part of a standard normal."""
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), 1.0)
    cut = normal.icdf(torch.tensor(1 - fraction).double())
    t = torch.tensor(1 / eta, dtype=torch.float64, requires_grad=True)
    cumulants = t**2 / 2 + normal.cdf(t - cut).log() - math.log(fraction)
    (slope,) = torch.autograd.grad(cumulants, t)
    return (t * slope - cumulants).item()


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.5, [4.46, 3.21, 1.53, 1.28, 1.03, 0.77]), (0.7, [5.14, 3.69, 1.74, 1.44, 1.15, 0.85])],
)
def test_temperature_of_standardised_advantages(fraction: float, expected: list[float]) -> None:
    quantiles = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    advantage = torch.distributions.Normal(0.0, 1.0).icdf(quantiles)
    selected = vmpo_weights_and_temperature_loss(
        advantage, torch.tensor(1.0), 0.1, top_k_fraction=fraction
    )[2]
    log_prior = torch.zeros_like(advantage).masked_fill(~selected, -math.inf)
    bounds = [0.01, 0.02, 0.1, 0.15, 0.25, 0.5]
    found = [solve_temperature(advantage, bound, log_prior=log_prior).item() for bound in bounds]
    assert found == pytest.approx(expected, rel=0.02)
    in_the_limit = [_truncated_normal_divergence(eta, fraction) for eta in found]
    assert in_the_limit == pytest.approx(bounds, rel=0.02)


def test_sample_left_out_by_its_prior_does_not_count() -> None:
    value, selected = _randn(0, 50), _randn(1, 50) > 0
    log_prior = selected.double().log() + 3.0  # priors need not be normalised
    expected = solve_temperature(value[selected], 0.2)
    value[~selected] = (
        torch.tensor([math.nan, math.inf, 1e9]).double().repeat(50)[: (~selected).sum()]
    )
    torch.testing.assert_close(solve_temperature(value, 0.2, log_prior=log_prior), expected)


def test_solution_with_a_prior() -> None:
    value, log_prior = _randn(0, 30, 4), _randn(1, 30, 4)
    eta = solve_temperature(value, 0.3, log_prior=log_prior)
    prior, weights = log_prior.softmax(0), (value / eta + log_prior).softmax(0)
    assert (weights * (weights / prior).log()).sum(0).mean().item() == pytest.approx(0.3, abs=1e-9)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, 1e12])
def test_mask_leaves_states_out(rubbish: float) -> None:
    value, keep = _randn(0, 20, 5), torch.tensor([True, False, True, True, False])
    expected = solve_temperature(value[:, keep], 0.1)
    value[:, ~keep] = rubbish
    torch.testing.assert_close(solve_temperature(value, 0.1, mask=keep), expected)
    torch.testing.assert_close(solve_temperature(value.mT, 0.1, sample_dim=-1, mask=keep), expected)
    nothing = solve_temperature(value, 0.1, mask=torch.zeros(5, dtype=torch.bool))
    assert nothing.item() == pytest.approx(1e-8)


@pytest.mark.parametrize("floor", [1e-8, 1e-3])
def test_floor_when_no_temperature_reaches_the_bound(floor: float) -> None:
    constant = torch.full((20, 3), 7.0)
    assert solve_temperature(constant, 0.1, floor=floor).item() == pytest.approx(floor)
    # The weights of twenty samples cannot be further from uniform than log 20.
    for epsilon in (math.log(20) + 0.01, 10.0):
        eta = solve_temperature(_randn(0, 20, 3), epsilon, floor=floor)
        assert eta.item() == pytest.approx(floor, rel=0.02)
        assert eta.item() >= floor * (1 - 1e-6)


def test_no_gradient_into_the_values() -> None:
    assert not solve_temperature(_randn(0, 20, 3).requires_grad_(), 0.1).requires_grad


def test_solve_and_project_without_host_synchronisation() -> None:
    dual = DualVariable(1.0)
    value = _randn(0, 20, 8).float()
    expected = DualVariable(1.0).solve_(value, 0.1)

    @torch.compile(fullgraph=True, backend="eager")
    def solve(x: Tensor) -> Tensor:
        eta = dual.solve_(x, 0.1)
        dual.project_()
        return eta

    torch.testing.assert_close(solve(value), expected)
    torch.testing.assert_close(dual().detach(), expected)
    on_meta = DualVariable(1.0).to("meta")
    on_meta.project_()
    assert on_meta.solve_(value.to("meta"), 0.1).is_meta
