"""Masked weights, full-covariance Gaussians and distributions of returns, by other ways to them.

``golden/rlax_family.npz`` is of rlax 0.1.9 in double precision. ``categorical_l2_project`` and
``quantile_regression_loss`` are those functions (rlax does not divide Huber's loss by ``kappa``).
``categorical_mpo`` is ``mpo_compute_weights_and_temperature_loss`` on samples: with 24 of them, of
which an action has as many as its prior says, the sum of their weights is that of the action.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributions as D

from minerva_torchrl.objectives import functional as F
from tests.golden_data import assert_close, cases

SEEDS = st.integers(0, 2**32 - 1)
few_examples = settings(max_examples=40, deadline=None)


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _tril(seed: int, *batch: int, dim: int) -> Tensor:
    full = _randn(seed, *batch, dim, dim)
    return full.tril(-1) + torch.diag_embed(full.diagonal(dim1=-2, dim2=-1).exp())


def _support(seed: int, size: int) -> Tensor:
    """Increasing atoms at uneven distances."""
    return _randn(seed, size).exp().cumsum(0) - size


# rlax --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_golden_categorical_projection(index: int) -> None:
    case = cases("rlax_family", "categorical_l2_project")[index]
    projection = F.categorical_projection(case["values"], case["probs"], case["support"])
    assert_close(projection, case["projection"])


@pytest.mark.parametrize("index", range(4))
def test_golden_quantile_huber_loss(index: int) -> None:
    case = cases("rlax_family", "quantile_regression_loss")[index]
    quantiles, kappa = case["quantiles"].clone().requires_grad_(), case["kappa"].item()
    loss = F.quantile_huber_loss(quantiles, case["target"], kappa)
    loss.sum().backward()
    assert_close(loss * (kappa or 1.0), case["loss"])
    assert_close(quantiles.grad * (kappa or 1.0), case["grad_quantiles"])


@pytest.mark.parametrize("index", range(4))
def test_golden_categorical_mpo(index: int) -> None:
    case = cases("rlax_family", "categorical_mpo")[index]
    temperature = case["temperature"].clone().requires_grad_()
    weights, loss = F.categorical_mpo_weights_and_temperature_loss(
        case["q_value"], case["prior"].log(), temperature, case["epsilon"]
    )
    loss.mean().backward()
    assert_close(weights, case["weights"])
    assert_close(loss.mean(), case["loss"].mean())
    assert_close(temperature.grad, case["grad_temperature"])


# Weights of all actions --------------------------------------------------------------------------


@few_examples
@given(seed=SEEDS, num_actions=st.integers(2, 6), eta=st.floats(0.05, 20.0))
def test_mask_leaves_actions_out(seed: int, num_actions: int, eta: float) -> None:
    """As if the policy had no such actions: the same as the problem without them."""
    q_value, logits = _randn(seed, 3, num_actions), _randn(seed + 1, 3, num_actions)
    legal = torch.arange(num_actions) != seed % num_actions
    mask = legal.expand(3, num_actions)
    temperature = torch.tensor(eta, dtype=torch.float64, requires_grad=True)
    without, loss_without = F.categorical_mpo_weights_and_temperature_loss(
        q_value[:, legal], logits[:, legal].log_softmax(-1), temperature, 0.1
    )
    q_value = q_value.masked_fill(~mask, math.nan)  # illegal actions may have any value
    weights, loss = F.categorical_mpo_weights_and_temperature_loss(
        q_value, logits.log_softmax(-1), temperature, 0.1, mask=mask
    )
    torch.testing.assert_close(weights[:, legal], without)
    assert weights[:, ~legal].eq(0).all()
    torch.testing.assert_close(loss, loss_without)
    slopes = [torch.autograd.grad(x.mean(), temperature)[0] for x in (loss, loss_without)]
    torch.testing.assert_close(*slopes)
    prior = logits[:, legal].log_softmax(-1).exp()
    kl = D.kl_divergence(D.Categorical(without), D.Categorical(prior))
    torch.testing.assert_close(slopes[0], 0.1 - kl.mean())


def test_state_without_legal_action() -> None:
    """It has no weights and no loss, and leaves the gradient of the others alone."""
    q_value, log_prior = _randn(0, 2, 3), _randn(1, 2, 3).log_softmax(-1)
    q_value[1] = math.nan
    mask = torch.tensor([[True, False, True], [False, False, False]])
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    weights, loss = F.categorical_mpo_weights_and_temperature_loss(
        q_value, log_prior, temperature, 0.1, mask=mask
    )
    alone, alone_loss = F.categorical_mpo_weights_and_temperature_loss(
        q_value[0], log_prior[0], temperature, 0.1, mask=mask[0]
    )
    torch.testing.assert_close(weights, torch.stack([alone, torch.zeros(3).double()]))
    torch.testing.assert_close(loss, torch.stack([alone_loss, torch.zeros(()).double()]))
    slopes = [torch.autograd.grad(x, temperature)[0] for x in (loss.sum(), alone_loss)]
    torch.testing.assert_close(*slopes)


# Full covariance ---------------------------------------------------------------------------------


@few_examples
@given(seed=SEEDS, dim=st.integers(1, 5))
def test_multivariate_gaussian_kl(seed: int, dim: int) -> None:
    loc, old_loc = _randn(seed, 4, dim), _randn(seed + 1, 4, dim)
    tril, old_tril = _tril(seed + 2, 4, dim=dim), _tril(seed + 3, 4, dim=dim)
    old = D.MultivariateNormal(old_loc, scale_tril=old_tril)
    kl_mean, kl_covariance = F.multivariate_gaussian_kl(loc, tril, old_loc, old_tril)
    moved_mean = D.MultivariateNormal(loc, scale_tril=old_tril)
    moved_covariance = D.MultivariateNormal(old_loc, scale_tril=tril)
    torch.testing.assert_close(kl_mean, D.kl_divergence(old, moved_mean))
    torch.testing.assert_close(kl_covariance, D.kl_divergence(old, moved_covariance))

    # A diagonal factor is the diagonal family.
    scale, old_scale = (x.diagonal(dim1=-2, dim2=-1) for x in (tril, old_tril))
    diagonal = F.multivariate_gaussian_kl(
        loc, torch.diag_embed(scale), old_loc, torch.diag_embed(old_scale)
    )
    expected = F.decoupled_gaussian_kl(loc, scale, old_loc, old_scale)
    torch.testing.assert_close(diagonal, tuple(kl.sum(-1) for kl in expected))


def test_multivariate_gaussian_kl_is_exact_in_single_precision() -> None:
    """Bounds are as small as 1e-6; the difference of squares has no digits left there."""
    old = _tril(0, 8, dim=3)
    new = old * (1 + 1e-4 * _randn(1, 8, 3, 3))
    loc = _randn(2, 8, 3)
    _, exact = F.multivariate_gaussian_kl(loc, new, loc, old)
    _, single = F.multivariate_gaussian_kl(loc.float(), new.float(), loc.float(), old.float())
    assert exact.max() < 1e-6
    torch.testing.assert_close(single.double(), exact, rtol=2e-2, atol=1e-10)


def test_multivariate_gradients() -> None:
    arguments = (_randn(0, 2, 3), _tril(1, 2, dim=3), _randn(2, 2, 3), _tril(3, 2, dim=3))
    noise, weights = _randn(4, 2, 6, 3), _randn(5, 2, 6).exp()

    def both(loc: Tensor, tril: Tensor) -> tuple[Tensor, ...]:
        moments = F.weighted_multivariate_moments(noise, weights)
        cross_entropy = F.weighted_multivariate_gaussian_cross_entropy(
            loc, tril.tril(), *arguments[2:], moments
        )
        return (*F.multivariate_gaussian_kl(loc, tril.tril(), *arguments[2:]), cross_entropy)

    assert torch.autograd.gradcheck(both, [x.requires_grad_() for x in arguments[:2]])


@few_examples
@given(seed=SEEDS, dim=st.integers(1, 4))
def test_multivariate_cross_entropy(seed: int, dim: int) -> None:
    loc, old_loc = _randn(seed, 4, dim), _randn(seed + 1, 4, dim)
    tril, old_tril = _tril(seed + 2, 4, dim=dim), _tril(seed + 3, 4, dim=dim)
    noise, weights = _randn(seed + 4, 4, 9, dim), _randn(seed + 5, 4, 9).exp()
    cross_entropy = F.weighted_multivariate_gaussian_cross_entropy(
        loc, tril, old_loc, old_tril, F.weighted_multivariate_moments(noise, weights)
    )
    action = old_loc.unsqueeze(1) + (old_tril.unsqueeze(1) @ noise.unsqueeze(-1)).squeeze(-1)
    log_prob = D.MultivariateNormal(loc, scale_tril=tril).log_prob(action.movedim(1, 0))
    torch.testing.assert_close(cross_entropy, -(weights.movedim(1, 0) * log_prob).sum(0))


# Projections -------------------------------------------------------------------------------------


@few_examples
@given(seed=SEEDS, num_values=st.integers(1, 8), num_atoms=st.integers(2, 9))
def test_projection_keeps_mass_and_mean(seed: int, num_values: int, num_atoms: int) -> None:
    support = _support(seed, num_atoms)
    values = 3 * num_atoms * _randn(seed + 1, 5, num_values)
    probs = _randn(seed + 2, 5, num_values).softmax(-1)
    projected = F.categorical_projection(values, probs, support)
    assert projected.shape == (5, num_atoms)
    assert (projected >= 0).all()
    torch.testing.assert_close(projected.sum(-1), torch.ones(5).double())
    inside = values.clamp(support[0], support[-1])
    torch.testing.assert_close((projected * support).sum(-1), (probs * inside).sum(-1))
    # What lies on the atoms stays where it is.
    on_atoms = _randn(seed + 3, 5, num_atoms).softmax(-1)
    torch.testing.assert_close(
        F.categorical_projection(support.expand(5, -1), on_atoms, support), on_atoms
    )


def test_projection_by_hat_functions() -> None:
    """The formula itself, with a hat for every atom."""
    support, values, probs = _support(0, 6), 4 * _randn(1, 7, 5), _randn(2, 7, 5).softmax(-1)
    inside = values.clamp(support[0], support[-1]).unsqueeze(-1)
    far = torch.full((1,), 1e9).double()
    left = (inside - torch.cat([-far, support[:-1]])) / (support - torch.cat([-far, support[:-1]]))
    right = (torch.cat([support[1:], far]) - inside) / (torch.cat([support[1:], far]) - support)
    hats = torch.minimum(left, right).clamp(0, 1)
    expected = (probs.unsqueeze(-1) * hats).sum(-2)
    torch.testing.assert_close(
        F.categorical_projection(values, probs, support), expected, rtol=1e-6, atol=1e-7
    )
    assert torch.autograd.gradcheck(
        lambda p: F.categorical_projection(values, p, support), [probs.requires_grad_()]
    )


def test_two_hot() -> None:
    support, value = _support(0, 9), _randn(1, 3, 4)
    probs = F.two_hot(value, support)
    torch.testing.assert_close((probs * support).sum(-1), value)
    assert (probs > 0).sum(-1).le(2).all()
    assert torch.equal(F.two_hot(support, support), torch.eye(9).double())
    outside = F.two_hot(torch.tensor([-1e9, 1e9]).double(), support)
    assert outside.argmax(-1).tolist() == [0, 8]


@pytest.mark.parametrize("sigma", [0.05, 0.75, 3.0])
def test_hl_gauss(sigma: float) -> None:
    support, value = torch.linspace(-4, 4, 17).double(), torch.linspace(-2, 2, 7).double()
    probs = F.hl_gauss(value, support, sigma)
    edges = torch.linspace(-4.25, 4.25, 18).double()
    mass = D.Normal(value.unsqueeze(-1), sigma).cdf(edges).diff(dim=-1)
    expected = mass / mass.sum(-1, keepdim=True)
    torch.testing.assert_close(probs, expected, rtol=1e-6, atol=1e-12)
    if sigma < 1:
        torch.testing.assert_close((probs * support).sum(-1), value, rtol=0, atol=0.26)


def test_hl_gauss_outside_of_the_support() -> None:
    support = torch.linspace(0, 1, 5)
    probs = F.hl_gauss(torch.tensor([-1e3, 1e3, 0.5]), support, 0.1)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    assert probs.argmax(-1).tolist() == [0, 4, 2]


def test_hl_gauss_of_uneven_bins() -> None:
    support = torch.tensor([0.0, 1.0, 4.0]).double()
    edges = torch.tensor([-0.5, 0.5, 2.5, 5.5]).double()
    mass = D.Normal(1.7, 0.8).cdf(edges).diff()
    actual = F.hl_gauss(torch.tensor(1.7).double(), support, 0.8)
    torch.testing.assert_close(actual, mass / mass.sum())


@given(x=st.floats(-1e6, 1e6))
def test_symlog(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    assert F.symlog(value).item() == pytest.approx(math.copysign(math.log1p(abs(x)), x))
    torch.testing.assert_close(F.symexp(F.symlog(value)), value)


# Losses ------------------------------------------------------------------------------------------


def test_quantile_huber_loss_by_loops() -> None:
    quantiles, target, kappa = _randn(0, 3), 2 * _randn(1, 5), 0.6
    total = 0.0
    for i, theta in enumerate(quantiles.tolist()):
        for y in target.tolist():
            u, tau = y - theta, (2 * i + 1) / 6
            huber = 0.5 * u**2 if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)
            total += abs(tau - (u < 0)) * huber / kappa / 5
    assert F.quantile_huber_loss(quantiles, target, kappa).item() == pytest.approx(total)


def test_weighted_quantiles_are_repeated_targets() -> None:
    quantiles, target = _randn(0, 2, 4), _randn(1, 2, 3)
    counts = torch.tensor([1, 4, 2])
    expected = F.quantile_huber_loss(quantiles, target.repeat_interleave(counts, -1))
    weights = (counts / 7).double().expand(2, 3)
    actual = F.weighted_quantile_huber_loss(quantiles, target, weights)
    torch.testing.assert_close(actual, expected)


def test_quantile_regression_finds_the_quantiles() -> None:
    """Without Huber's rounding the minimum is at the quantiles of the target."""
    target = torch.arange(200).double() / 10
    quantiles = torch.full((4,), 10.0).double().requires_grad_()
    optimizer = torch.optim.Adam([quantiles], lr=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        F.quantile_huber_loss(quantiles, target, 0.0).backward()
        optimizer.step()
    expected = torch.tensor([1, 3, 5, 7]).double() / 8 * 20
    torch.testing.assert_close(quantiles.detach(), expected, rtol=0, atol=0.3)


def test_gaussian_mixture_nll() -> None:
    logits, loc, target = _randn(0, 3, 5), _randn(1, 3, 5), _randn(3, 3, 7)
    scale = _randn(2, 3, 5).exp()
    mixture = D.MixtureSameFamily(D.Categorical(logits=logits), D.Normal(loc, scale))
    expected = -mixture.log_prob(target.T).mean(0)
    torch.testing.assert_close(F.gaussian_mixture_nll(logits, loc, scale, target), expected)
    arguments = [x.requires_grad_() for x in (logits, loc, scale, target)]
    assert torch.autograd.gradcheck(F.gaussian_mixture_nll, arguments)
