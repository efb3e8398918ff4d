"""Whole updates of V-MPO in plain PyTorch, with the whole batch and with minibatches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tests.objectives.base import assert_equal
from tests.objectives.vmpo_problem import (
    KINDS,
    Problem,
    losses_of,
    make_loss,
    make_rollout,
    with_advantage,
)
from tests.trainers.problem import Recorder
from tests.trainers.test_vmpo_stepper import UPDATES, make_stepper, values

NAN = math.nan
LEARNING_RATE = 0.1


# Simultaneous steps by hand ----------------------------------------------------------------------


class HandWritten:
    """V-MPO's update with plain gradient descent: everything at once, the temperature once.

    Args:
        problem (Problem): the networks, the duals and their settings.
        data (TensorDict): a rollout with advantages.
    """

    def __init__(self, problem: Problem, data: TensorDict) -> None:
        self.problem, self.data, self.loss = problem, data, problem.loss
        advantage, self.selected, _ = problem.select(data)
        self.number = len(advantage)
        temperature = problem.temperature(data)
        self.weights = problem.weigh(data, temperature)
        best = advantage[self.selected]
        log_mean = (best / temperature).exp().mean().log()
        self.temperature_loss = temperature * (self.loss.epsilon + log_mean)
        if self.loss.temperature_update == "solve":
            self.loss.temperature.set_(temperature)

    def step(self, rows: Tensor, lr_scale: float, *, first: bool) -> None:
        """One step on some samples, which count as if they were the whole batch."""
        problem, loss = self.problem, self.loss
        policy, divergences = problem.distributions(self.data)
        log_prob = problem.log_prob(self.data, policy)
        loss_actor = -(self.number * self.weights * log_prob)[rows].mean()
        counted = self.selected if loss.kl_samples == "selected" else self.selected | True
        counted = counted * self.number / counted.sum()
        alpha_losses = []
        for name, kl in divergences.items():
            alpha, epsilon = getattr(loss, f"alpha_{name}")(), getattr(loss, f"epsilon_{name}")
            penalty = (alpha.detach() * kl).sum(-1)
            loss_actor = loss_actor + (counted * penalty)[rows].mean()
            violation = (alpha * (epsilon - kl.detach())).sum(-1)
            alpha_losses.append((counted * violation)[rows].mean())
        value = problem.critic(self.data["observation"]).flatten()
        error = (value - self.data["value_target"].flatten())[rows]
        loss_critic = loss.critic_coeff * error.square().mean()
        rate = LEARNING_RATE * lr_scale
        descents = [
            (loss_actor, list(problem.policy.parameters()), rate),
            (loss_critic, list(problem.critic.parameters()), 2 * rate),  # as make_stepper has it
            (torch.stack(alpha_losses).sum(), loss.alpha_parameters(), rate),
        ]
        if first and loss.temperature_update == "gradient":
            descents.append((self.temperature_loss, [loss.temperature.raw], LEARNING_RATE))
        gradients = [torch.autograd.grad(value, over) for value, over, _ in descents]
        with torch.no_grad():
            for (_, parameters, lr), gradient in zip(descents, gradients, strict=True):
                for parameter, g in zip(parameters, gradient, strict=True):
                    parameter.sub_(lr * g)


def passes(number: int, size: int | None) -> Iterator[Tensor]:
    """Samples of one step after the other, drawn as the stepper draws them."""
    while True:
        if size is None:
            yield torch.arange(number)
        else:
            yield from torch.randperm(number).split(size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kl_samples", ["all", "selected"])
@pytest.mark.parametrize("temperature_update", UPDATES)
@pytest.mark.parametrize("minibatch_size", [None, 5])
@pytest.mark.parametrize("lr_scaling", [None, "1/sqrt(M)"])
def test_simultaneous_updates(
    lr_scaling: Any, minibatch_size: int | None, temperature_update: Any, kl_samples: Any, kind: str
) -> None:
    """Old multipliers in the policy's loss; their step takes the divergences of the same forward.

    Four steps with minibatches of 5, 5, 2 and again 5 of 12 samples.
    """
    settings = {"temperature_update": temperature_update, "kl_samples": kl_samples}
    problem, by_hand = Problem(kind, **settings), Problem(kind, **settings)
    stepper = make_stepper(
        problem.loss,
        lr=LEARNING_RATE,
        num_policy_steps=4,
        minibatch_size=minibatch_size,
        lr_scaling=lr_scaling,
    )
    before = values(problem.loss)
    for seed in range(2):
        data = problem.data(seed=seed)
        torch.manual_seed(seed)
        stepper.update(problem.loss, data.clone())
        torch.manual_seed(seed)
        update = HandWritten(by_hand, data)
        for i, rows in enumerate(islice(passes(12, minibatch_size), 4)):
            update.step(rows, 1.0 if lr_scaling is None else 0.5, first=i == 0)
    assert all((value != before[name]).any() for name, value in values(problem.loss).items())
    tolerance = 1e-10 if temperature_update == "gradient" else 1e-6  # bisection, and Newton's
    assert_equal(values(problem.loss), values(by_hand.loss), rtol=tolerance, atol=tolerance)


# Minibatches -------------------------------------------------------------------------------------


class TestMinibatches:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("kl_samples", ["all", "selected"])
    def test_of_the_whole_batch(self, kind: str, kl_samples: Any) -> None:
        """One minibatch of all samples, in any order, is what there is without minibatches."""
        losses = [make_loss(kind, kl_samples=kl_samples) for _ in range(2)]
        data = with_advantage(make_rollout(kind))
        kwargs = {"num_policy_steps": 3}
        make_stepper(losses[0], **kwargs).update(losses[0], data.clone())
        make_stepper(losses[1], minibatch_size=20, **kwargs).update(losses[1], data.clone())
        assert_equal(values(losses[0]), values(losses[1]), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_mean_of_a_pass(self, reduction: Any) -> None:
        """The losses of the parts of a batch make up that of the whole."""
        loss = make_loss(reduction=reduction)
        data, _ = loss.e_step(with_advantage(make_rollout()))
        whole = losses_of(loss(data))
        parts = [losses_of(loss(data.reshape(-1)[rows])) for rows in torch.randperm(20).split(5)]
        total = {key: torch.stack([part[key] for part in parts]).sum() for key in whole}
        # The dual of the temperature is one number for the batch, which every part has.
        total["loss_temperature"] = total["loss_temperature"] / 4
        if reduction == "mean":
            total |= {k: v / 4 for k, v in total.items() if k != "loss_temperature"}
        assert_equal(total, whole, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    def test_every_sample_once_per_pass(self, dual_order: Any) -> None:
        """Passes of 8, 8 and 4 of 20 samples, each shuffled anew, with the weights they had."""
        loss, data = make_loss(), with_advantage(make_rollout())
        numbers = torch.arange(20.0).reshape(4, 5)
        data["number"] = numbers
        whole, _ = loss.e_step(data)
        learner = Recorder(loss)
        kwargs = {"num_policy_steps": 5, "minibatch_size": 8, "dual_order": dual_order}
        make_stepper(loss, **kwargs).step(learner, data)
        batches = learner.batches[:: 1 if dual_order == "simultaneous" else 2]
        steps = [batch["number"] for batch in batches]
        assert [len(step) for step in steps] == [8, 8, 4, 8, 8]
        first_pass = torch.cat(steps[:3])
        assert not torch.equal(first_pass, numbers.flatten())
        assert torch.equal(first_pass.sort().values, numbers.flatten())
        assert not torch.equal(first_pass[:16], torch.cat(steps[3:]))
        assert len(torch.cat(steps[3:]).unique()) == 16
        weights = whole["e_step"].policy_weight.flatten()
        for step, batch in zip(steps, batches, strict=True):
            assert torch.equal(batch["e_step"].policy_weight, weights[step.long()])

    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    def test_metrics(self, dual_order: Any) -> None:
        """Those of the whole batch after the last step."""
        loss, data = make_loss(), with_advantage(make_rollout())
        kwargs = {"num_policy_steps": 3, "minibatch_size": 8, "dual_order": dual_order}
        metrics = make_stepper(loss, **kwargs).update(loss, data)
        assert set(metrics.keys()) == set(loss.out_keys)
        assert all(value.shape == () and not value.requires_grad for value in metrics.values())
        rollout, expected = loss.e_step(data)
        assert_equal(metrics, {**expected, **loss(rollout).detach()})

    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    def test_not_finite(self, dual_order: Any) -> None:
        """What is not finite in one minibatch ends the update; the steps before it count."""
        loss, data = make_loss(), with_advantage(make_rollout())
        data["value_target"][0, 0] = NAN
        kwargs = {"num_policy_steps": 20, "minibatch_size": 1, "dual_order": dual_order}
        stepper = make_stepper(loss, torch.optim.Adam, **kwargs)
        stepper.update(loss, data)
        assert stepper.skipped_updates == 1
        assert all(value.isfinite().all() for value in values(loss).values())

    @pytest.mark.parametrize("temperature_update", UPDATES)
    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    def test_not_finite_advantage(self, dual_order: Any, temperature_update: Any) -> None:
        """It spoils the weights of all samples: no step is taken on any minibatch."""
        loss = make_loss(temperature_update=temperature_update)
        data = with_advantage(make_rollout())
        data["advantage"][0, 0] = NAN
        before = values(loss)
        kwargs = {"num_policy_steps": 20, "minibatch_size": 1, "dual_order": dual_order}
        stepper = make_stepper(loss, torch.optim.Adam, **kwargs)
        stepper.update(loss, data)
        assert stepper.skipped_updates == 1
        assert_equal(values(loss), before, 0, 0)

    def test_padding(self) -> None:
        """Samples that the mask leaves out count in no minibatch, even if one has no others."""
        losses = [make_loss() for _ in range(2)]
        data = with_advantage(make_rollout())
        data["collector", "mask"] = torch.rand(4, 5) < 0.3
        other = data.clone()
        other["value_target"][~data["collector", "mask"]] = 1e6
        for loss, rollout in zip(losses, (data, other), strict=True):
            torch.manual_seed(1)
            make_stepper(loss, num_policy_steps=10, minibatch_size=2).update(loss, rollout)
        assert_equal(values(losses[0]), values(losses[1]), 0, 0)
        assert all(value.isfinite().all() for value in values(losses[0]).values())
