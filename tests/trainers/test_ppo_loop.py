from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import DefaultOptimizationStepper

from minerva_torchrl.modules import StateIndependentScale
from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss
from minerva_torchrl.trainers import KLEarlyStop, linear_lr_annealing
from tests.objectives.ppo_problem import (
    LEARNING_RATE,
    make_actor,
    make_critic,
    make_mlp,
    make_networks,
    make_rollout,
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


class ListCollector:
    """The part of a collector that the Trainer needs."""

    init_random_frames = 0

    def __init__(self, rollouts: list[TensorDict]) -> None:
        self.rollouts = rollouts

    def __iter__(self) -> Iterator[TensorDict]:
        return iter(self.rollouts)

    def shutdown(self) -> None:
        pass


# TorchRL warns that steppers will replace the stage that it itself uses for a plain optimiser.
@pytest.mark.filterwarnings("ignore:The 'optimizer' hook stage will be replaced:FutureWarning")
class TestEarlyStopInATrainer:
    num_epochs, num_minibatches = 6, 4

    def train(
        self, target_kl: float | None, with_stepper: bool
    ) -> tuple[list[int], list[nn.Parameter], KLEarlyStop, Trainer]:
        """Train on two rollouts; the minibatches drawn from each are counted."""
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic))
        rollouts = [make_rollout(actor, seed=seed) for seed in (1, 2)]
        drawn = [0]

        trainer = Trainer(
            collector=ListCollector([estimate_advantage(loss, r) for r in rollouts]),
            total_frames=128,
            frame_skip=1,
            optim_steps_per_batch=self.num_minibatches,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE),
            optimization_stepper=DefaultOptimizationStepper() if with_stepper else None,
            num_epochs=self.num_epochs,
            progress_bar=False,
        )

        def draw_minibatch(batch: TensorDict) -> TensorDict:
            rows = slice(16 * (drawn[0] % 4), 16 * (drawn[0] % 4) + 16)
            drawn[0] += 1
            return batch.reshape(-1)[rows]

        counts = [0]
        trainer.register_op("process_optim_batch", draw_minibatch)
        trainer.register_op("post_steps", lambda: counts.append(drawn[0]))
        early_stop = KLEarlyStop(target_kl)
        early_stop.register(trainer)
        trainer.train()
        per_rollout = [after - before for before, after in pairwise(counts)]
        return per_rollout, list(loss.parameters()), early_stop, trainer

    @pytest.mark.parametrize("with_stepper", [False, True])
    def test_disabled_runs_every_epoch(self, with_stepper: bool) -> None:
        per_rollout, _, early_stop, trainer = self.train(None, with_stepper)
        assert per_rollout == [self.num_epochs * self.num_minibatches] * 2
        assert early_stop.epochs_run == self.num_epochs
        assert trainer._log_dict["epochs_run"] == [6.0, 6.0]

    @pytest.mark.parametrize("with_stepper", [False, True])
    def test_stops_the_epochs_of_a_rollout_but_not_training(self, with_stepper: bool) -> None:
        per_rollout, _, early_stop, trainer = self.train(1e-9, with_stepper)
        # One epoch each: no minibatch is drawn for the epochs left out, and the second rollout
        # is used as well.
        assert per_rollout == [self.num_minibatches] * 2
        assert early_stop.stopped
        assert trainer.collected_frames == 128
        assert trainer._log_dict["epochs_run"] == [1.0, 1.0]
        assert all(kl > 1e-9 for kl in trainer._log_dict["kl_k3"])

    def test_stops_where_a_loop_would_stop(self) -> None:
        target_kl = 0.02
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic))
        optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE)
        rollouts = [estimate_advantage(loss, make_rollout(actor, seed=seed)) for seed in (1, 2)]
        early_stop = KLEarlyStop(target_kl)
        epochs = []
        for rollout in rollouts:
            early_stop.start_rollout()
            for _ in range(self.num_epochs):
                for minibatch in rollout.reshape(-1).split(16):
                    losses = loss(minibatch)
                    early_stop.observe(losses)
                    total_loss(losses).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if early_stop.epoch_done():
                    break
            epochs.append(early_stop.epochs_run)
        assert 1 < epochs[0] < self.num_epochs  # neither at once nor never

        for with_stepper in (False, True):
            per_rollout, parameters, _, _ = self.train(target_kl, with_stepper)
            assert per_rollout == [self.num_minibatches * count for count in epochs]
            for parameter, expected in zip(parameters, loss.parameters(), strict=True):
                torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12)


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
