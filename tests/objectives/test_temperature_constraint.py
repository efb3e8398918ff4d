"""Temperatures and constraints: dual variables together with their bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.duals import Constraint, Temperature

STATES, CANDIDATES = 6, 9
PRIORS = ["none", "prior", "impossible"]


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_temperature(init: float = 0.7, epsilon: float = 0.1, **kwargs: Any) -> Temperature:
    temperature = Temperature(init, epsilon, **kwargs).double()
    temperature.reset_parameters()
    return temperature


def make_prior(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    log_prior = _randn(1, STATES, CANDIDATES)
    if kind == "impossible":
        log_prior[:, 3] = log_prior[0, 5] = -math.inf
    return log_prior.log_softmax(-1)


# Temperature -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("init", [0.05, 0.7, 20.0])
def test_temperature_loss_is_the_dual_with_its_gradient(init: float, prior: str) -> None:
    """No graph through the weights is needed: the gradient is that of autograd through the dual."""
    temperature, scores, log_prior = (
        make_temperature(init),
        _randn(0, STATES, CANDIDATES),
        make_prior(prior),
    )
    weights, dual, kl = temperature.weigh(scores, log_prior)
    of_states = torch.rand(STATES).double()  # as masks and priorities weigh the states
    by_kl = temperature.loss(dual, kl)
    expected_weights, by_dual = F.mpo_weights_and_temperature_loss(
        scores, temperature(), temperature.epsilon, log_prior=log_prior, sample_dim=-1
    )
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
    torch.testing.assert_close(by_kl, by_dual, rtol=1e-12, atol=1e-12)
    slopes = [
        torch.autograd.grad((of_states * loss).sum(), temperature.raw)[0]
        for loss in (by_kl, by_dual)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)
    assert slopes[0] != 0


@pytest.mark.parametrize("prior", PRIORS)
def test_temperature_weigh(prior: str) -> None:
    temperature, scores, log_prior = (
        make_temperature(),
        _randn(0, STATES, CANDIDATES),
        make_prior(prior),
    )
    weights, dual, kl = temperature.weigh(scores.requires_grad_(), log_prior)
    assert not any(x.requires_grad for x in (weights, dual, kl))
    torch.testing.assert_close(weights.sum(-1), torch.ones(STATES).double())
    logits = scores.detach() / temperature().detach()
    logits = logits if log_prior is None else logits + log_prior
    torch.testing.assert_close(weights, logits.softmax(-1))
    prior_probability = torch.full_like(weights, 1 / CANDIDATES)
    if log_prior is not None:
        prior_probability = log_prior.exp()
        assert (weights[prior_probability == 0] == 0).all()
    taken = weights > 0
    ratio = torch.where(taken, weights / prior_probability, 1.0)
    torch.testing.assert_close(kl, (weights * ratio.log()).sum(-1))
    mean_exp = (prior_probability * (scores.detach() / temperature().detach()).exp()).sum(-1)
    torch.testing.assert_close(dual, temperature().detach() * (0.1 + mean_exp.log()))


def test_temperature_rises_while_the_weights_are_beyond_the_bound() -> None:
    scores = _randn(0, STATES, CANDIDATES)
    for init, sign in ((0.05, -1), (20.0, 1)):
        temperature = make_temperature(init)
        _, dual, kl = temperature.weigh(scores)
        temperature.loss(dual, kl).mean().backward()
        assert temperature.raw.grad.sign() == sign
        assert (kl.mean() > temperature.epsilon).item() is (sign < 0)


def test_temperature_solved() -> None:
    """A solved temperature meets its bound and takes no gradient."""
    temperature, scores = make_temperature(solved=True), _randn(0, STATES, CANDIDATES)
    log_prior = make_prior("impossible")
    settings = {"sample_dim": -1, "log_prior": log_prior}
    temperature.solve_(scores, temperature.epsilon, **settings)
    _, dual, kl = temperature.weigh(scores, log_prior)
    torch.testing.assert_close(kl.mean(), temperature.epsilon, rtol=0, atol=1e-9)
    assert not temperature.loss(dual, kl).requires_grad
    assert not temperature.raw.requires_grad
    assert make_temperature().raw.requires_grad


def test_temperature_solve_without_any_state() -> None:
    temperature = make_temperature(0.7, solved=True)
    nothing = torch.zeros(STATES, dtype=torch.bool)
    scores = torch.full((STATES, CANDIDATES), math.nan).double()
    temperature.solve_(scores, temperature.epsilon, sample_dim=-1, mask=nothing)
    assert temperature().item() == pytest.approx(0.7)


def test_temperature_bound_is_a_buffer() -> None:
    """It is saved with the variable and can be scheduled."""
    temperature, scores = Temperature(1.0, 0.1), _randn(0, STATES, CANDIDATES).float()
    assert list(temperature.state_dict()) == ["raw", "epsilon"]
    slopes = []
    for epsilon in (0.1, 0.5):
        temperature.epsilon.fill_(epsilon)
        _, dual, kl = temperature.weigh(scores)
        slopes += torch.autograd.grad(temperature.loss(dual, kl).mean(), temperature.raw)
    slope_of_softplus = temperature.raw.sigmoid().detach()
    torch.testing.assert_close(slopes[1] - slopes[0], 0.4 * slope_of_softplus)
    other = Temperature(2.0, 0.3)
    other.load_state_dict(temperature.state_dict())
    assert other.epsilon.item() == pytest.approx(0.5)
    assert torch.equal(other(), temperature())


# Constraint --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,)])
def test_constraint_losses(shape: tuple[int, ...]) -> None:
    """Both sides are summed over dimensions, each with the other held fixed."""
    constraint = Constraint(4.0, 0.2, shape).double()
    constraint.reset_parameters()
    kl = torch.tensor([[0.5, 0.1, 0.3], [0.7, 0.0, 0.2]], dtype=torch.float64, requires_grad=True)
    if not shape:
        kl = kl.detach().sum(-1, keepdim=True).requires_grad_()
    penalty, loss = constraint.losses(kl)
    assert penalty.shape == loss.shape == (2,)
    torch.testing.assert_close(penalty.tolist(), [4 * 0.9, 4 * 0.9])
    bounds = 3 * 0.2 if shape else 0.2
    torch.testing.assert_close(loss.tolist(), [4 * (bounds - 0.9)] * 2, rtol=1e-6, atol=1e-6)
    by_kl, by_raw = torch.autograd.grad(penalty.sum(), (kl, constraint.raw), allow_unused=True)
    torch.testing.assert_close(by_kl, torch.full_like(kl, 4.0))
    assert by_raw is None
    by_kl, by_raw = torch.autograd.grad(loss.mean(), (kl, constraint.raw), allow_unused=True)
    assert by_kl is None
    # It falls where the divergence is within the bound, and rises where it is not.
    expected = (0.2 - kl.detach().mean(0)) * constraint.raw.detach().sigmoid()
    torch.testing.assert_close(by_raw, expected.reshape(shape), rtol=1e-6, atol=1e-8)
    assert list(constraint.state_dict()) == ["raw", "epsilon"]


def test_relative_losses() -> None:
    """The loss is the dual's, and the multiplier steps by the relative violation alone.

    The penalty is that of a plain multiplier where the bound is met on average, up to e² times as
    large where it is violated, and as much smaller where there is room.
    """
    kl = torch.tensor([[0.5, 0.1, 0.3], [0.7, 0.0, 0.2]], requires_grad=True)
    for init, epsilon in ((4.0, 0.2), (4e3, 0.2), (4.0, 2e-6)):
        constraint = Constraint(init, epsilon, (3,), relative=True)
        penalty, loss = constraint.losses(kl)
        _, plain_loss = Constraint(init, epsilon, (3,)).losses(kl)
        torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=1e-6)
        violation = (kl.detach().mean(0) / epsilon - 1).clamp(-1, 1)
        expected = init * kl * (2 * violation).exp()
        torch.testing.assert_close(penalty, expected.sum(-1), rtol=1e-5, atol=1e-6)
        by_kl, by_raw = torch.autograd.grad(loss.mean(), (kl, constraint.raw), allow_unused=True)
        assert by_kl is None
        mean_kl = kl.detach().mean(0)
        expected = (epsilon - mean_kl) / mean_kl.clamp_min(epsilon)
        torch.testing.assert_close(by_raw, expected)
        assert by_raw.abs().max() <= 1


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.0, None), (0.2, math.exp(2)), (5.0, math.exp(2)), (0.05, 1 / math.e)],
)
def test_relative_penalty_answers_at_once(kl: float, factor: float | None) -> None:
    penalty, _ = Constraint(3.0, 0.1, relative=True).losses(torch.full((4, 1), kl))
    expected = 0.0 if factor is None else 3.0 * kl * factor
    torch.testing.assert_close(penalty, torch.full((4,), expected), rtol=1e-5, atol=0)


def test_relative_penalty_sees_the_mean_over_all_processes() -> None:
    constraint = Constraint(3.0, 0.1, relative=True)
    penalty, _ = constraint.losses(torch.full((4, 1), 0.1), mean_kl=torch.tensor([0.2]))
    torch.testing.assert_close(penalty, torch.full((4,), 0.3 * math.e**2))


@pytest.mark.parametrize("init", [0.01, 1.0, 1e4])
@pytest.mark.parametrize("epsilon", [1e-2, 1e-6])
@pytest.mark.parametrize("distance", [0.5, 3.9])
def test_relative_multiplier_finds_its_optimum(
    init: float, epsilon: float, distance: float
) -> None:
    r"""A mean fitted in closed form meets its bound, whatever the multiplier began with.

    The fit :math:`\mu = (a + \alpha \mu') / (1 + \alpha)` of a target ``a`` has a divergence of
    :math:`D / (1 + \alpha)^2`, if the target itself has ``D``.
    """
    constraint = Constraint(init, epsilon, relative=True).double()
    optimizer = torch.optim.Adam(constraint.parameters(), lr=3e-2)
    for _ in range(1000):
        kl = distance / (1 + constraint().detach()) ** 2
        optimizer.zero_grad()
        constraint.losses(kl.reshape(1, 1))[1].mean().backward()
        optimizer.step()
        constraint.project_()
    torch.testing.assert_close(
        constraint().item(), math.sqrt(distance / epsilon) - 1, rtol=0.02, atol=0
    )


def test_relative_floor_is_no_trap() -> None:
    """From its floor a multiplier is back at one within 600 steps; below it, it would not act."""
    constraint = Constraint(1.0, 1e-3, relative=True)
    optimizer = torch.optim.Adam(constraint.parameters(), lr=1e-2)

    def step(kl: float) -> None:
        optimizer.zero_grad()
        constraint.losses(torch.full((1, 1), kl))[1].mean().backward()
        optimizer.step()
        constraint.project_()

    for _ in range(1000):
        step(0.0)
    assert constraint().item() == pytest.approx(0.01)
    for _ in range(600):
        step(5e-3)
    assert constraint().item() > 1


@pytest.mark.parametrize("epsilon", [1e-2, 1e-6])
def test_relative_multiplier_ends_where_more_does_nothing(epsilon: float) -> None:
    """A bound that is broken whatever the multiplier does: it must not drown the fit."""
    constraint = Constraint(1.0, epsilon, (2,), relative=True)
    optimizer = torch.optim.Adam(constraint.parameters(), lr=0.1)

    def step(*kl: float) -> None:
        optimizer.zero_grad()
        constraint.losses(torch.tensor([kl]))[1].mean().backward()
        optimizer.step()
        constraint.project_()

    for _ in range(500):
        step(3 * epsilon, 0.0)
    ceiling = 2 / math.sqrt(epsilon)
    assert constraint().tolist() == pytest.approx([ceiling, 0.01], rel=1e-4)
    for _ in range(30):  # it falls as soon as there is room
        step(0.0, 0.0)
    assert constraint()[0].item() < ceiling / 2


def test_relative_ceiling_is_that_of_the_present_bound() -> None:
    constraint = Constraint(1000.0, 1e-6, relative=True)
    constraint.project_()
    assert constraint().item() == pytest.approx(1000)
    constraint.epsilon.fill_(1e-4)  # as a schedule does
    constraint.project_()
    assert constraint().item() == pytest.approx(200)
    plain = Constraint(1000.0, 1e-4)
    plain.project_()
    assert plain().item() == pytest.approx(1000)


@pytest.mark.parametrize("relative", [False, True])
def test_state_of_either_kind(relative: bool) -> None:
    """A multiplier is loaded by its value, in real units, also from the other kind."""
    saved = Constraint(7.0, 0.2, (2,), relative=relative)
    saved.set_(torch.tensor([3.0, 400.0]))
    for other in (False, True):
        loaded = Constraint(1.0, 0.1, (2,), relative=other)
        loaded.load_state_dict(saved.state_dict())
        torch.testing.assert_close(loaded().tolist(), [3.0, 400.0], rtol=1e-5, atol=0)
        assert loaded.epsilon.item() == pytest.approx(0.2)
    tiny = Constraint(1.0, 0.1)
    tiny.set_(torch.tensor(1e-7))
    loaded = Constraint(1.0, 0.1, relative=True)
    loaded.load_state_dict(tiny.state_dict())
    assert loaded().item() == pytest.approx(loaded.floor)


@pytest.mark.parametrize("make", [Temperature, Constraint])
@pytest.mark.parametrize(
    ("epsilon", "error", "message"),
    [
        (0.0, ValueError, "epsilon must be positive and finite, got 0.0"),
        (-0.1, ValueError, "epsilon must be positive and finite, got -0.1"),
        (math.nan, ValueError, "epsilon must be positive and finite, got nan"),
        ("0.1", TypeError, "epsilon must be a number, got str"),
        (None, TypeError, "epsilon must be a number, got NoneType"),
    ],
)
def test_rejects_bounds(make: Any, epsilon: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(1.0, epsilon)


def test_on_meta() -> None:
    """Nothing of it is read on the host."""
    scores = torch.randn(STATES, CANDIDATES, device="meta")
    temperature, constraint = Temperature(1.0, 0.1).to("meta"), Constraint(1.0, 0.1).to("meta")
    temperature.solve_(scores, temperature.epsilon, sample_dim=-1)
    weights, dual, kl = temperature.weigh(scores, scores)
    assert weights.is_meta
    losses = (temperature.loss(dual, kl), *constraint.losses(kl.unsqueeze(-1)))
    assert all(loss.is_meta and loss.shape == (STATES,) for loss in losses)
