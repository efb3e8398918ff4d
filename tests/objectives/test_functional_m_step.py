"""The M-step of MPO, masked means, and all functions together: compiled, and without values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from minerva_torchrl.objectives import functional as F

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=2).map(tuple)
few_examples = settings(max_examples=60, deadline=None)


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    log_prior = noise[..., 0].log_softmax(0)
    _, prior_loss = F.mpo_weights_and_temperature_loss(q_value, eta, 0.1, log_prior=log_prior)
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
    per_state = temperature_loss + prior_loss + cross_entropy
    loss = F.masked_mean(per_state, keep, psi) + vmpo_loss
    loss = loss + (penalty + alpha_loss).mean()
    diagnostics = (
        F.sample_kl_to_uniform(weights),
        F.sample_kl(weights, log_prior),
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
    eta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    return [_randn(0, 20, 6), _randn(1, 20, 6, 3), gaussians, keep, eta, alpha]


def test_meta_device() -> None:
    expected = _everything(*_inputs())
    for x, y in zip(_everything(*(x.to("meta") for x in _inputs())), expected, strict=True):
        assert x.is_meta
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.slow
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
