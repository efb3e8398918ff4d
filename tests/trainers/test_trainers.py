"""MPOTrainer, VMPOTrainer and make_ppo_trainer against loops written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from minerva_torchrl import VMPOTrainer
from minerva_torchrl.objectives.ppo import estimate_advantage
from minerva_torchrl.trainers import (
    KLEarlyStop,
    linear_lr_annealing,
    make_target_updater,
)
from minerva_torchrl.trainers.mpo import stored_keys
from tests.envs.scripted import save_and_load
from tests.objectives import vmpo_problem
from tests.objectives.base import make_transitions, total_loss
from tests.trainers.problem import (
    KINDS,
    FakeCollector,
    Problem,
    assert_identical,
    count_calls,
    differs,
    make_buffer,
    make_collector,
    make_env_actor,
    make_env_loss,
    make_env_trainer,
    make_vmpo_stepper,
    numbered_steps,
)

# As a loop by hand -------------------------------------------------------------------------------


class TestMPOIsALoop:
    def make(self, td_est: Any, updater: dict[str, Any]) -> tuple[Problem, Any, Any]:
        """A problem, a buffer that is filled already, and the updater of the targets."""
        problem = Problem("mpo")
        problem.loss.make_value_estimator(td_est, gamma=0.9)
        buffer = make_buffer(batch_size=8, slice_len=None if td_est is None else 4)
        for seed in (20, 21):
            buffer.extend(self.collect(problem, seed).reshape(-1))
        return problem, buffer, make_target_updater(problem.loss, **updater)

    @staticmethod
    def collect(problem: Problem, seed: int) -> TensorDict:
        batch = make_transitions(2, 5, seed=seed)
        ids = 2 * seed + torch.arange(2).unsqueeze(-1).expand(2, 5)
        batch["collector"] = TensorDict({"traj_ids": ids}, [2, 5])
        return batch.select(*stored_keys(problem.loss), strict=False)

    @pytest.mark.parametrize("updater", [{"period": 3}, {"tau": 0.1}], ids=str)
    @pytest.mark.parametrize("td_est", [None, "retrace"])
    @pytest.mark.parametrize(("num_batches", "steps"), [(7, 1), (1, 7)])
    def test_seven_updates(
        self, num_batches: int, steps: int, td_est: Any, updater: dict[str, Any]
    ) -> None:
        problem, buffer, target_updater = self.make(td_est, updater)
        initial = problem.state()
        batches = [self.collect(problem, seed) for seed in range(num_batches)]
        torch.manual_seed(5)
        for batch in batches:
            buffer.extend(batch.reshape(-1))
            for _ in range(steps):
                sample = buffer.sample()
                sample = sample if td_est is None else sample.reshape(-1, 4)
                problem.stepper.update(problem.loss, sample)
                target_updater.step()
        expected = problem.state()
        assert differs(expected["loss"], initial["loss"])

        problem, buffer, target_updater = self.make(td_est, updater)
        assert_identical(problem.state(), initial)
        trainer = problem.trainer(
            batches,
            replay_buffer=buffer,
            target_net_updater=target_updater,
            optim_steps_per_batch=steps,
            sequence_length=1 if td_est is None else 4,
        )
        torch.manual_seed(5)
        trainer.train()
        assert_identical(problem.state(), expected)
        assert trainer.collected_frames == 10 * num_batches


class TestVMPOIsALoop:
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("vmpo")])
    def test_one_update_per_rollout(self, kind: str) -> None:
        problem = Problem(kind)
        rollouts = [problem.batch(seed) for seed in range(7)]
        initial = problem.state()
        for rollout in rollouts:
            problem.stepper.update(problem.loss, rollout.clone())
        expected = problem.state()
        assert differs(expected["loss"], initial["loss"])

        problem = Problem(kind)
        problem.trainer(rollouts).train()
        assert_identical(problem.state(), expected)

    def test_target_as_the_old_policy(self) -> None:
        """It is updated after every rollout."""

        def make() -> tuple[Any, Any, Any]:
            loss = vmpo_problem.make_loss(old_policy="target")
            return loss, make_vmpo_stepper(loss), make_target_updater(loss, period=2)

        loss, stepper, updater = make()
        rollouts = [vmpo_problem.make_rollout(seed=seed) for seed in range(5)]
        for rollout in rollouts:
            stepper.update(loss, rollout.clone())
            updater.step()
        expected = loss.state_dict()

        loss, stepper, updater = make()
        settings: dict[str, Any] = {"total_frames": 100, "progress_bar": False}
        settings |= {"loss_module": loss, "optimization_stepper": stepper}
        with pytest.raises(ValueError, match="target_net_updater must be given exactly"):
            VMPOTrainer(collector=FakeCollector(rollouts), **settings)
        settings["target_net_updater"] = updater
        VMPOTrainer(collector=FakeCollector(rollouts), **settings).train()
        assert_identical(dict(loss.state_dict()), dict(expected))


@pytest.mark.parametrize("algo", ["vmpo", "ppo"])
def test_learning_rate_falls_to_zero(algo: str) -> None:
    problem = Problem(algo)
    optimizer = problem.stepper.optimizer
    scheduler = linear_lr_annealing(optimizer, 4)
    rates: list[float] = []
    rollouts = [problem.batch(seed) for seed in range(4)]
    trainer = problem.trainer(rollouts, lr_scheduler=scheduler)
    trainer.register_op("pre_optim_steps", lambda: rates.append(optimizer.param_groups[0]["lr"]))
    trainer.train()
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert optimizer.param_groups[0]["lr"] == 0.0
    state = save_and_load(trainer.state_dict()["lr_scheduler"])
    assert state["last_epoch"] == 4


class TestPPOIsALoop:
    num_epochs, minibatch_size = 3, 5

    def loop(
        self, problem: Problem, rollouts: list[TensorDict], target_kl: float | None
    ) -> list[int]:
        loss, optimizer = problem.loss, problem.stepper.optimizer
        scheduler = linear_lr_annealing(optimizer, len(rollouts))
        early_stop, epochs = KLEarlyStop(target_kl), []
        for rollout in rollouts:
            data = estimate_advantage(loss, rollout.clone()).reshape(-1)
            early_stop.start_rollout()
            for order in [torch.randperm(len(data)) for _ in range(self.num_epochs)]:
                for rows in order.split(self.minibatch_size):
                    losses = loss(data[rows])
                    early_stop.observe(losses)
                    optimizer.zero_grad()
                    total_loss(losses).backward()
                    nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                    optimizer.step()
                if early_stop.epoch_done():
                    break
            epochs.append(early_stop.epochs_run)
            scheduler.step()
        return epochs

    @pytest.mark.parametrize("target_kl", [None, 0.05])
    def test_epochs_of_minibatches(self, target_kl: float | None) -> None:
        problem = Problem("ppo")
        rollouts = [problem.batch(seed) for seed in range(4)]
        torch.manual_seed(5)
        epochs = self.loop(problem, rollouts, target_kl)
        assert (set(epochs) == {self.num_epochs}) == (target_kl is None)
        expected = problem.state()

        problem = Problem("ppo")
        trainer = problem.trainer(
            rollouts,
            num_epochs=self.num_epochs,
            minibatch_size=self.minibatch_size,
            target_kl=target_kl,
            lr_scheduler=linear_lr_annealing(problem.stepper.optimizer, len(rollouts)),
        )
        torch.manual_seed(5)
        trainer.train()
        assert_identical(problem.state(), expected)
        assert trainer._log_dict["epochs_run"] == epochs

    def test_exposes_what_was_left_out(self) -> None:
        problem = Problem("ppo")
        trainer = problem.trainer([problem.batch(0)], max_skipped=3)
        trainer.train()
        assert trainer.finite_batches.limit == 3
        assert trainer.finite_batches.skipped_batches == 0
        assert trainer.finite_batches.skipped_updates == 0

    def test_rejects(self) -> None:
        problem = Problem("ppo")
        message = "frames_per_batch must be a multiple of minibatch_size, got 20 and 6"
        with pytest.raises(ValueError, match=message):
            problem.trainer([problem.batch(0)], minibatch_size=6)


# What TorchRL's own trainers get wrong -----------------------------------------------------------


class TestTraps:
    def test_replay_keeps_flags_and_batch_as_collected(self) -> None:
        """TorchRL's ReplayBufferTrainer marks every step truncated, in the caller's batch too."""
        problem = Problem("mpo")
        batches = [problem.batch(seed) for seed in range(3)]
        before = copy.deepcopy(batches)
        trainer = problem.trainer(batches)
        trainer.train()
        assert_identical(batches, before)
        stored = trainer.replay_buffer[:]
        expected = torch.cat([batch.reshape(-1) for batch in before])
        for flag in ("truncated", "done", "terminated"):
            assert torch.equal(stored["next", flag], expected["next", flag])
            assert 0 < stored["next", flag].sum() < len(stored)
        for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
            assert torch.equal(stored[key], expected[key])

    @pytest.mark.parametrize("kind", ["ppo", "vmpo-solve", "vmpo-gradient"])
    def test_advantages_are_estimated_once_per_rollout(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a ``pre_epoch`` hook they would be made anew with the updated critic each epoch."""
        problem = Problem(kind)
        calls = count_calls(monkeypatch, problem.loss.value_estimator, "forward")
        problem.trainer([problem.batch(seed) for seed in range(3)]).train()
        assert len(calls) == 3

    @pytest.mark.parametrize("kind", ["mpo", "vmpo-solve", "ppo"])
    def test_refuses_random_frames(self, kind: str) -> None:
        """A collector stores log-probabilities, means and deviations of zero for them."""
        problem = Problem(kind)
        collector = FakeCollector([problem.batch(0)])
        collector.init_random_frames = 8
        with pytest.raises(ValueError, match="init_random_frames"):
            problem.trainer([problem.batch(0)], collector=collector)

    def test_refuses_random_frames_of_a_real_collector(self) -> None:
        loss = make_env_loss()
        collector = make_collector(4, frames_per_batch=8, init_random_frames=8)
        with pytest.raises(ValueError, match=r"init_random_frames.*warmup_frames"):
            make_env_trainer(loss, collector, total_frames=16)
        collector.shutdown()

    def test_log_probs_of_warm_up_are_those_of_the_policy(self) -> None:
        loss = make_env_loss("retrace")
        initial = make_env_actor()
        collector = make_collector(4, 6, policy=loss.actor_network, frames_per_batch=16)
        trainer = make_env_trainer(loss, collector, total_frames=32, warmup_frames=64)
        trainer.train()
        stored = trainer.replay_buffer[:]
        assert len(stored) == 32
        with torch.no_grad():
            log_prob = initial.get_dist(stored).log_prob(stored["action"])
        assert (stored["action_log_prob"] != 0).all()
        torch.testing.assert_close(stored["action_log_prob"], log_prob)

    def test_n_step_transitions_end_with_their_episode(self) -> None:
        """Through the trainer: n steps, the discount, and the keys that it selects."""
        problem = Problem("mpo")
        problem.loss.make_value_estimator(gamma=0.5)
        steps = numbered_steps([(5, "terminated"), (3, "truncated"), (4, "open")])
        steps["observation"], steps["next", "observation"] = (
            torch.nn.functional.pad(o, (0, 1))
            for o in (steps["observation"], steps["next", "observation"])
        )
        trainer = problem.trainer(list(steps.split(4, -1)), n_steps=3, gamma=0.5)
        trainer.train()
        stored = trainer.replay_buffer[:]
        assert stored["next", "reward"].flatten().tolist() == [
            *(3.0, 6.0, 12.0, 16.0, 16.0),
            *(32.0 + 32.0 + 32.0, 64.0 + 64.0, 128.0),
            3.0,
        ]
        assert stored["steps_to_next_obs"].tolist() == [3, 3, 3, 2, 1, 3, 2, 1, 3]
        assert stored["next", "terminated"].flatten().tolist() == [
            *(False, False, True, True, True),
            *(False,) * 4,
        ]
        assert stored["next", "truncated"].flatten().tolist() == [
            *(False,) * 5,
            *(True, True, True),
            False,
        ]

    def test_refuses_n_steps_with_another_discount(self) -> None:
        problem = Problem("mpo")
        problem.loss.make_value_estimator(gamma=0.5)
        with pytest.raises(ValueError, match=r"^gamma must be that of .* got 0\.9 and 0\.5\."):
            problem.trainer([problem.batch(0)], n_steps=3, gamma=0.9)
        problem.trainer([problem.batch(0)], n_steps=1, gamma=0.9)
