from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from minerva_torchrl.modules import StateIndependentScale
from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss
from minerva_torchrl.trainers import KLEarlyStop, linear_lr_annealing
from tests.objectives.ppo_problem import (
    LEARNING_RATE,
    make_actor,
    make_critic,
    make_mlp,
    total_loss,
)

# Early stopping ----------------------------------------------------------------------------------


def fake_losses(kl: float) -> TensorDict:
    return TensorDict({"mean_ratio": torch.tensor(1.0 + kl), "kl_approx": torch.zeros(())})


class TestEarlyStopInALoop:
    def run(self, early_stop: KLEarlyStop, kls: list[list[float]]) -> int:
        early_stop.start_rollout()
        for epoch in kls:
            for kl in epoch:
                early_stop.observe(fake_losses(kl))
            if early_stop.epoch_done():
                break
        return early_stop.epochs_run

    def test_last_minibatch_of_the_epoch_decides(self) -> None:
        early_stop = KLEarlyStop(0.02)
        assert self.run(early_stop, [[0.5, 0.01], [0.5, 0.01], [0.01, 0.03], [0.0, 0.0]]) == 3
        assert early_stop.stopped
        assert early_stop.last_kl == pytest.approx(0.03, rel=1e-5)
        assert self.run(early_stop, [[0.01], [0.01]]) == 2  # the next rollout starts afresh
        assert not early_stop.stopped

    @pytest.mark.parametrize("target_kl", [None, 0.0, -1.0])
    def test_disabled(self, target_kl: float | None) -> None:
        assert self.run(KLEarlyStop(target_kl), [[9.0], [float("nan")], [9.0]]) == 3

    def test_not_a_number_stops(self) -> None:
        assert self.run(KLEarlyStop(0.02), [[float("nan")], [0.0]]) == 1

    def test_rejects(self) -> None:
        with pytest.raises(ValueError, match="target_kl must be a number or None, got nan"):
            KLEarlyStop(float("nan"))
        with pytest.raises(RuntimeError, match="at least one observe"):
            KLEarlyStop(0.1).epoch_done()


# Learning rate -----------------------------------------------------------------------------------


class TestAnnealing:
    def make_optimizer(self) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
        return torch.optim.SGD(groups)

    def test_schedule(self) -> None:
        optimizer = self.make_optimizer()
        scheduler = linear_lr_annealing(optimizer, 5)
        for update in range(1, 6):
            for group, initial in zip(optimizer.param_groups, (1.0, 0.1), strict=True):
                assert group["lr"] == pytest.approx(initial * (1 - (update - 1) / 5))
            optimizer.step()
            scheduler.step()
        for _ in range(2):  # never negative, should training go on
            assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
            optimizer.step()
            scheduler.step()

    def test_resumes(self) -> None:
        optimizer = self.make_optimizer()
        scheduler = linear_lr_annealing(optimizer, 5)
        for _ in range(2):
            optimizer.step()
            scheduler.step()
        resumed_optimizer = self.make_optimizer()
        resumed = linear_lr_annealing(resumed_optimizer, 5)
        resumed_optimizer.load_state_dict(optimizer.state_dict())
        resumed.load_state_dict(scheduler.state_dict())
        for o, s in ((optimizer, scheduler), (resumed_optimizer, resumed)):
            o.step()
            s.step()
            assert o.param_groups[0]["lr"] == pytest.approx(0.4)

    def test_rejects(self) -> None:
        with pytest.raises(ValueError, match="num_updates must be at least 1, got 0"):
            linear_lr_annealing(self.make_optimizer(), 0)


# Learning ----------------------------------------------------------------------------------------


def one_step_episodes(observation: Tensor, reward: Tensor) -> dict:
    end = torch.ones(*observation.shape[:-1], 1, dtype=torch.bool)
    return {"observation": observation, "reward": reward, "done": end, "terminated": end}


def train_bandit(actor: ProbabilisticActor, reward_function, contexts, updates: int) -> list[float]:
    """Train on contexts ``[B, O]``; returns the mean reward of each rollout."""
    critic = make_critic(make_mlp(1, last_gain=1.0, inputs=contexts.shape[-1]))
    loss = make_ppo_loss(actor, critic, entropy_coeff=0.001)
    optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, eps=1e-5)
    scheduler = linear_lr_annealing(optimizer, updates)
    early_stop = KLEarlyStop(0.1)
    rewards = []
    for _ in range(updates):
        observation = contexts[torch.randint(len(contexts), (256, 1))]
        rollout = TensorDict({"observation": observation}, batch_size=[256, 1])
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            rollout = actor(rollout)
        reward = reward_function(observation, rollout["action"])
        rewards.append(reward.mean().item())
        rollout["next"] = one_step_episodes(observation, reward)
        data = estimate_advantage(loss, rollout).reshape(-1)
        early_stop.start_rollout()
        for _ in range(4):
            for rows in torch.randperm(256).split(64):
                losses = loss(data[rows])
                early_stop.observe(losses)
                optimizer.zero_grad()
                total_loss(losses).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
            if early_stop.epoch_done():
                break
        scheduler.step()
    return rewards


@pytest.mark.slow
def test_learns_a_continuous_contextual_bandit() -> None:
    torch.manual_seed(0)
    policy = StateIndependentScale(make_mlp(1, last_gain=0.01, inputs=2), 1)
    contexts = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    optimum = torch.tensor([[1.0], [-1.0]])

    def reward(observation: Tensor, action: Tensor) -> Tensor:
        return -(action - observation @ optimum).square()

    rewards = train_bandit(make_actor(policy), reward, contexts, updates=40)
    assert rewards[0] < -1.5
    assert rewards[-1] > -0.3
    with torch.no_grad():
        torch.testing.assert_close(policy(contexts)[0], optimum, rtol=0.0, atol=0.25)


def test_learns_a_discrete_contextual_bandit() -> None:
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(make_mlp(3, last_gain=0.01), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )

    def reward(observation: Tensor, action: Tensor) -> Tensor:
        return (observation * action).sum(-1, keepdim=True)

    rewards = train_bandit(actor, reward, torch.eye(3), updates=30)
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.9
