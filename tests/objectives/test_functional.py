"""The equations of MPO and V-MPO: cases worked by hand, finite differences and properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence

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


# M-step ------------------------------------------------------------------------------------------


@few_examples
@given(seed=SEEDS, shape=SHAPES, n=st.integers(1, 8), dim=st.integers(1, 4))
def test_cross_entropy_by_moments_is_that_by_samples(
    seed: int, shape: tuple[int, ...], n: int, dim: int
) -> None:
    noise = _randn(seed, n, *shape, dim)
    weights = _randn(seed + 1, n, *shape).exp()  # their sum need not be one
    loc, raw, old_loc, old_raw = _randn(seed + 2, 4, *shape, dim).unbind(0)
    loc.requires_grad_()
    scale, old_scale = raw.exp().requires_grad_(), old_raw.exp()
    moments = F.weighted_moments(noise, weights)
    assert moments.total.shape == (*shape, 1)
    assert moments.first.shape == moments.second.shape == (*shape, dim)
    by_moments = F.weighted_gaussian_cross_entropy(loc, scale, old_loc, old_scale, moments)
    log_prob = Independent(Normal(loc, scale), 1).log_prob(old_loc + old_scale * noise)
    by_samples = -(weights * log_prob).sum(0)
    torch.testing.assert_close(by_moments, by_samples)
    torch.testing.assert_close(
        torch.autograd.grad(by_moments.sum(), (loc, scale)),
        torch.autograd.grad(by_samples.sum(), (loc, scale)),
    )


@few_examples
@given(seed=SEEDS, shape=SHAPES, dim=st.integers(1, 4))
def test_decoupled_kl_is_that_of_torch_distributions(
    seed: int, shape: tuple[int, ...], dim: int
) -> None:
    loc, raw, old_loc, old_raw = _randn(seed, 4, *shape, dim).unbind(0)
    scale, old_scale = raw.exp(), old_raw.exp()
    old, moved, widened = Normal(old_loc, old_scale), Normal(loc, old_scale), Normal(old_loc, scale)
    kl_mean, kl_stddev = F.decoupled_gaussian_kl(loc, scale, old_loc, old_scale)
    torch.testing.assert_close(kl_mean, kl_divergence(old, moved))
    torch.testing.assert_close(kl_stddev, kl_divergence(old, widened))
    assert (kl_mean >= 0).all()
    assert (kl_stddev >= 0).all()
    joint = kl_divergence(Independent(old, 1), Independent(moved, 1)) + kl_divergence(
        Independent(old, 1), Independent(widened, 1)
    )
    torch.testing.assert_close((kl_mean + kl_stddev).sum(-1), joint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoupled_kl_of_equal_policies(dtype: torch.dtype) -> None:
    old_loc, old_scale = _randn(0, 5, 3).to(dtype), _randn(1, 5, 3).to(dtype).exp()
    loc, scale = old_loc.clone().requires_grad_(), old_scale.clone().requires_grad_()
    for kl in F.decoupled_gaussian_kl(loc, scale, old_loc, old_scale):
        assert (kl == 0).all()
        for gradient in torch.autograd.grad(kl.sum(), (loc, scale), allow_unused=True):
            assert gradient is None or (gradient == 0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_decoupled_kl_is_accurate_in_single_precision(sign: int) -> None:
    old_scale = _randn(0, 50).exp().float()
    scale = (old_scale * (1 + sign * 1e-4)).requires_grad_()
    exact_scale = scale.detach().double().requires_grad_()
    loc = torch.zeros(50)
    kl = F.decoupled_gaussian_kl(loc, scale, loc, old_scale)[1]
    ratio = old_scale.double() / exact_scale
    exact = 0.5 * (ratio**2 - 1) - ratio.log()

    def error(x: Tensor, reference: Tensor) -> float:
        return (x.double() / reference - 1).abs().max().item()

    assert error(kl, exact) < 1e-2
    (gradient,), (exact_gradient,) = (
        torch.autograd.grad(k.sum(), s) for k, s in ((kl, scale), (exact, exact_scale))
    )
    assert error(gradient, exact_gradient) < 1e-2
    single = old_scale / scale
    assert error(0.5 * (single**2 - 1) - single.log(), exact) > 0.1  # the textbook formula


@few_examples
@given(seed=SEEDS, shape=SHAPES, size=st.integers(1, 5))
def test_categorical_kl_and_gaussian_entropy_are_those_of_torch_distributions(
    seed: int, shape: tuple[int, ...], size: int
) -> None:
    logits, old_logits = (3 * _randn(seed, 2, *shape, size)).unbind(0)
    old_logits[..., 1:2] = -math.inf  # an action that the old policy never takes
    expected = kl_divergence(Categorical(logits=old_logits), Categorical(logits=logits))
    torch.testing.assert_close(F.categorical_kl(logits, old_logits), expected)
    same = logits.clone().requires_grad_()
    kl = F.categorical_kl(same, logits)
    torch.testing.assert_close(kl, torch.zeros_like(kl))
    (gradient,) = torch.autograd.grad(kl.sum(), same)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    scale = logits.exp()
    expected = Independent(Normal(torch.zeros_like(scale), scale), 1).entropy()
    torch.testing.assert_close(F.gaussian_entropy(scale), expected)


def test_categorical_kl_of_an_action_that_neither_policy_takes() -> None:
    old_logits = torch.tensor([0.0, 1.0, -math.inf])
    logits = torch.tensor([1.0, 0.0, -math.inf], requires_grad=True)
    kl = F.categorical_kl(logits, old_logits)
    kl.backward()
    torch.testing.assert_close(kl.item(), math.tanh(0.5), rtol=1e-6, atol=0)
    assert logits.grad.isfinite().all()


def test_lagrangian_losses_hold_the_other_side_fixed() -> None:
    kl = torch.tensor([[0.5, 0.1, 0.2], [0.7, 0.1, 0.0]], requires_grad=True)
    multiplier = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
    penalty, dual = F.lagrangian_losses(kl, multiplier, 0.2)
    torch.testing.assert_close(penalty, torch.tensor([[1.0, 0.3, 0.8], [1.4, 0.3, 0.0]]))
    torch.testing.assert_close(dual, torch.tensor([[-0.6, 0.3, 0.0], [-1.0, 0.3, 0.8]]))
    gradients = torch.autograd.grad(penalty.sum(), (kl, multiplier), allow_unused=True)
    torch.testing.assert_close(gradients[0], multiplier.detach().expand(2, 3))
    assert gradients[1] is None
    gradients = torch.autograd.grad(dual.mean(0).sum(), (kl, multiplier), allow_unused=True)
    assert gradients[0] is None
    # Descent raises the multiplier of a violated constraint and lowers that of a slack one.
    torch.testing.assert_close(gradients[1], torch.tensor([-0.4, 0.1, 0.1]))


# Reduction ---------------------------------------------------------------------------------------


def test_masked_mean_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [4.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    weights = torch.tensor([[1.0, 5.0], [3.0, math.nan]])
    assert F.masked_mean(x, mask) == 2.5
    mean = F.masked_mean(x, mask, weights)
    assert mean == 3.25
    (gradient,) = torch.autograd.grad(mean, x)
    assert gradient.tolist() == [[0.25, 0.0], [0.75, 0.0]]
    assert F.masked_mean(x[0], None) == 1.5
    assert F.masked_mean(x[0], None, torch.tensor([3, 1])) == 1.25


@pytest.mark.parametrize("weights", [None, torch.ones(3)])
def test_masked_mean_of_nothing_is_zero(weights: Tensor | None) -> None:
    x = torch.full((3,), math.nan, requires_grad=True)
    mean = F.masked_mean(x, torch.zeros(3, dtype=torch.bool), weights)
    mean.backward()
    assert mean == 0
    assert (x.grad == 0).all()
    assert F.masked_mean(torch.ones(3), None, torch.zeros(3)) == 0


# All of them -------------------------------------------------------------------------------------


def _everything(
    q_value: Tensor, noise: Tensor, gaussians: Tensor, keep: Tensor, eta: Tensor, alpha: Tensor
) -> tuple[Tensor, ...]:
    weights, temperature_loss = F.mpo_weights_and_temperature_loss(q_value, eta, 0.1)
    psi, vmpo_loss, selected = F.vmpo_weights_and_temperature_loss(
        q_value[0], eta, 0.1, restarting_weights=keep, importance_weights=q_value[1].exp()
    )
    loc, scale, old_loc, old_scale = gaussians.unbind(0)
    moments = F.weighted_moments(noise, weights)
    cross_entropy = F.weighted_gaussian_cross_entropy(loc, scale, old_loc, old_scale, moments)
    penalty, alpha_loss = F.lagrangian_losses(
        sum(F.decoupled_gaussian_kl(loc, scale, old_loc, old_scale)), alpha, 0.01
    )
    loss = F.masked_mean(temperature_loss + cross_entropy, keep, psi) + vmpo_loss
    loss = loss + (penalty + alpha_loss).mean()
    diagnostics = (
        F.sample_kl_to_uniform(weights),
        F.weight_entropy(weights),
        F.effective_sample_size(weights),
        F.out_of_bounds_cost(noise, -torch.ones_like(alpha), torch.ones_like(alpha)),
        F.gaussian_entropy(scale),
        F.categorical_kl(loc, old_loc),
        F.solve_temperature(q_value, 0.1, log_prior=noise[..., 0], mask=keep),
    )
    return loss, weights, psi, selected, *diagnostics


def _inputs() -> list[Tensor]:
    gaussians = _randn(2, 4, 6, 3).exp().requires_grad_()
    keep = torch.tensor([True, True, False, True, True, True])
    alpha = torch.ones(3, dtype=torch.float64, requires_grad=True)
    return [_randn(0, 20, 6), _randn(1, 20, 6, 3), gaussians, keep, _leaf(0.7), alpha]


def test_meta_device() -> None:
    expected = _everything(*_inputs())
    for x, y in zip(_everything(*(x.to("meta") for x in _inputs())), expected, strict=True):
        assert x.is_meta
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_compile_as_one_graph() -> None:
    # Whether there is one graph does not depend on the code that a backend generates from it.
    compiled = torch.compile(_everything, fullgraph=True, backend="aot_eager")
    results = []
    for function in (_everything, compiled):
        inputs = _inputs()
        output = function(*inputs)
        learned = [x for x in inputs if x.requires_grad]
        results.append((output, torch.autograd.grad(output[0], learned)))
    torch.testing.assert_close(*results)
