"""PPOOptimizationStepper: its minibatches, its early stop, what it reports, several processes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers._distributed import _DDPProcessGroup
from torchrl.trainers._execution import _Learner

from minerva_torchrl.modules import DirectClipPPOLoss
from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss, ppo_kl_k3
from minerva_torchrl.trainers import KLEarlyStop, PPOOptimizationStepper, make_ppo_trainer
from minerva_torchrl.trainers import ppo as trainers_ppo
from tests.objectives.ppo_problem import (
    LEARNING_RATE,
    make_actor,
    make_critic,
    make_networks,
    make_rollout,
    total_loss,
)
from tests.trainers.problem import FakeCollector, Problem, assert_identical, differs

NAN = math.nan
MASK = ("collector", "mask")


class Recorder:
    """The part of a Trainer that the stepper needs; notes minibatches, methods and losses."""

    def __init__(self, loss: ClipPPOLoss) -> None:
        self.loss_module = loss
        self.minibatches: list[TensorDict] = []
        self.methods: list[str | None] = []
        self.outputs: list[Any] = []

    def compute_loss(self, minibatch: TensorDict, method: str | None = None) -> Any:
        output = (self.loss_module if method is None else self.loss_module.losses)(minibatch)
        self.minibatches.append(minibatch)
        self.methods.append(method)
        self.outputs.append({name: value.detach() for name, value in output.items()})
        return output


def make_loss(loss_class: type[ClipPPOLoss] = DirectClipPPOLoss, **kwargs: Any) -> ClipPPOLoss:
    policy, critic = make_networks()
    return make_ppo_loss(make_actor(policy), make_critic(critic), loss_class=loss_class, **kwargs)


def make_stepper(loss: ClipPPOLoss, **kwargs: Any) -> PPOOptimizationStepper:
    adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
    return PPOOptimizationStepper(adam, **{"num_epochs": 6, "minibatch_size": 16} | kwargs)


def make_data(loss: ClipPPOLoss, seed: int = 1) -> TensorDict:
    """A rollout ``[4, 16]`` with its advantages."""
    return estimate_advantage(loss, make_rollout(loss.actor_network, seed=seed))


def record(**kwargs: Any) -> tuple[Recorder, TensorDict, TensorDict]:
    """What a stepper asks for on one rollout, the rollout, and the metrics."""
    loss = make_loss()
    rollout, recorder = make_data(loss), Recorder(loss)
    metrics = make_stepper(loss, **kwargs).step(recorder, rollout)
    return recorder, rollout, metrics


def rows_of(frames: TensorDict) -> list[tuple[float, ...]]:
    """Each frame as a tuple of all its numbers."""
    keys = sorted(frames.keys(True, True), key=str)
    flat = [frames[key].reshape(frames.numel(), -1).double() for key in keys]
    return [tuple(row) for row in torch.cat(flat, -1).tolist()]


# Minibatches -------------------------------------------------------------------------------------


class TestMinibatches:
    def test_every_frame_once_per_epoch_in_a_new_order(self) -> None:
        """Whole frames: what belongs together stays together."""
        recorder, rollout, _ = record(num_epochs=3)
        assert [minibatch.shape for minibatch in recorder.minibatches] == [(16,)] * 12
        rows = [rows_of(minibatch) for minibatch in recorder.minibatches]
        epochs = [list(chain(*rows[i : i + 4])) for i in (0, 4, 8)]
        frames = Counter(rows_of(rollout.select(*recorder.minibatches[0].keys(True, True))))
        assert all(Counter(epoch) == frames for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    def test_copied_once_per_epoch(self) -> None:
        recorder, _, _ = record(num_epochs=2)
        memory = [m["observation"].untyped_storage().data_ptr() for m in recorder.minibatches]
        assert memory == [memory[0]] * 4 + [memory[4]] * 4

    def test_only_what_the_loss_needs(self) -> None:
        loss = make_loss()
        rollout, recorder = make_data(loss), Recorder(loss)
        rollout[MASK] = torch.ones(4, 16, dtype=torch.bool)
        rollout["step_count"] = torch.zeros(4, 16, 1)
        make_stepper(loss).step(recorder, rollout)
        needed = {"observation", "action", "action_log_prob"}
        needed |= {"advantage", "value_target", "state_value", MASK}
        assert set(recorder.minibatches[0].keys(True, True)) == needed
        assert "step_count" in rollout.keys()

    def test_all_epochs_have_the_same_targets(self) -> None:
        recorder, _, _ = record(num_epochs=3, minibatch_size=64)
        targets = [
            m.select("advantage", "value_target", "state_value") for m in recorder.minibatches
        ]
        assert len(targets) == 3
        assert all(sorted(rows_of(target)) == sorted(rows_of(targets[0])) for target in targets)

    def test_rejects(self) -> None:
        loss = make_loss()
        rollout = make_data(loss)
        message = "rollout must have a multiple of minibatch_size=15 frames, got 64"
        with pytest.raises(ValueError, match=message):
            make_stepper(loss, minibatch_size=15).update(loss, rollout)
        message = r"rollout must have its advantages in 'advantage'\. .* estimate_advantage"
        with pytest.raises(ValueError, match=message):
            make_stepper(loss).update(loss, rollout.exclude("advantage"))
        unreduced = make_loss(reduction="none")
        with pytest.raises(ValueError, match="needs a loss with reduction 'mean' or 'sum'"):
            make_stepper(unreduced).update(unreduced, rollout)

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("num_epochs", 0, ValueError, "num_epochs must be at least 1, got 0"),
            ("minibatch_size", 0, ValueError, "minibatch_size must be at least 1, got 0"),
            ("minibatch_size", 1.5, TypeError, "minibatch_size must be an integer"),
            ("target_kl", NAN, ValueError, "target_kl must be a number or None, got nan"),
            ("clip", -1.0, ValueError, "clip must be positive"),
        ],
    )
    def test_rejects_settings(
        self, name: str, value: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            make_stepper(make_loss(), **{name: value})


# The same as a loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("target_kl", [None, 0.02])
@pytest.mark.parametrize("loss_class", [ClipPPOLoss, DirectClipPPOLoss])
def test_same_as_a_loop_by_hand(loss_class: type[ClipPPOLoss], target_kl: float | None) -> None:
    """Bit for bit, through ``update`` and through ``step``, with the same random numbers."""
    loss = make_loss(loss_class)
    rollouts = [make_data(loss, seed) for seed in (1, 2)]
    optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
    early_stop, epochs = KLEarlyStop(target_kl), []
    torch.manual_seed(5)
    for rollout in rollouts:
        data = rollout.reshape(-1)
        early_stop.start_rollout()
        for order in [torch.randperm(64) for _ in range(6)]:
            for rows in order.split(16):
                losses = loss(data[rows])
                early_stop.observe(losses)
                optimizer.zero_grad()
                total_loss(losses).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
            if early_stop.epoch_done():
                break
        epochs.append(early_stop.epochs_run)
    assert 1 < epochs[0] < 6 if target_kl else epochs == [6, 6]
    state, random_state = loss.state_dict(), torch.get_rng_state()

    for through_step in (False, True):
        again = make_loss(loss_class)
        stepper = make_stepper(again, target_kl=target_kl)
        torch.manual_seed(5)
        for rollout, count in zip(rollouts, epochs, strict=True):
            if through_step:
                metrics = stepper.step(Recorder(again), rollout)
            else:
                metrics = stepper.update(again, rollout)
            assert metrics["epochs_run"] == count
        assert_identical(dict(again.state_dict()), dict(state))
        assert torch.equal(torch.get_rng_state(), random_state)


# Early stop --------------------------------------------------------------------------------------


class TestEarlyStop:
    def test_estimate_that_is_not_a_number_stops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for value, epochs in ((NAN, 1), (0.0, 6)):
            monkeypatch.setattr(trainers_ppo, "ppo_kl_k3", lambda _, v=value: torch.tensor(v))
            _, _, metrics = record(target_kl=0.02)
            assert metrics["epochs_run"] == epochs

    def test_last_minibatch_decides(self) -> None:
        recorder, _, metrics = record(target_kl=0.02)
        epochs = int(metrics["epochs_run"])
        assert 1 < epochs < 6
        estimates = [ppo_kl_k3(output).item() for output in recorder.outputs]
        assert [kl > 0.02 for kl in estimates[3::4]] == [False] * (epochs - 1) + [True]
        assert any(kl > 0.02 for kl in estimates[: 4 * (epochs - 1)])  # another one would have
        assert metrics["kl_k3"] == estimates[-1]

    @pytest.mark.parametrize(("target_kl", "reads"), [(None, 0), (0.02, None)])
    def test_reads_one_number_per_epoch(
        self, target_kl: float | None, reads: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[str] = []
        for name in ("__float__", "__bool__", "item", "tolist"):
            method = getattr(Tensor, name)

            def counted(self: Tensor, name: str = name, method: Any = method) -> Any:
                read.append(name)
                return method(self)

            monkeypatch.setattr(Tensor, name, counted)
        monkeypatch.setattr(DirectClipPPOLoss, "_entropy_is_ignored", lambda _: True)
        loss = make_loss()
        rollout, stepper = make_data(loss), make_stepper(loss, target_kl=target_kl)
        read.clear()
        metrics = stepper.update(loss, rollout)
        counted_reads = list(read)
        expected = int(metrics["epochs_run"]) if reads is None else reads
        assert counted_reads == ["__float__"] * expected

    @pytest.mark.parametrize("target_kl", [0.0, -1.0])
    def test_no_target(self, target_kl: float) -> None:
        assert record(target_kl=target_kl)[2]["epochs_run"] == 6


# Metrics -----------------------------------------------------------------------------------------


class TestMetrics:
    @pytest.mark.parametrize("target_kl", [None, 0.02])
    def test_means_over_the_last_epoch_that_ran(self, target_kl: float | None) -> None:
        recorder, _, metrics = record(target_kl=target_kl)
        last = recorder.outputs[-4:]
        assert {"loss_critic", "loss_entropy", "ESS", "clip_fraction", "entropy"} <= set(last[0])
        assert set(metrics.keys()) == {
            *last[0],
            "kl_k3",
            "epochs_run",
            "rollout_explained_variance",
        }
        for name in last[0]:
            mean = sum(output[name] for output in last) / 4
            torch.testing.assert_close(metrics[name], mean.reshape(()))
        assert all(value.shape == () and not value.requires_grad for value in metrics.values())

    def test_of_the_rollout(self) -> None:
        """Both estimates of the divergence without a target, and the values that it began with."""
        _, rollout, metrics = record()
        target, value = rollout["value_target"], rollout["state_value"]
        expected = 1 - (target - value).var(correction=0) / target.var(correction=0)
        torch.testing.assert_close(metrics["rollout_explained_variance"], expected)
        assert {"kl_approx", "kl_k3"} <= set(metrics.keys())

    def test_not_computed_where_nobody_sees_them(self) -> None:
        recorder, _, _ = record(num_epochs=3)
        assert recorder.methods == ["losses"] * 8 + [None] * 4
        recorder, _, _ = record(num_epochs=3, target_kl=1e9)  # any epoch might be the last
        assert recorder.methods == [None] * 12

    def test_logged_by_a_trainer(self) -> None:
        problem = Problem("ppo")
        trainer = problem.trainer([problem.batch(0)], num_epochs=3)
        trainer.train()
        assert trainer._log_dict["epochs_run"] == [3.0]
        assert {"kl_k3", "loss_critic", "ESS"} <= set(trainer._log_dict)


def test_only_the_minibatch_that_is_not_finite_is_left_out() -> None:
    loss = make_loss()
    rollout, stepper, before = make_data(loss), make_stepper(loss, num_epochs=3), loss.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    rollout["advantage"][0, 0] = NAN
    stepper.update(loss, rollout)
    assert stepper.skipped_updates == 3  # one in every epoch
    state = loss.state_dict()
    assert all(value.isfinite().all() for value in state.values())
    assert differs(dict(state), before)


# Settings that were the trainer's ----------------------------------------------------------------


class TestMovedSettings:
    def make(self, stepper: PPOOptimizationStepper, loss: ClipPPOLoss, **moved: Any) -> Any:
        return make_ppo_trainer(
            collector=FakeCollector([]),
            total_frames=64,
            frames_per_batch=64,
            loss_module=loss,
            optimization_stepper=stepper,
            progress_bar=False,
            **moved,
        )

    def test_reach_the_stepper_with_a_warning(self) -> None:
        loss = make_loss()
        stepper = make_stepper(loss)
        with pytest.warns(DeprecationWarning, match="num_epochs, target_kl of make_ppo_trainer"):
            trainer = self.make(stepper, loss, num_epochs=3, target_kl=0.1)
        assert (stepper.num_epochs, stepper.minibatch_size, stepper.target_kl) == (3, 16, 0.1)
        assert trainer.num_epochs == 1

    @pytest.mark.filterwarnings("ignore:minibatch_size of make_ppo_trainer:DeprecationWarning")
    @pytest.mark.parametrize(("value", "message"), [(0, "at least 1, got 0"), (15, "a multiple")])
    def test_are_checked(self, value: int, message: str) -> None:
        loss = make_loss()
        with pytest.raises(ValueError, match=message):
            self.make(make_stepper(loss), loss, minibatch_size=value)


# Several processes -------------------------------------------------------------------------------

TARGET_KL = 0.0125


def make_case(case: str, rows: slice) -> tuple[Any, PPOOptimizationStepper, TensorDict]:
    """Full-batch epochs on some rows of a rollout, so that the order of frames does not matter."""
    loss = make_loss(normalize_advantage=False)
    rollout = make_data(loss)
    if case == "not finite":  # the square of the error is, its gradient is finite
        rollout["value_target"][3, 0] = 1.4e154
    if case == "stops":  # half of the frames are from another policy
        rollout["action_log_prob"][2:] += 0.2
    target_kl = TARGET_KL if case == "stops" else None
    rollout = rollout[rows]
    settings = {"minibatch_size": rollout.numel(), "target_kl": target_kl}
    return loss, make_stepper(loss, **settings), rollout


def result_of(loss: Any, stepper: PPOOptimizationStepper, metrics: TensorDict) -> dict[str, Any]:
    parameters = {name: p.detach().clone() for name, p in loss.named_parameters()}
    counts = {"skipped": stepper.skipped_updates, "epochs": int(metrics["epochs_run"])}
    return {"parameters": parameters, **counts}


def run_process(rank: int, folder: str) -> None:
    """Every case on TorchRL's own learner with half of the rows; its results in a file."""
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    group = _DDPProcessGroup.create(rank=rank, local_rank=0, world_size=2, store=store)
    results: dict[str, Any] = {}
    estimates: list[float] = []

    def noted(losses: Any) -> Tensor:
        kl = ppo_kl_k3(losses)
        estimates.append(kl.item())
        return kl

    trainers_ppo.ppo_kl_k3 = noted
    for case in ("plain", "stops", "not finite"):
        loss, stepper, rollout = make_case(case, slice(2 * rank, 2 * rank + 2))
        learner = _Learner(
            loss_module=loss,
            replay_buffer=SimpleNamespace(sample=lambda _, rollout=rollout: rollout),
            local_batch_size=rollout.numel(),
            optimizer=None,
            optimization_stepper=stepper,
            target_net_updater=None,
            process_group=group,
        ).initialize()
        estimates.clear()
        torch.manual_seed(rank)  # the processes shuffle differently
        results[case] = result_of(loss, stepper, learner.step(1, 1).metrics)
        results[case]["estimates"] = list(estimates)
    torch.save(results, f"{folder}/{rank}.pt")
    group.close()


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    """They stop together, and leave out the same updates, though they see different frames."""
    torch.multiprocessing.spawn(run_process, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for case in ("plain", "stops", "not finite"):
        loss, stepper, rollout = make_case(case, slice(None))
        alone = result_of(loss, stepper, stepper.update(loss, rollout))
        for process in (first[case], second[case]):
            assert (process["skipped"], process["epochs"]) == (alone["skipped"], alone["epochs"])
            for name, parameter in alone["parameters"].items():
                actual = process["parameters"][name]
                torch.testing.assert_close(actual, parameter, rtol=1e-9, atol=1e-12)
        assert_identical(first[case]["parameters"], second[case]["parameters"])
    assert [first[case]["skipped"] for case in ("plain", "not finite")] == [0, 6]
    assert 1 < first["stops"]["epochs"] < 6
    # One of them alone would have stopped at once.
    assert first["stops"]["estimates"][0] < TARGET_KL < second["stops"]["estimates"][0]
