from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import MPOLoss, SoftUpdate


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_mpo_speed(benchmark, backward, compile):
    n_obs, n_act, batch = 8, 4, 128
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    cells = {"num_cells": [128, 128], "device": device}
    policy = nn.Sequential(MLP(n_obs, 2 * n_act, **cells), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(policy, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1, 1, (n_act,), device=device),
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(
        MLP(n_obs + n_act, 1, **cells), in_keys=["observation", "action"]
    )
    loss = MPOLoss(actor, critic)
    SoftUpdate(loss, eps=0.99)
    observation = TensorDict({"observation": torch.randn(batch, n_obs)}, [batch])
    data = actor(observation.to(device)).detach()
    following = {
        "observation": torch.randn(batch, n_obs),
        "reward": torch.randn(batch, 1),
        "done": torch.zeros(batch, 1, dtype=torch.bool),
        "terminated": torch.zeros(batch, 1, dtype=torch.bool),
    }
    data["next"] = TensorDict(following, [batch]).to(device)

    def step(data):
        losses = loss(data)
        if backward:
            names = [key for key in losses.keys() if key.startswith("loss_")]
            sum(losses[name] for name in names).backward()
        return losses  # else a compiler leaves the loss out

    if compile:
        torch._dynamo.reset_code_caches()
        step = torch.compile(step)
    for _ in range(3):
        step(data)
    benchmark(step, data)
    loss.zero_grad()
