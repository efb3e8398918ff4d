"""The E-steps of MPO and V-MPO: cases worked by hand, finite differences and properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minerva_torchrl.objectives import functional as F

SEEDS = st.integers(0, 2**32 - 1)
TEMPERATURES = st.floats(-2.0, 3.0).map(lambda exponent: 10.0**exponent)
EPSILONS = st.floats(1e-3, 1.0)
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=2).map(tuple)
few_examples = settings(max_examples=60, deadline=None)


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _kl(weights: Tensor, prior: Tensor | float, dim: int = 0) -> Tensor:
    return (torch.special.xlogy(weights, weights) - torch.special.xlogy(weights, prior)).sum(dim)


def _leaf(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def _slope(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.grad(loss(x), x)[0]


def _difference(loss: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    return (loss(x + step) - loss(x - step)) / (2 * step)


# E-step of MPO -----------------------------------------------------------------------------------


def _mpo_loss(q_value: Tensor, epsilon: float) -> Callable[[Tensor], Tensor]:
    return lambda eta: F.mpo_weights_and_temperature_loss(q_value, eta, epsilon)[1].mean()


def test_mpo_weights_by_hand() -> None:
    eta = _leaf(2.0)
    q_value = torch.tensor([5.0, 5.0 + 2 * math.log(3)], dtype=torch.float64)
    weights, loss = F.mpo_weights_and_temperature_loss(q_value, eta, 0.1)
    torch.testing.assert_close(weights.tolist(), [0.25, 0.75])
    torch.testing.assert_close(loss.item(), 2 * (0.1 + math.log(2)) + 5)
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    torch.testing.assert_close(_slope(_mpo_loss(q_value, 0.1), eta).item(), 0.1 - divergence)


@pytest.mark.parametrize("eta", [0.3, 1.0, 20.0])
def test_mpo_temperature_gradient_by_finite_differences(eta: float) -> None:
    loss = _mpo_loss(3 * _randn(0, 20, 6), 0.1)
    torch.testing.assert_close(
        _slope(loss, _leaf(eta)), _difference(loss, _leaf(eta)).detach(), rtol=1e-7, atol=1e-9
    )


@few_examples
@given(seed=SEEDS, shape=SHAPES, n=st.integers(1, 12), eta=TEMPERATURES, epsilon=EPSILONS)
def test_mpo_temperature_gradient_is_bound_minus_divergence(
    seed: int, shape: tuple[int, ...], n: int, eta: float, epsilon: float
) -> None:
    q_value = 10 * _randn(seed, n, *shape)
    weights, loss = F.mpo_weights_and_temperature_loss(q_value, _leaf(eta), epsilon)
    assert weights.shape == q_value.shape
    assert loss.shape == shape
    torch.testing.assert_close(weights, (q_value / eta).softmax(0))
    slope = _slope(_mpo_loss(q_value, epsilon), _leaf(eta))
    torch.testing.assert_close(slope, epsilon - _kl(weights, 1 / n).mean())

    # A constant added to the values of a state moves nothing but the loss.
    shift = 100 * _randn(seed + 1, *shape)
    moved, moved_loss = F.mpo_weights_and_temperature_loss(q_value + shift, _leaf(eta), epsilon)
    torch.testing.assert_close(moved, weights, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(moved_loss, loss + shift)
    moved_slope = _slope(_mpo_loss(q_value + shift, epsilon), _leaf(eta))
    torch.testing.assert_close(moved_slope, slope, rtol=1e-6, atol=1e-9)


def test_mpo_equal_values_give_uniform_weights() -> None:
    q_value = torch.full((8, 3), 4.2, dtype=torch.float64)
    weights, _ = F.mpo_weights_and_temperature_loss(q_value, _leaf(0.5), 0.1)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 8))
    torch.testing.assert_close(_slope(_mpo_loss(q_value, 0.1), _leaf(0.5)).item(), 0.1)


@pytest.mark.parametrize("sample_dim", [0, 1, 2, -1, -2])
def test_mpo_sample_dim(sample_dim: int) -> None:
    q_value = _randn(0, 7, 2, 3)
    weights, loss = F.mpo_weights_and_temperature_loss(q_value, _leaf(2.0), 0.1)
    moved, moved_loss = F.mpo_weights_and_temperature_loss(
        q_value.movedim(0, sample_dim), _leaf(2.0), 0.1, sample_dim=sample_dim
    )
    torch.testing.assert_close(moved, weights.movedim(0, sample_dim))
    torch.testing.assert_close(moved_loss, loss)


EXTREMES = [(0.0, 1e6, 1e-3), (1e6, 1.0, 1e-3), (1e6, 1.0, 1.0), (-1e6, 10.0, 1.0), (0, 1e-3, 1e3)]


@pytest.mark.parametrize(("offset", "spread", "eta"), EXTREMES)
def test_mpo_extreme_values_in_single_precision(offset: float, spread: float, eta: float) -> None:
    q_value = (offset + spread * _randn(0, 20, 16)).float()
    weights, loss = F.mpo_weights_and_temperature_loss(q_value, torch.tensor(eta), 0.1)
    exact, _ = F.mpo_weights_and_temperature_loss(q_value.double(), torch.tensor(eta).double(), 0.1)
    assert loss.isfinite().all()
    torch.testing.assert_close(weights.double(), exact, rtol=1e-4, atol=1e-6)
    slope = _slope(_mpo_loss(q_value, 0.1), _leaf(eta, torch.float32))
    torch.testing.assert_close(
        slope.double(), 0.1 - _kl(exact, 1 / 20).mean(), rtol=1e-4, atol=1e-5
    )


# E-step with a prior -----------------------------------------------------------------------------


def _prior(seed: int, *shape: int) -> Tensor:
    return _randn(seed, *shape).log_softmax(0)


def test_mpo_prior_by_hand() -> None:
    """Two actions with probabilities 1/4 and 3/4, of which the first is worth log 9 times eta."""
    eta = _leaf(2.0)
    q_value = torch.tensor([7.0 + 2 * math.log(9), 7.0], dtype=torch.float64)
    log_prior = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    weights, loss = F.mpo_weights_and_temperature_loss(q_value, eta, 0.1, log_prior=log_prior)
    torch.testing.assert_close(weights.tolist(), [0.75, 0.25])  # as 9 / 4 to 3 / 4
    torch.testing.assert_close(loss.item(), 2 * (0.1 + math.log(3)) + 7)
    divergence = 0.75 * math.log(3) - 0.25 * math.log(3)
    torch.testing.assert_close(F.sample_kl(weights, log_prior).item(), divergence)
    (slope,) = torch.autograd.grad(loss, eta)
    torch.testing.assert_close(slope.item(), 0.1 - divergence)


def test_mpo_uniform_prior_is_none() -> None:
    q_value = _randn(0, 7, 5)
    uniform = torch.full_like(q_value, -math.log(7))
    plain, with_prior = (
        F.mpo_weights_and_temperature_loss(q_value, _leaf(0.6), 0.1, log_prior=log_prior)
        for log_prior in (None, uniform)
    )
    torch.testing.assert_close(with_prior, plain)
    torch.testing.assert_close(F.sample_kl(plain[0], uniform), F.sample_kl(plain[0]))
    torch.testing.assert_close(F.sample_kl(plain[0]), F.sample_kl_to_uniform(plain[0]))


@few_examples
@given(seed=SEEDS, shape=SHAPES, n=st.integers(1, 12), eta=TEMPERATURES, epsilon=EPSILONS)
def test_mpo_prior_properties(
    seed: int, shape: tuple[int, ...], n: int, eta: float, epsilon: float
) -> None:
    q_value, log_prior = 10 * _randn(seed, n, *shape), _prior(seed + 1, n, *shape)
    temperature = _leaf(eta)
    weights, loss = F.mpo_weights_and_temperature_loss(
        q_value, temperature, epsilon, log_prior=log_prior
    )
    torch.testing.assert_close(weights, (q_value / eta + log_prior).softmax(0))
    expected = eta * (epsilon + (q_value / eta + log_prior).logsumexp(0))
    torch.testing.assert_close(loss.detach(), expected)
    divergence = F.sample_kl(weights, log_prior)
    torch.testing.assert_close(divergence, _kl(weights, log_prior.exp()))
    (slope,) = torch.autograd.grad(loss.mean(), temperature)
    torch.testing.assert_close(slope, epsilon - divergence.mean(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rubbish", [1e30, math.inf, -math.inf, math.nan])
def test_mpo_impossible_candidates(rubbish: float) -> None:
    """A candidate that can't be taken is as good as absent, whatever its value."""
    q_value, log_prior = _randn(0, 6, 4), _prior(1, 6, 4)
    log_prior[2] = -math.inf
    possible = torch.arange(6) != 2
    results = []
    for q, p in ((q_value[possible], log_prior[possible]), (q_value, log_prior)):
        if len(q) == 6:
            q[2] = rubbish
        eta = _leaf(0.4)
        weights, loss = F.mpo_weights_and_temperature_loss(q, eta, 0.1, log_prior=p)
        slope = torch.autograd.grad(loss.mean(), eta)[0]
        results.append((weights, loss, slope, F.sample_kl(weights, p)))
    assert (results[1][0][2] == 0).all()
    torch.testing.assert_close(results[1][0][possible], results[0][0])
    torch.testing.assert_close(results[1][1:], results[0][1:])


def test_mpo_prior_of_one_action() -> None:
    """Where one action has all the probability, the weights are the prior and no bound binds."""
    log_prior = torch.tensor([0.0, -math.inf]).double()
    weights, loss = F.mpo_weights_and_temperature_loss(
        torch.tensor([1.0, 50.0]).double(), _leaf(3.0), 0.1, log_prior=log_prior
    )
    assert weights.tolist() == [1.0, 0.0]
    assert F.sample_kl(weights, log_prior) == 0
    torch.testing.assert_close(loss.item(), 3 * 0.1 + 1)


def test_sample_kl_dim() -> None:
    weights, log_prior = _randn(0, 7, 2, 3).softmax(0), _prior(1, 7, 2, 3)
    expected = F.sample_kl(weights, log_prior)
    for dim in (1, -1):
        moved = F.sample_kl(weights.movedim(0, dim), log_prior.movedim(0, dim), sample_dim=dim)
        torch.testing.assert_close(moved, expected)
    assert (expected > 0).all()
    torch.testing.assert_close(F.sample_kl(log_prior.exp(), log_prior), torch.zeros(2, 3).double())


# E-step of V-MPO ---------------------------------------------------------------------------------


def _vmpo_loss(advantage: Tensor, epsilon: float, **kwargs) -> Callable[[Tensor], Tensor]:
    return lambda eta: F.vmpo_weights_and_temperature_loss(advantage, eta, epsilon, **kwargs)[1]


def test_vmpo_weights_by_hand() -> None:
    advantage = torch.tensor([3.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    weights, loss, selected = F.vmpo_weights_and_temperature_loss(advantage, _leaf(1.0), 0.1)
    total = math.exp(3) + math.exp(2)
    expected = [math.exp(3) / total, 0.0, math.exp(2) / total, 0.0]
    torch.testing.assert_close(weights.tolist(), expected)
    torch.testing.assert_close(loss.item(), 0.1 + math.log(total / 2))
    assert selected.tolist() == [True, False, True, False]


@few_examples
@given(seed=SEEDS, shape=SHAPES, eta=TEMPERATURES, fraction=st.floats(0.01, 1.0))
def test_vmpo_properties(seed: int, shape: tuple[int, ...], eta: float, fraction: float) -> None:
    advantage = 5 * _randn(seed, *shape)
    ratio = _randn(seed + 1, *shape).exp()
    for rho in (None, ratio):
        kwargs = {"top_k_fraction": fraction, "importance_weights": rho}
        weights, loss, selected = F.vmpo_weights_and_temperature_loss(
            advantage, _leaf(eta), 0.1, **kwargs
        )
        num_selected = max(1, math.floor(fraction * advantage.numel()))
        assert selected.sum() == num_selected
        assert (advantage[selected].amin() > advantage[~selected]).all()
        assert (weights[~selected] == 0).all()
        torch.testing.assert_close(weights.sum().item(), 1.0)
        # The divergence is that against the prior over the selected samples.
        prior = (1.0 if rho is None else rho[selected]) / num_selected
        slope = _slope(_vmpo_loss(advantage, 0.1, **kwargs), _leaf(eta))
        torch.testing.assert_close(slope, 0.1 - _kl(weights[selected], prior))

        kwargs["importance_weights"] = None if rho is None else rho.flatten()
        flat = F.vmpo_weights_and_temperature_loss(advantage.flatten(), _leaf(eta), 0.1, **kwargs)
        torch.testing.assert_close(weights.flatten(), flat[0])
        torch.testing.assert_close(loss, flat[1])
        assert torch.equal(selected.flatten(), flat[2])


@pytest.mark.parametrize("shape", [(1,), (12,), (3, 4), (2, 3, 2)])
def test_vmpo_whole_batch_is_a_softmax(shape: tuple[int, ...]) -> None:
    advantage = _randn(0, *shape)
    weights, loss, selected = F.vmpo_weights_and_temperature_loss(
        advantage, _leaf(0.7), 0.1, top_k_fraction=1.0, importance_weights=torch.ones(shape)
    )
    assert selected.all()
    torch.testing.assert_close(weights.flatten(), (advantage / 0.7).flatten().softmax(0))
    _, expected = F.mpo_weights_and_temperature_loss(advantage.flatten(), _leaf(0.7), 0.1)
    torch.testing.assert_close(loss, expected)


def test_vmpo_temperature_gradient_by_finite_differences() -> None:
    loss = _vmpo_loss(_randn(0, 40), 0.1, importance_weights=_randn(1, 40).exp())
    eta = _leaf(0.8)
    torch.testing.assert_close(
        _slope(loss, eta), _difference(loss, eta).detach(), rtol=1e-7, atol=0
    )


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("used", [1.0, 0.5])
def test_vmpo_masked_samples_have_exactly_zero_weight(rubbish: float, used: float) -> None:
    advantage = _randn(0, 3, 4)
    keep = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    ratio = _randn(1, 3, 4).exp()
    arguments = {"top_k_fraction": 1.0, "importance_weights": ratio.where(keep, math.nan)}
    arguments["restarting_weights"] = used * keep
    masked = advantage.where(keep, rubbish)
    weights, loss, selected = F.vmpo_weights_and_temperature_loss(
        masked, _leaf(1.0), 0.1, **arguments
    )
    assert (weights[~keep] == 0).all()
    assert torch.equal(selected, keep)
    expected, expected_loss, _ = F.vmpo_weights_and_temperature_loss(
        advantage[keep], _leaf(1.0), 0.1, top_k_fraction=1.0, importance_weights=ratio[keep]
    )
    torch.testing.assert_close(weights[keep], expected)
    torch.testing.assert_close(loss, expected_loss)
    slope = _slope(_vmpo_loss(masked, 0.1, **arguments), _leaf(1.0))
    torch.testing.assert_close(slope, 0.1 - _kl(expected, ratio[keep] / keep.sum()))


def test_vmpo_masked_samples_count_in_the_size() -> None:
    keep = torch.tensor([False, False, False, True, True, True, True, True])
    _, _, selected = F.vmpo_weights_and_temperature_loss(
        torch.arange(8.0), torch.tensor(1.0), 0.1, restarting_weights=keep
    )
    assert selected.tolist() == [False] * 4 + [True] * 4


def test_vmpo_keeps_ties() -> None:
    advantage = torch.tensor([1.0, 0.0, 1.0, 1.0])
    weights, _, selected = F.vmpo_weights_and_temperature_loss(
        advantage, torch.tensor(1.0), 0.1, top_k_fraction=0.25
    )
    assert selected.tolist() == [True, False, True, True]
    torch.testing.assert_close(weights, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]))


def test_top_k_mask() -> None:
    advantage = torch.tensor([[3.0, 1.0, 5.0], [2.0, math.nan, 2.0]])
    usable = torch.tensor([[True, True, True], [True, False, True]])
    expected = torch.tensor([[True, False, True], [False, False, False]])
    assert torch.equal(F.top_k_mask(advantage, 0.4, usable), expected)
    assert torch.equal(F.top_k_mask(advantage, 1.0, usable), usable)
    for fraction, size, kept in [(0.5, 7, 3), (0.5, 1, 1), (0.01, 50, 1), (0.25, 11, 2)]:
        assert F.top_k_mask(torch.arange(float(size)), fraction).sum() == kept


@pytest.mark.parametrize("advantage", [torch.arange(6.0), torch.full((6,), math.nan)])
def test_vmpo_empty_selection(advantage: Tensor) -> None:
    eta = torch.tensor(2.0, requires_grad=True)
    weights, loss, selected = F.vmpo_weights_and_temperature_loss(
        advantage, eta, 0.1, restarting_weights=torch.zeros(6), importance_weights=advantage
    )
    loss.backward()
    assert (weights == 0).all()
    assert loss == 0
    assert eta.grad == 0
    assert not selected.any()


def test_vmpo_zero_importance_weights() -> None:
    advantage = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    ratio = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    arguments = {"top_k_fraction": 0.75, "importance_weights": ratio}
    weights, loss, _ = F.vmpo_weights_and_temperature_loss(advantage, _leaf(1.0), 0.1, **arguments)
    total = math.exp(2) + math.exp(1)
    expected = [0.0, math.exp(2) / total, math.exp(1) / total, 0.0]
    torch.testing.assert_close(weights.tolist(), expected)
    torch.testing.assert_close(loss.item(), 0.1 + math.log(total / 3))
    loss = _vmpo_loss(advantage, 0.1, **arguments)
    torch.testing.assert_close(_slope(loss, _leaf(1.0)), _difference(loss, _leaf(1.0)).detach())


def test_vmpo_all_importance_weights_zero() -> None:
    eta = torch.tensor(2.0, requires_grad=True)
    weights, loss, _ = F.vmpo_weights_and_temperature_loss(
        torch.arange(6.0), eta, 0.1, importance_weights=torch.zeros(6)
    )
    loss.backward()
    assert (weights == 0).all()
    assert loss == 0
    assert eta.grad == 0


def test_no_gradient_into_the_data() -> None:
    q_value, advantage, ratio = (torch.ones(5, requires_grad=True) for _ in range(3))
    weights, loss = F.mpo_weights_and_temperature_loss(q_value, _leaf(1.0), 0.1)
    psi, vmpo_loss, _ = F.vmpo_weights_and_temperature_loss(
        advantage, _leaf(1.0), 0.1, importance_weights=ratio
    )
    assert not weights.requires_grad
    assert not psi.requires_grad
    (loss + vmpo_loss).backward()
    assert q_value.grad is advantage.grad is ratio.grad is None


@pytest.mark.parametrize(("offset", "spread", "eta"), EXTREMES)
def test_vmpo_extreme_values_in_single_precision(offset: float, spread: float, eta: float) -> None:
    advantage = (offset + spread * _randn(0, 64)).float()
    temperature = torch.tensor(eta)
    weights, loss, _ = F.vmpo_weights_and_temperature_loss(advantage, temperature, 0.1)
    exact, _, selected = F.vmpo_weights_and_temperature_loss(
        advantage.double(), temperature.double(), 0.1
    )
    assert loss.isfinite()
    torch.testing.assert_close(weights.double(), exact, rtol=1e-4, atol=1e-6)
    slope = _slope(_vmpo_loss(advantage, 0.1), _leaf(eta, torch.float32))
    expected = 0.1 - _kl(exact[selected], 1 / selected.sum())
    torch.testing.assert_close(slope.double(), expected, rtol=1e-4, atol=1e-5)


# Out-of-bounds cost and diagnostics --------------------------------------------------------------


def test_out_of_bounds_cost() -> None:
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])
    action = torch.tensor([[0.5, 2.0], [1.0, 0.0], [4.0, 1.0], [-2.0, 6.0], [1.0, -8.0]])
    # In units of half the range, which is 1 and 2: excesses (3, 0), (-1, 1) and (0, -4).
    expected = -torch.tensor([0.0, 0.0, 3.0, math.sqrt(2), 4.0])
    torch.testing.assert_close(F.out_of_bounds_cost(action, low, high), expected)
    batched = F.out_of_bounds_cost(action.expand(3, 5, 2), low, high)
    torch.testing.assert_close(batched, expected.expand(3, 5))
    unbounded = torch.tensor([1.0, math.inf])
    torch.testing.assert_close(F.out_of_bounds_cost(action, -unbounded, unbounded)[3].item(), -1.0)
    # Equal costs give uniform weights: a policy inside its bounds is not moved.
    weights, _ = F.mpo_weights_and_temperature_loss(expected[:2], torch.tensor(1e-3), 0.1)
    torch.testing.assert_close(weights, torch.full((2,), 0.5))


@few_examples
@given(seed=SEEDS, n=st.integers(1, 30), sharpness=st.floats(-3, 4))
def test_diagnostics_of_weights(seed: int, n: int, sharpness: float) -> None:
    weights = (10**sharpness * _randn(seed, n, 5)).softmax(0)
    divergence = F.sample_kl_to_uniform(weights)
    torch.testing.assert_close(divergence, _kl(weights, 1 / n))
    assert (divergence >= -1e-12).all()
    assert (divergence <= math.log(n) + 1e-12).all()
    torch.testing.assert_close(F.weight_entropy(weights), math.log(n) - divergence)
    size = F.effective_sample_size(weights)
    torch.testing.assert_close(size, 1 / (weights**2).sum(0))
    assert ((size >= 1 - 1e-12) & (size <= n * (1 + 1e-12))).all()
    for function in (F.sample_kl_to_uniform, F.weight_entropy, F.effective_sample_size):
        torch.testing.assert_close(function(weights.mT, sample_dim=-1), function(weights))


def test_diagnostics_of_zero_and_equal_weights() -> None:
    weights = torch.tensor([[1.0, 0.25, 0.5], [0.0, 0.25, 0.5], [0.0, 0.25, 0.0], [0.0, 0.25, 0.0]])
    nats = math.log(2) * torch.tensor([2.0, 0.0, 1.0])
    torch.testing.assert_close(F.sample_kl_to_uniform(weights), nats)
    torch.testing.assert_close(F.weight_entropy(weights), math.log(4) - nats)
    torch.testing.assert_close(F.effective_sample_size(weights), torch.tensor([1.0, 4.0, 2.0]))
