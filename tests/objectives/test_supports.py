"""Supports of critics: what lies outside of them, and how they grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minerva_torchrl import MPOLoss
from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.critics import CategoricalCritic, HLGaussCritic, TwoHotCritic
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    make_actor,
    make_critic,
    make_mlp,
    make_transitions,
    with_updater,
)
from tests.objectives.test_value_critics import BINNED, MAKE


@pytest.mark.parametrize("kind", ["categorical", *BINNED])
def test_clipped_targets(kind: str) -> None:
    critic = MAKE[kind]()
    next_value = torch.zeros(10, critic.width).index_fill(-1, torch.tensor(20), 1.0)  # all at 0
    if kind != "categorical":
        next_value = torch.zeros(10, 1)
    offset = torch.zeros(10, 1)
    offset[:3] = 11.0
    critic.target(next_value, lambda x: x + offset)
    assert critic.metrics()["clipped_targets"].item() == pytest.approx(0.3)
    critic.target(next_value, lambda x: x)
    assert critic.metrics()["clipped_targets"].item() == 0


@pytest.mark.parametrize("symlog", [False, True])
@pytest.mark.parametrize("kind", BINNED)
def test_bins_decode_what_they_encode(kind: str, symlog: bool) -> None:
    ends = (-500.0, 500.0) if symlog else (-30.0, 30.0)
    critic = {"two_hot": TwoHotCritic, "hl_gauss": HLGaussCritic}[kind](*ends, 101, symlog=symlog)
    value = (
        torch.tensor([-250.0, -20.0, -1.0, 0.0, 0.4, 7.0, 300.0])
        if symlog
        else torch.linspace(-25, 25, 7)
    )
    decoded = critic.mean(critic._encode(value).log())
    tolerance = {"rtol": 1e-3, "atol": 2e-2} if kind == "hl_gauss" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(decoded, value, **tolerance)


@pytest.mark.parametrize("make", [CategoricalCritic, TwoHotCritic, HLGaussCritic])
def test_adaptive_support_grows_to_the_targets(make: Any) -> None:
    critic = make(num_atoms=11, adaptive=True)
    assert (critic.support.low, critic.support.high) == (-1, 1)
    for _ in range(60):
        next_value = torch.full((8, 1), 50.0)
        if make is CategoricalCritic:
            next_value = F.two_hot(torch.zeros(8), critic.support())
        critic.target(next_value, lambda x: x.clamp(0, 0) + 50.0)
    assert 50 <= critic.support.high <= 56
    assert critic.support.low == -1
    assert critic.metrics()["clipped_targets"] == 0
    restored = make(num_atoms=11, adaptive=True)
    restored.load_state_dict(critic.state_dict())
    assert torch.equal(restored.support(), critic.support())


def test_adaptive_support_grows_slowly_for_few_targets() -> None:
    """One of 20 targets outside moves an end by less than half a per cent: no jump."""
    critic = TwoHotCritic(-2.0, 6.0, 11, adaptive=True)
    target = torch.linspace(-1.0, 5.0, 20).unsqueeze(-1)
    for outside, moved in ((7.0, "high"), (-3.0, "low")):
        before = getattr(critic.support, moved).clone()
        width = critic.support.high - critic.support.low
        target[0] = outside
        critic.target(target, lambda x: x)
        step = (getattr(critic.support, moved) - before).abs()
        torch.testing.assert_close(step, 0.1 * (0.05 - 0.01) * width)
    unmoved = critic.support().clone()
    critic.target(target.clamp(-1, 5), lambda x: x)
    assert torch.equal(critic.support(), unmoved)
    one_of_many = torch.zeros(101, 1).index_fill(0, torch.tensor(0), 99.0)
    critic.target(one_of_many, lambda x: x)  # not more than one per cent
    assert torch.equal(critic.support(), unmoved)


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("make", [CategoricalCritic, TwoHotCritic])
def test_padding_has_no_target(make: Any, sequences: bool) -> None:
    """A support sees the same targets, and grows as far, whether there is padding or not."""
    supports = []
    for padded in (False, True):
        critic = make(num_atoms=11, adaptive=True)
        network = make_critic(Concatenate(make_mlp(OBSERVATION_DIM + ACTION_DIM, 11)))
        loss = with_updater(MPOLoss(make_actor(), network, critic=critic).make_value_estimator())
        data = make_transitions(4, 6) if sequences else make_transitions(24)
        data["next", "reward"].fill_(50.0)
        if padded:
            data["collector", "mask"] = torch.arange(data.numel()).reshape(data.shape) % 3 != 0
            data["next", "reward"][~data["collector", "mask"]] = torch.nan
        output = loss(data)
        assert output["clipped_targets"] == 1
        assert output["loss_qvalue"].isfinite()
        assert output["loss_actor"].isfinite()
        (member,) = loss.critics
        supports.append(member.support())
    assert torch.equal(*supports)
    assert supports[0][-1] > 1


def test_fixed_support() -> None:
    fixed = TwoHotCritic(-1.0, 1.0, 11)
    fixed.target(torch.full((8, 1), 50.0), lambda x: x)
    assert fixed.support.high == 1
    assert TwoHotCritic().support().tolist()[::50] == [-150.0, 150.0]
    ends = [TwoHotCritic(symlog=True, adaptive=x)._values()[-1].item() for x in (False, True)]
    assert ends == pytest.approx([150.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("make", [TwoHotCritic, HLGaussCritic, CategoricalCritic])
def test_adaptive_values_settle_at_the_true_ones(make: Any) -> None:
    """Bootstrapped values are stretched with a support that grows, and end where they belong."""
    torch.manual_seed(0)
    critic, gamma = make(num_atoms=31, adaptive=True), 0.8
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0])  # each state leads to itself
    outputs = torch.zeros(1, 4, 31, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.03)
    largest = 0.0
    for step in range(1500):
        if step % 20 == 0:
            old = outputs.detach().clone().unsqueeze(1)
        noise = 0.1 * torch.randn(4, 1)
        next_value = critic.pool(critic.select(old, "min"), None)
        target = critic.target(next_value, lambda x, n=noise: reward[:, None] + n + gamma * x)
        optimizer.zero_grad()
        critic.loss(outputs, target).sum().backward()
        optimizer.step()
        largest = max(largest, critic.mean(outputs).max().item())
    torch.testing.assert_close(
        critic.mean(outputs)[0].detach(), reward / (1 - gamma), rtol=0.05, atol=0.3
    )
    assert largest < 1.5 * 20
    assert 20 <= critic.support.high < 30
