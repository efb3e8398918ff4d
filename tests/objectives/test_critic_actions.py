"""What the critic sees of actions outside of their bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchrl.modules import ValueOperator

from minerva_torchrl import MPOLoss
from minerva_torchrl.algorithms.mpo import PRESETS
from tests.objectives.base import with_updater
from tests.objectives.family_problem import make_family_actor, make_family_data


class Watched(nn.Module):
    """Keeps the largest entry of the actions it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.largest: list[float] = []

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        self.largest.append(action.detach().abs().max().item())
        return self.weight * action.sum(-1, keepdim=True)


@pytest.mark.parametrize("clipped", [True, False])
def test_stored_and_sampled_actions(clipped: bool) -> None:
    """Both those of the data and those of the target policy are clipped, or neither."""
    critic = Watched()
    network = ValueOperator(critic, in_keys=["observation", "action"])
    loss = MPOLoss(make_family_actor("normal"), network, clip_critic_actions=clipped)
    data = make_family_data("normal", 16)
    data["action"] = 5.0 * torch.ones(16, 2)
    torch.manual_seed(0)
    with_updater(loss)(data)
    sampled, stored = critic.largest[0], critic.largest[-1]
    assert (sampled > 1, stored) == ((False, 1.0) if clipped else (True, 5.0))


def test_tonic_does_not_clip() -> None:
    assert PRESETS["tonic"].loss["clip_critic_actions"] is False
    assert "clip_critic_actions" not in PRESETS["default"].loss
