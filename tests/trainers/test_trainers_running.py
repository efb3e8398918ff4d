"""When trainers begin to train, where their weights go, and how they resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ValueOperator

from minerva_torchrl import MPOTrainer, VMPOLoss, VMPOTrainer, make_ppo_loss
from minerva_torchrl.trainers import (
    PPOOptimizationStepper,
    make_ppo_trainer,
    make_target_updater,
)
from tests.envs.scripted import save_and_load
from tests.objectives.base import make_mlp
from tests.trainers.problem import (
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
)

# Warm-up -----------------------------------------------------------------------------------------


class TestWarmUp:
    @pytest.mark.parametrize(
        ("warmup_frames", "frame_skip", "first"), [(0, 1, 1), (17, 1, 3), (24, 1, 3), (17, 2, 2)]
    )
    def test_number_of_updates(
        self,
        warmup_frames: int,
        frame_skip: int,
        first: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """None before the warm-up frames are collected, then the same number for every batch."""
        problem = Problem("mpo")
        calls = count_calls(monkeypatch, problem.stepper, "step")
        after_batch: list[int] = []
        states = [problem.state()]
        updater = make_target_updater(problem.loss, period=1)
        updates = count_calls(monkeypatch, updater, "step")
        trainer = problem.trainer(
            [problem.batch(seed) for seed in range(5)],
            total_frames=40 * frame_skip,
            frame_skip=frame_skip,
            warmup_frames=warmup_frames,
            optim_steps_per_batch=3,
            target_net_updater=updater,
        )
        trainer.register_op("post_steps", lambda: after_batch.append(len(calls)))
        trainer.register_op("post_steps", lambda: states.append(problem.state()))
        trainer.train()
        assert after_batch == [max(0, 3 * (i - first + 1)) for i in range(1, 6)]
        assert len(updates) == len(calls)
        assert_identical(states[1:first], [states[0]] * (first - 1))
        assert len(trainer.replay_buffer) == 40

    def test_waits_for_the_first_n_step_transition(self) -> None:
        problem = Problem("mpo")
        batches = [batch for seed in (0, 1) for batch in problem.batch(seed).split(2, -1)]
        trainer = problem.trainer(batches, n_steps=3)
        lengths: list[int] = []
        trainer.register_op(
            "process_optim_batch", lambda _: lengths.append(len(trainer.memory.replay_buffer))
        )
        trainer.train()
        assert lengths == [2, 2, 6, 6, 10, 10]


# Weights -----------------------------------------------------------------------------------------


class TestWeights:
    @pytest.mark.parametrize("kind", ["mpo", "vmpo-solve", "ppo"])
    def test_given_to_the_collector_after_every_batch(self, kind: str) -> None:
        problem = Problem(kind)
        batches = [problem.batch(seed) for seed in range(3)]
        trainer = problem.trainer(batches)
        online: list[Any] = []
        trainer.register_op(
            "post_steps",
            lambda: online.append(problem.loss.actor_network_params.data.clone()),
        )
        trainer.train()
        assert len(trainer.collector.weights) == 3
        for given, expected in zip(trainer.collector.weights, online, strict=True):
            assert_identical(dict(given.flatten_keys()), dict(expected.flatten_keys()))
        assert differs(dict(online[0].flatten_keys()), dict(online[1].flatten_keys()))

    def collect(self, kind: str, policy: Any) -> tuple[Any, Any]:
        """Train on a ScriptedEnv with a policy that is not the one of the loss."""
        collector = make_collector(4, 6, policy=policy, frames_per_batch=16)
        settings: dict[str, Any] = {"collector": collector, "total_frames": 48}
        settings["progress_bar"] = False
        actor = make_env_actor()
        critic = ValueOperator(make_mlp(2, 1), in_keys=["observation"])
        if kind == "mpo":
            loss: Any = make_env_loss()
            trainer: Any = make_env_trainer(loss, **settings)
        elif kind == "vmpo":
            loss = VMPOLoss(actor, critic)
            stepper = make_vmpo_stepper(loss)
            trainer = VMPOTrainer(loss_module=loss, optimization_stepper=stepper, **settings)
        else:
            loss = make_ppo_loss(actor, critic)
            optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
            stepper = PPOOptimizationStepper(optimizer, num_epochs=2, minibatch_size=8)
            settings |= {"optimization_stepper": stepper, "frames_per_batch": 16}
            trainer = make_ppo_trainer(loss_module=loss, **settings)
        trainer.train()
        return loss, trainer

    @pytest.mark.parametrize("kind", ["mpo", "vmpo", "ppo"])
    def test_reach_a_policy_that_is_a_copy(self, kind: str) -> None:
        policy = make_env_actor()
        before = copy.deepcopy(policy.state_dict())
        loss, trainer = self.collect(kind, policy)
        after = dict(policy.state_dict())
        assert differs(after, before)
        trained = dict(loss.actor_network_params.data.flatten_keys("."))
        assert_identical(after, {k: trained[k] for k in after})
        assert trainer.collected_frames == 48

    def test_acting_follows_learning(self) -> None:
        """What is collected after the first steps has the log-probabilities of the new policy."""
        loss = make_env_loss("retrace")
        policy = make_env_actor()
        collector = make_collector(4, 6, policy=policy, frames_per_batch=16)
        trainer = make_env_trainer(
            loss,
            collector,
            total_frames=32,
            replay_buffer=make_buffer(slice_len=4),
            sequence_length=4,
        )
        weights: list[Any] = []
        trainer.register_op("post_steps", lambda: weights.append(copy.deepcopy(policy)))
        trainer.train()
        second = trainer.replay_buffer[:][16:]
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            new, old = (
                actor.get_dist(second).log_prob(second["action"])
                for actor in (weights[0], make_env_actor())
            )
        torch.testing.assert_close(second["action_log_prob"], new)
        assert torch.isclose(second["action_log_prob"], old).sum() <= 2


# State -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updater", [{"tau": 0.1}, {"period": 3}], ids=str)
def test_resumed_trainer_goes_on_as_the_one_that_was_not_interrupted(
    updater: dict[str, Any],
) -> None:
    """With the state of its hooks: n-step transitions cross the interruption."""
    batches = [Problem("mpo").batch(seed) for seed in range(4)]

    def make(batches: list[TensorDict]) -> tuple[Problem, MPOTrainer]:
        problem = Problem("mpo")
        target_net_updater = make_target_updater(problem.loss, **updater)
        kwargs: dict[str, Any] = {"target_net_updater": target_net_updater, "total_frames": 32}
        return problem, problem.trainer(batches, n_steps=3, **kwargs)

    expected, trainer = make(batches)
    torch.manual_seed(5)
    trainer.train()
    content = trainer.replay_buffer[:]

    _, first = make(batches[:2])
    torch.manual_seed(5)
    first.train()
    random_state = torch.get_rng_state()
    state = save_and_load(first.state_dict())
    resumed, second = make(batches[2:])
    second.load_state_dict(state)
    second.replay_buffer.extend(first.replay_buffer[:].exclude("index"))
    torch.set_rng_state(random_state)
    second.train()
    assert second.collected_frames == 32
    assert_identical(second.replay_buffer[:], content)
    assert_identical(resumed.state(), expected.state())
