"""Updates and batches with numbers that are not finite: left out, counted, too many in a row."""

from __future__ import annotations

import copy
import math
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from minerva_torchrl.trainers import NonFiniteError, linear_lr_annealing
from minerva_torchrl.trainers.hooks import FiniteBatches
from minerva_torchrl.trainers.stepping import LocalLearner
from tests.envs.scripted import save_and_load
from tests.trainers.problem import (
    KINDS,
    Problem,
    assert_identical,
    differs,
    make_buffer,
    numbered_steps,
    spoil,
)

INF, NAN = math.inf, math.nan
REWARD = ("next", "reward")
NEXT_OBSERVATION = ("next", "observation")
BAD = [(key, value) for key in (REWARD, "observation", "action") for value in (NAN, -INF)]
BAD += [(NEXT_OBSERVATION, NAN), (REWARD, 1e25)]  # the last one overflows in the loss


def reaches_the_loss(kind: str, key: Any, value: float) -> bool:
    if kind.startswith("mpo"):
        return key != "action" or math.isnan(value)  # actions are clipped to their bounds
    return key != NEXT_OBSERVATION  # for TorchRL's estimators that is a way to save memory


CASES = [(kind, *bad) for kind in KINDS for bad in BAD if reaches_the_loss(kind, *bad)]


def joined(value: Any) -> str | None:
    return "/".join(value) if isinstance(value, tuple) else None


# Steppers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
class TestSteppers:
    @pytest.mark.parametrize(("kind", "key", "value"), CASES, ids=joined)
    def test_bad_update_changes_nothing(
        self, kind: str, key: Any, value: float, fused: bool
    ) -> None:
        """Neither parameters nor targets, duals or the optimisers' moments, to the bit."""
        problem = Problem(kind, fused=fused)
        problem.update(problem.batch(0))
        before = problem.state()
        problem.update(spoil(problem.batch(1), key, value))
        assert_identical(problem.state(), before)
        assert problem.stepper.skipped_updates == 1
        problem.update(problem.batch(2))
        assert differs(problem.state(), before)
        assert problem.stepper.skipped_updates == 1

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("good", [0, 2])
    def test_next_update_is_as_if_there_had_been_no_bad_one(
        self, good: int, kind: str, fused: bool
    ) -> None:
        """Also if the bad one is the very first."""
        plain, disturbed = Problem(kind, fused=fused), Problem(kind, fused=fused)
        for problem in (plain, disturbed):
            for seed in range(good):
                problem.update(problem.batch(seed), seed)
        disturbed.update(spoil(disturbed.batch(10), REWARD, NAN))
        for seed in (5, 6):
            metrics = [problem.update(problem.batch(seed), seed) for problem in (plain, disturbed)]
            assert_identical(*metrics)
        assert_identical(disturbed.state(), plain.state())
        assert (plain.stepper.skipped_updates, disturbed.stepper.skipped_updates) == (0, 1)

    @pytest.mark.parametrize("kind", KINDS)
    def test_counts_and_raises(self, kind: str, fused: bool) -> None:
        """Updates in a row count; a good one ends the row."""
        problem = Problem(kind, fused=fused)
        stepper = problem.stepper
        good, bad = problem.batch(0), spoil(problem.batch(1), REWARD, NAN)
        assert stepper.skipped_updates == 0
        stepper.check_finite(1)
        for batch in (bad, bad, good, bad, bad):
            problem.update(batch)
            stepper.check_finite(3)
        assert stepper.skipped_updates == 4
        problem.update(bad)
        message = "3 updates in a row had .* not finite (5 in all; the limit is 3)."
        with pytest.raises(NonFiniteError, match=re.escape(message).replace(r"\.\*", ".*")):
            stepper.check_finite(3)
        problem.update(good)
        with pytest.raises(NonFiniteError, match="3 updates in a row"):
            stepper.check_finite(3)  # a row that ended since the last check
        stepper.check_finite(4)

    def test_counts_many(self, fused: bool) -> None:
        """More updates than there are flags kept; nothing is read before somebody asks."""
        problem = Problem("mpo", fused=fused)
        bad = spoil(problem.batch(1), REWARD, NAN)
        read = mock.Mock(side_effect=AssertionError("read"))
        with (
            mock.patch("minerva_torchrl.trainers.stepping._FLAGS_KEPT", 2),
            mock.patch.object(problem.stepper, "_tally", read),
        ):
            for batch in (bad, bad, bad, problem.batch(0), bad):
                problem.update(batch)
        assert problem.stepper.state_dict()["skips"] == (4, 1, 3)

    @pytest.mark.parametrize("kind", KINDS)
    def test_state(self, kind: str, fused: bool) -> None:
        """The counters go on where they were."""
        problem, other = Problem(kind, fused=fused), Problem(kind, fused=fused)
        good, bad = problem.batch(0), spoil(problem.batch(1), REWARD, NAN)
        assert problem.stepper.state_dict()["skips"] == (0, 0, 0)
        for batch in (good, bad, bad):
            problem.update(batch)
        state = save_and_load(problem.stepper.state_dict())
        other.stepper.load_state_dict(state)
        assert_identical(other.stepper.state_dict(), problem.stepper.state_dict())
        other.update(bad)
        assert other.stepper.skipped_updates == 3
        assert problem.stepper.skipped_updates == 2
        with pytest.raises(NonFiniteError, match="3 updates in a row"):
            other.stepper.check_finite(3)
        other.stepper.load_state_dict(problem.stepper.state_dict() | {"skips": None})
        assert other.stepper.skipped_updates == 0


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("mpo")])
def test_infinite_loss_with_finite_gradient_changes_nothing(kind: str, fused: bool) -> None:
    """The square of an error overflows before the error itself, or the norm of gradients, does."""
    problem = Problem(kind, fused=fused)
    batch = problem.batch(0)
    zeros = torch.zeros(*batch.shape, 1)
    batch.update({"advantage": torch.randn_like(zeros), "state_value": zeros})
    batch["value_target"] = zeros.clone()
    problem.stepper.update(problem.loss, batch.clone())
    before = problem.state()
    batch["value_target"][0, 0] = 3e19
    metrics = problem.stepper.update(problem.loss, batch)
    assert metrics["loss_critic"].isinf()
    assert_identical(problem.state(), before)
    assert problem.stepper.skipped_updates == 1


def test_flag_of_a_fused_optimizer_does_not_outlive_the_update() -> None:
    """Steps that others take with the optimiser are not left out."""
    problem = Problem("ppo", fused=True)
    problem.update(spoil(problem.batch(0), REWARD, NAN))
    before = problem.state()["loss"]
    for parameter in problem.loss.parameters():
        parameter.grad = torch.ones_like(parameter)
    problem.stepper.optimizer.step()
    assert differs(problem.state()["loss"], before)


@pytest.mark.parametrize("kind", ["mpo", "mpo-dual_first"])
def test_priorities_of_a_bad_update_are_finite(kind: str) -> None:
    """One that is not would spoil the sum tree of a prioritised buffer for good."""
    problem = Problem(kind)
    priorities: list[Tensor] = []
    buffer = SimpleNamespace(
        update_tensordict_priority=lambda data: priorities.append(data["td_error"])
    )
    trainer: Any = LocalLearner(problem.loss)
    trainer.replay_buffer = buffer
    problem.stepper.step(trainer, spoil(problem.batch(0), REWARD, NAN).reshape(-1))
    (priority,) = priorities
    assert priority.isfinite().all()
    assert (priority > 0).sum() == len(priority) - 1


# Trainers ----------------------------------------------------------------------------------------


def train(problem: Problem, batches: list[TensorDict], **kwargs: Any) -> tuple[Any, list[Any]]:
    """The trainer, and the state of the problem before training and after each batch."""
    trainer, states = problem.trainer(batches, **kwargs), [problem.state()]
    trainer.register_op("post_steps", lambda: states.append(problem.state()))
    trainer.train()
    return trainer, states


class TestTrainers:
    @pytest.mark.parametrize(
        ("key", "value"),
        [(REWARD, NAN), ("observation", -INF), (NEXT_OBSERVATION, NAN)],
        ids=joined,
    )
    @pytest.mark.parametrize("kind", ["vmpo-gradient", "vmpo-solve", "ppo"])
    def test_bad_rollout_is_not_trained_on(self, kind: str, key: Any, value: float) -> None:
        problem = Problem(kind)
        bad = spoil(problem.batch(1), key, value)
        trainer, states = train(problem, [problem.batch(0), bad, problem.batch(2)])
        assert differs(states[1], states[0])
        assert_identical(states[2], states[1])
        assert differs(states[3], states[2])
        assert trainer.finite_batches.skipped_batches == 1
        assert trainer.finite_batches.skipped_updates == 0
        assert trainer.collected_frames == 60

    @pytest.mark.parametrize(("key", "value"), BAD[:-1], ids=joined)
    @pytest.mark.parametrize("n_steps", [1, 2])
    def test_bad_batch_is_not_stored(self, n_steps: int, key: Any, value: float) -> None:
        problem = Problem("mpo")
        batches = [problem.batch(seed) for seed in range(3)]
        batches[1] = spoil(batches[1], key, value)
        trainer, states = train(problem, batches, n_steps=n_steps)
        stored = trainer.replay_buffer[:]
        assert all(t.isfinite().all() for t in stored.values(True, True))
        kept = torch.cat([batch.reshape(-1) for batch in (batches[0], batches[2])])
        kept = {tuple(row) for row in kept["observation"].tolist()}
        assert {tuple(row) for row in stored["observation"].tolist()} <= kept
        assert n_steps > 1 or len(stored) == 16
        assert trainer.finite_batches.skipped_batches == 1
        assert differs(states[2], states[1])  # what is stored is trained on all the same
        assert trainer.finite_batches.skipped_updates == 0

    def test_first_batch_may_be_bad(self) -> None:
        """There is nothing to train on then."""
        problem = Problem("mpo")
        bad = spoil(problem.batch(0), REWARD, NAN)
        _, states = train(problem, [bad, problem.batch(1)])
        assert_identical(states[1], states[0])
        assert differs(states[2], states[1])

    def test_schedule_goes_on_if_the_first_rollout_is_bad(self) -> None:
        problem = Problem("ppo")
        optimizer = problem.stepper.optimizer
        bad = spoil(problem.batch(0), REWARD, NAN)
        scheduler = linear_lr_annealing(optimizer, 2)
        _, states = train(problem, [bad, problem.batch(1)], lr_scheduler=scheduler)
        assert_identical(states[1]["loss"], states[0]["loss"])
        assert optimizer.param_groups[0]["lr"] == 0.0

    @pytest.mark.parametrize("target_kl", [1e-9, 1e9])
    def test_early_stopping_sees_no_bad_rollout(self, target_kl: float) -> None:
        problem = Problem("ppo")
        bad = spoil(problem.batch(1), REWARD, NAN)
        trainer, states = train(problem, [problem.batch(0), bad], target_kl=target_kl)
        assert_identical(states[2], states[1])
        assert trainer._log_dict["epochs_run"] == [1.0 if target_kl < 1 else 2.0]

    def test_no_n_step_transition_spans_a_batch_left_out(self) -> None:
        steps = numbered_steps([(12, "open")])
        first, second, third = steps.split(4, -1)
        trainer = Problem("mpo").trainer(
            [first, spoil(second, REWARD, NAN), third], n_steps=2, warmup_frames=100
        )
        trainer.train()
        stored = trainer.replay_buffer[:]
        distance = stored["next", "observation"][:, 1] - stored["observation"][:, 1]
        assert distance.tolist() == stored["steps_to_next_obs"].tolist()

    def test_no_slice_spans_a_batch_left_out(self) -> None:
        torch.manual_seed(0)
        steps = numbered_steps([(12, "open")])
        first, second, third = steps.split(4, -1)
        trainer = Problem("mpo").trainer(
            [first, spoil(second, REWARD, NAN), third],
            replay_buffer=make_buffer(batch_size=90, slice_len=3),
            sequence_length=3,
            warmup_frames=100,
        )
        trainer.train()
        slices = trainer.memory.sample()
        assert_identical(slices["next", "observation"][:, :-1], slices["observation"][:, 1:])

    @pytest.mark.parametrize("kind", ["mpo", "vmpo-solve", "ppo"])
    def test_too_many_bad_batches_in_a_row_raise(self, kind: str) -> None:
        problem = Problem(kind)
        good = problem.batch(0)
        bad = spoil(spoil(problem.batch(1), REWARD, NAN), "observation", INF)
        only_reward = spoil(problem.batch(2), REWARD, -INF)
        trainer, _ = train(problem, [bad, good, bad, good], max_skipped=2)
        assert trainer.finite_batches.skipped_batches == 2
        message = r"2 collected batches in a row .* \(the limit is 2\)\. Entries of the last: "
        with pytest.raises(NonFiniteError, match=message + r"next/reward\.$"):
            train(problem, [good, bad, only_reward, good], max_skipped=2)
        with pytest.raises(NonFiniteError, match="observation") as error:
            train(problem, [good, only_reward, bad, good], max_skipped=2)
        assert "next/reward" in str(error.value)
        assert "next/observation" not in str(error.value)

    @pytest.mark.parametrize("kind", ["mpo", "vmpo-gradient", "ppo"])
    def test_too_many_bad_updates_in_a_row_raise(self, kind: str) -> None:
        """Numbers that are finite but too large for the loss."""
        problem = Problem(kind)
        huge = problem.batch(0)
        huge[REWARD].fill_(1e30)
        trainer = problem.trainer([huge] * 4, max_skipped=3)
        with pytest.raises(NonFiniteError, match=r"updates in a row .* the limit is 3\)\."):
            trainer.train()
        assert trainer.finite_batches.skipped_batches == 0
        assert trainer.finite_batches.skipped_updates >= 3
        assert trainer.collected_frames < 4 * huge.numel()


class TestFiniteBatches:
    def test_state(self) -> None:
        problem = Problem("mpo")
        good, bad = problem.batch(0), spoil(problem.batch(1), REWARD, NAN)
        trainer = problem.trainer([bad, good, bad, bad], max_skipped=3)
        trainer.train()
        state = save_and_load(trainer.state_dict())
        other = problem.trainer([bad], max_skipped=3, total_frames=100)
        other.load_state_dict(state)
        counts = {"skipped_frames": 0, "skipped_batches": 3, "in_a_row": 2}
        assert other.finite_batches.state_dict() == counts
        with pytest.raises(NonFiniteError, match="3 collected batches in a row"):
            other.train()

    def test_counts_of_another_stepper(self) -> None:
        """Without a stepper of this package no updates are counted."""
        assert FiniteBatches().skipped_updates == 0

    def test_integers_and_flags_are_not_looked_at(self) -> None:
        problem = Problem("mpo")
        batch = problem.batch(0)
        batch["count"] = torch.full((*batch.shape, 1), 2**40)
        trainer = problem.trainer([copy.deepcopy(batch)])
        trainer.train()
        assert trainer.finite_batches.skipped_batches == 0
