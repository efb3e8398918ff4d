"""Draw the E-step and the M-step on a line: one-dimension.gif and one-dimension.svg.

All numbers come from the package's own functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from torch import Tensor

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.duals import Constraint

HERE = Path(__file__).parent
EPSILON, EPSILON_MEAN, EPSILON_STDDEV = 0.3, 0.25, 2e-2
NUM_SAMPLES, NUM_STEPS, NUM_ITERATIONS = 48, 120, 6


@dataclass
class Iteration:
    """One E-step and the M-step after it."""

    old: tuple[float, float]
    actions: Tensor
    weights: Tensor
    temperature: float
    fits: list[tuple[float, float]]
    """Mean and standard deviation after each gradient step."""
    divergences: tuple[float, float]


def value(action: Tensor) -> Tensor:
    """The critic: a low peak at -1.5, a high one at 1.5."""
    low = torch.exp(-0.5 * ((action + 1.5) / 0.5) ** 2)
    return 2 * torch.exp(-0.5 * ((action - 1.5) / 0.6) ** 2) + low


def iterate(loc: float, scale: float, constraints: list[Constraint]) -> Iteration:
    """Weigh samples of the old policy, then fit a new one to them."""
    noise = torch.randn(NUM_SAMPLES, 1)
    old_loc, old_scale = torch.tensor([loc]), torch.tensor([scale])
    actions = old_loc + old_scale * noise
    q_value = value(actions).squeeze(-1)
    temperature = F.solve_temperature(q_value, EPSILON)
    weights, _ = F.mpo_weights_and_temperature_loss(q_value, temperature, EPSILON)
    moments = F.weighted_moments(noise, weights)

    new_loc, new_log_scale = old_loc.clone(), old_scale.log()
    new_loc.requires_grad_(), new_log_scale.requires_grad_()
    policy = torch.optim.Adam([new_loc, new_log_scale], lr=2e-2)
    duals = torch.optim.Adam([c.raw for c in constraints], lr=0.1)
    fits = [(loc, scale)]
    for _ in range(NUM_STEPS):
        new_scale = new_log_scale.exp()
        fit = F.weighted_gaussian_cross_entropy(new_loc, old_scale, old_loc, old_scale, moments)
        fit = fit + F.weighted_gaussian_cross_entropy(
            old_loc, new_scale, old_loc, old_scale, moments
        )
        kls = F.decoupled_gaussian_kl(new_loc, new_scale, old_loc, old_scale)
        losses = [c.losses(kl.unsqueeze(0)) for c, kl in zip(constraints, kls, strict=True)]
        loss = fit + sum(penalty + dual for penalty, dual in losses)
        policy.zero_grad(), duals.zero_grad()
        loss.sum().backward()
        policy.step(), duals.step()
        for constraint in constraints:
            constraint.project_()
        fits.append((new_loc.item(), new_log_scale.exp().item()))
    divergences = tuple(kl.item() for kl in kls)
    return Iteration(
        (loc, scale), actions.squeeze(-1), weights, temperature.item(), fits, divergences
    )


def iterations() -> list[Iteration]:
    """All of them, each from where the one before ended."""
    torch.manual_seed(3)
    constraints = [
        Constraint(1.0, EPSILON_MEAN, (1,), relative=True),
        Constraint(10.0, EPSILON_STDDEV, (1,), relative=True),
    ]
    result, policy = [], (-1.2, 0.9)
    for _ in range(NUM_ITERATIONS):
        result.append(iterate(*policy, constraints))
        policy = result[-1].fits[-1]
    return result


def density(action: Tensor, policy: tuple[float, float]) -> Tensor:
    """Of a Gaussian."""
    return torch.distributions.Normal(*map(torch.tensor, policy)).log_prob(action).exp()


def draw(axes: tuple[plt.Axes, plt.Axes], step: Iteration, fit: int, weighted: bool) -> None:
    """One frame: the critic with the samples above, the policies below."""
    top, bottom = axes
    grid = torch.linspace(-3, 3.5, 300)
    for ax in axes:
        ax.clear()
        ax.set_xlim(-3, 3.5)
        ax.set_yticks([])
    top.set_ylim(-0.1, 2.4)
    top.plot(grid, value(grid), color="tab:orange")
    size = 900 * step.weights if weighted else torch.full_like(step.weights, 900 / NUM_SAMPLES)
    top.scatter(step.actions, value(step.actions), s=size, color="tab:blue", alpha=0.55, lw=0)
    top.set_title("E-step: weigh samples of the old policy by their values", fontsize=9)
    bottom.set_ylim(0, 1.1)
    bottom.plot(grid, density(grid, step.old), color="grey")
    if fit:
        bottom.plot(grid, density(grid, step.fits[fit]), color="tab:blue")
    bottom.set_title("M-step: fit the policy to them, but not too far", fontsize=9)
    bottom.set_xlabel("action", fontsize=9)


def main() -> None:
    """Write both files."""
    steps = iterations()
    # Per iteration: samples, weights, and some moments of the fit.
    moments = [0, 6, 12, 20, 30, 45, 70, NUM_STEPS]
    frames = [
        (step, fit, weighted)
        for step in steps
        for fit, weighted in [(0, False), (0, True), *((m, True) for m in moments[1:])]
    ]
    figure, axes = plt.subplots(2, 1, figsize=(5.2, 4.2), layout="constrained")
    animation = FuncAnimation(figure, lambda frame: draw(axes, *frame), frames=frames)
    animation.save(HERE / "one-dimension.gif", PillowWriter(fps=5), dpi=80)
    plt.close(figure)

    figure, axes = plt.subplots(2, 3, figsize=(10, 4.2), layout="constrained")
    for column, step in enumerate(steps[::2]):
        draw(axes[:, column], step, NUM_STEPS, weighted=True)
        kl_mean, kl_stddev = (
            kl / bound
            for kl, bound in zip(step.divergences, (EPSILON_MEAN, EPSILON_STDDEV), strict=True)
        )
        axes[0, column].set_title(
            f"iteration {2 * column + 1}, $\\eta$ = {step.temperature:.2f}", fontsize=9
        )
        axes[1, column].set_title(
            f"kl_mean_rel {kl_mean:.2f}, kl_stddev_rel {kl_stddev:.2f}", fontsize=9
        )
    plt.rcParams["svg.hashsalt"] = "one-dimension"
    figure.savefig(HERE / "one-dimension.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
