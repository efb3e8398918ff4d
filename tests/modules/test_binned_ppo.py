"""PPO with a critic of bins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss

from minerva_torchrl import make_ppo_loss
from minerva_torchrl.modules import BinnedClipPPOLoss, DirectClipPPOLoss
from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.critics import (
    Critic,
    HLGaussCritic,
    QuantileCritic,
    ScalarCritic,
    TwoHotCritic,
)
from minerva_torchrl.objectives.ppo import estimate_advantage

BINS, WIDEST = 21, 40.0


def make_loss(critic: Critic | None, *, width: int = BINS, **kwargs: Any) -> ClipPPOLoss:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    value = TensorDictModule(nn.Linear(3, width), in_keys=["observation"], out_keys=["state_value"])
    kwargs = {"clip_value": False, "loss_class": BinnedClipPPOLoss} | kwargs
    return make_ppo_loss(actor, value, critic=critic, **kwargs)


def make_batch(loss: ClipPPOLoss, *batch: int) -> TensorDict:
    torch.manual_seed(1)
    end = torch.zeros(*batch, 1, dtype=torch.bool)
    rollout = TensorDict(
        {
            "observation": torch.randn(*batch, 3),
            "next": {
                "observation": torch.randn(*batch, 3),
                "reward": torch.randn(*batch, 1),
                "done": end,
                "terminated": end,
            },
        },
        batch,
    )
    with torch.no_grad():
        rollout = loss.actor_network(rollout)
    return estimate_advantage(loss, rollout).reshape(-1)


@pytest.mark.parametrize("kind", [TwoHotCritic, HLGaussCritic])
def test_cross_entropy_with_the_return(kind: type[TwoHotCritic | HLGaussCritic]) -> None:
    """By hand: the logits, the bins of the target, and the coefficient without a half."""
    critic = kind(-WIDEST, WIDEST, BINS)
    loss = make_loss(critic, value_coeff=0.7)
    batch = make_batch(loss, 4, 8)
    weight, bias = (
        loss.critic_network_params[("network", "module", n)] for n in ("weight", "bias")
    )
    logits = batch["observation"] @ weight.T + bias
    support = torch.linspace(-WIDEST, WIDEST, BINS)
    target = batch["value_target"].squeeze(-1)
    probs = (
        F.two_hot(target, support)
        if kind is TwoHotCritic
        else F.hl_gauss(target, support, torch.tensor(0.75 * 2 * WIDEST / (BINS - 1)))
    )
    expected = -0.7 * (probs * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss(batch)["loss_critic"], expected)
    value = (logits.softmax(-1) * support).sum(-1, keepdim=True)
    torch.testing.assert_close(batch["state_value"], value)


def test_both_ways_lead_to_the_same() -> None:
    """The short one, and TorchRL's own, which a compiled loss takes."""
    loss = make_loss(TwoHotCritic(-WIDEST, WIDEST, BINS))
    batch = make_batch(loss, 4, 8)
    short, long = loss(batch.clone()), ClipPPOLoss.forward(loss, batch.clone())
    for name in ("loss_objective", "loss_critic", "loss_entropy", "explained_variance"):
        torch.testing.assert_close(short[name].squeeze(), long[name].squeeze())
    assert short["clipped_targets"] == 0


def test_learns_the_returns() -> None:
    loss = make_loss(HLGaussCritic(-WIDEST, WIDEST, BINS))
    batch = make_batch(loss, 4, 8)
    batch["value_target"] = 20 * batch["observation"][:, :1]
    before = batch["value_target"] - batch["state_value"]
    optimizer = torch.optim.Adam(loss.critic_network_params.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss(batch)["loss_critic"].backward()
        optimizer.step()
    value = loss.critic_network(batch.clone())["state_value"]
    assert (batch["value_target"] - value).square().mean() < 0.7 * before.square().mean()


def test_state_has_the_support() -> None:
    """One that has grown is loaded again."""
    loss, other = (make_loss(TwoHotCritic(-WIDEST, WIDEST, BINS, adaptive=True)) for _ in range(2))
    loss.critic.support.high.add_(3)
    other.load_state_dict(loss.state_dict())
    assert other.critic.support.high == WIDEST + 3


@pytest.mark.parametrize(
    ("critic", "kwargs", "error", "message"),
    [
        (TwoHotCritic(0, 1, BINS), {"clip_value": True}, ValueError, "clip_value=True is for scal"),
        (
            TwoHotCritic(0, 1, BINS),
            {"loss_class": DirectClipPPOLoss},
            ValueError,
            "TwoHotCritic does not go with DirectClipPPOLoss",
        ),
        (None, {"width": 1}, ValueError, "ScalarCritic does not go with BinnedClipPPOLoss"),
        (
            ScalarCritic("l1"),
            {"width": 1, "loss_class": ClipPPOLoss},
            ValueError,
            "loss_function='l1'",
        ),
        (QuantileCritic(BINS), {}, TypeError, "must be a ScalarCritic, TwoHotCritic or HLGauss"),
        (TwoHotCritic(0, 1, 7), {"width": 5}, ValueError, "must write 7 outputs .* layer of 5"),
    ],
)
def test_refused(
    critic: Critic | None, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_loss(critic, **kwargs)
