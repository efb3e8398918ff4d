from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

from minerva_torchrl.runs import Callback, CheckpointError, Run, open_checkpoint
from tests.runs.test_loggers import read_events
from tests.runs.tiny import (
    assert_same_parameters,
    assert_same_runs,
    column,
    make_resumed,
    make_run,
    read_csv,
    tiny_config,
    train,
    train_and_kill,
)


class Diary(Callback):
    """Writes down what is called, and at how many frames."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []

    def note(self, what: str, run: Run) -> None:
        self.entries.append((what, run.frames))

    def on_start(self, run: Run) -> None:
        self.note("start", run)

    def on_batch(self, run: Run, batch: TensorDictBase) -> None:
        assert batch.numel() == run.config.collector.frames_per_batch
        self.note("batch", run)

    def on_update(self, run: Run, losses: TensorDictBase) -> None:
        assert losses["loss_actor"].isfinite()
        self.note("update", run)

    def on_evaluation(self, run: Run, row: Mapping[str, float]) -> None:
        written = read_csv(run.run_dir / "eval.csv")[-1]
        assert row == {name: float(cell) for name, cell in written.items()}
        self.note("evaluation", run)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        assert open_checkpoint(path).frames == run.frames
        self.note("best" if "best" in path.name else "checkpoint", run)

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        assert (run.run_dir / "summary.json").exists()
        self.note(f"end, {summary['frames']}", run)


class Average(Callback):
    """Has a state that depends on every batch, update and evaluation."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.loss = torch.zeros(2, dtype=torch.float64)
        self.returns: list[float] = []
        self.rewards = 0.0

    def on_batch(self, run: Run, batch: TensorDictBase) -> None:
        self.rewards += batch["next", "reward"].sum().item()

    def on_update(self, run: Run, losses: TensorDictBase) -> None:
        self.loss = 0.9 * self.loss + losses["loss_actor"].double().detach()

    def on_evaluation(self, run: Run, row: Mapping[str, float]) -> None:
        self.returns.append(row["return_mean"])

    def metrics(self) -> dict[str, float]:
        values = {"average_loss": self.loss[0].item(), "total_reward": self.rewards}
        return {self.prefix + name: value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "returns": self.returns, "rewards": self.rewards}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.loss, self.returns = state_dict["loss"], list(state_dict["returns"])
        self.rewards = state_dict["rewards"]


# Calls -------------------------------------------------------------------------------------------


def test_order_of_calls(tmp_path: Path) -> None:
    first, second = Diary(), Diary()
    second.entries = first.entries
    config = tiny_config("mpo", total_frames=100, checkpoint__interval=60, eval__interval=60)
    assert config.updates_per_batch > 1
    make_run(config, tmp_path, callbacks=[first, second]).train()
    evaluated = column(tmp_path / "eval.csv", "return_mean")
    best = [mean > max(evaluated[:index], default=-np.inf) for index, mean in enumerate(evaluated)]
    expected = [("start", 0), ("checkpoint", 0), ("evaluation", 0), ("best", 0)]
    for frames in (20, 40, 60, 80, 100):
        expected.append(("batch", frames))
        if frames >= 40:  # after the warm-up
            expected += [("update", frames)] * config.updates_per_batch
        if frames in (60, 100):
            expected.append(("evaluation", frames))
            expected += [("best", frames)] if best[1 if frames == 60 else 2] else []
            expected.append(("checkpoint", frames))
    expected.append(("end, 100", 100))
    assert first.entries == [entry for entry in expected for _ in (first, second)]


def test_the_collector_has_the_new_weights_before_anything_is_saved(tmp_path: Path) -> None:
    diary = Diary()
    config = tiny_config("vmpo", total_frames=100, checkpoint__best=False)
    run = make_run(config, tmp_path, callbacks=[diary])
    collector = run.assembly.collector
    update_weights = collector.update_policy_weights_

    def noted(*args: Any, **kwargs: Any) -> None:
        update_weights(*args, **kwargs)
        diary.note("weights", run)

    collector.update_policy_weights_ = noted
    run.train()
    names = [name for name, frames in diary.entries if frames == 100]
    assert names == ["batch", "update", "weights", "evaluation", "checkpoint", "end, 100"]


def test_a_resumed_run_starts_again(tmp_path: Path) -> None:
    train_and_kill(tmp_path, "vmpo", at=150, callbacks=[Diary()])
    diary = Diary()
    make_resumed(tmp_path, callbacks=[diary]).train()
    names = [entry for entry in diary.entries if entry[0] != "best"]
    assert names == [
        *[("start", 100), ("batch", 150), ("update", 150)],
        *[("batch", 200), ("update", 200), ("evaluation", 200), ("checkpoint", 200)],
        ("end, 200", 200),
    ]


def test_a_callback_that_does_nothing_changes_nothing(tmp_path: Path) -> None:
    make_run(tiny_config("mpo"), tmp_path / "with", callbacks=[Callback()]).train()
    assert_same_parameters(tmp_path / "with", train(tmp_path / "without", "mpo").run_dir)


def test_something_else(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"callbacks must be Callback objects, got <class .*Diary"):
        make_run(tiny_config("mpo"), tmp_path, callbacks=[Diary])  # type: ignore[list-item]


# Metrics -----------------------------------------------------------------------------------------


def test_metrics_are_recorded_and_logged(tmp_path: Path) -> None:
    average = Average()
    config = tiny_config("vmpo", total_frames=100, logger__backend="tensorboard")
    make_run(config, tmp_path, callbacks=[average]).train()
    rewards = column(tmp_path / "metrics.csv", "total_reward")
    assert len(rewards) == 2
    assert rewards[1] == average.rewards
    assert column(tmp_path / "metrics.csv", "average_loss")[1] == average.loss[0].item()
    events = read_events(tmp_path)
    assert [value for _, value in events["train/total_reward"]] == pytest.approx(rewards)


@pytest.mark.parametrize("name", ["frames", "loss_actor", "updates_per_second"])
def test_names_of_other_metrics_are_taken(name: str, tmp_path: Path) -> None:
    class Clash(Callback):
        def metrics(self) -> dict[str, float]:
            return {name: 1.0}

    run = make_run(tiny_config("vmpo", total_frames=50), tmp_path, callbacks=[Clash()])
    with pytest.raises(ValueError, match=rf"metrics\(\) of Clash has '{name}', which is another"):
        run.train()


# State -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpo", "vmpo"])
def test_state_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    whole = [Average(), Average("other_")]
    make_run(tiny_config(kind), tmp_path / "whole", callbacks=whole).train()
    train_and_kill(tmp_path / "killed", kind, at=160, callbacks=[Average(), Average("other_")])
    resumed = [Average(), Average("other_")]
    make_resumed(tmp_path / "killed", callbacks=resumed).train()
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")  # the states are a part of it
    for first, second in zip(whole, resumed, strict=True):
        assert torch.equal(first.loss, second.loss)
        assert first.returns == second.returns
        assert len(first.returns) == 3
        assert first.rewards == second.rewards != 0.0


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ([Average()], [], "other callbacks: Average instead of none"),
        ([], [Diary()], "other callbacks: none instead of Diary"),
        ([Average(), Diary()], [Diary(), Average()], "Average, Diary instead of Diary, Average"),
    ],
)
def test_other_callbacks_are_refused(
    saved: list[Callback], given: list[Callback], message: str, tmp_path: Path
) -> None:
    train_and_kill(tmp_path, "vmpo", at=50, callbacks=saved)
    with pytest.raises(CheckpointError, match=message):
        make_resumed(tmp_path, callbacks=given)


def test_state_that_can_not_be_saved(tmp_path: Path) -> None:
    class Unsafe(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"array": np.zeros(2)}

    run = make_run(tiny_config("vmpo"), tmp_path, callbacks=[Unsafe()])
    with pytest.raises(TypeError, match=r"training.callbacks.*array: numpy.ndarray"):
        run.train()
    assert run.frames == 0  # at once, not hours later


# The end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["on_start", "on_batch", "on_update", "on_evaluation", "on_checkpoint", "on_end"]
)
def test_errors_end_a_run_and_close_everything(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("my own")  # not one of those that a full disk causes

    callback = Callback()
    monkeypatch.setattr(callback, method, fail)
    run = make_run(tiny_config("vmpo", total_frames=100), tmp_path, callbacks=[callback])
    with pytest.raises(OSError, match="my own"):
        run.train()
    assert run.assembly.collector.closed
    assert run.eval_env.is_closed
    if method != "on_start":  # there is no checkpoint yet
        make_resumed(tmp_path, callbacks=[Callback()], total_frames=150).train()
        assert open_checkpoint(tmp_path).frames == 150


class StopAt(Callback):
    """Stops a run when a method is called at some frames."""

    def __init__(self, method: str = "", frames: int = -1) -> None:
        def stop(run: Run, *_: Any) -> None:
            if run.frames == frames:
                run.stop("far enough")
                run.stop("another reason")

        if method:
            setattr(self, method, stop)


@pytest.mark.parametrize(
    ("method", "frames"),
    [
        *[("on_start", 0), ("on_evaluation", 0), ("on_batch", 60), ("on_update", 60)],
        *[("on_evaluation", 100), ("on_checkpoint", 100)],
    ],
)
def test_stop(method: str, frames: int, tmp_path: Path) -> None:
    stream = io.StringIO()
    config = tiny_config("mpo", logger__interval=70)
    run = make_run(config, tmp_path / "a", callbacks=[StopAt(method, frames)], stream=stream)
    summary = run.train()
    assert run.stopped_by == "far enough"
    assert summary["frames"] == frames == open_checkpoint(tmp_path / "a").frames
    assert f"stopped at {frames} frames: far enough\n" in stream.getvalue()
    make_resumed(tmp_path / "a", callbacks=[StopAt()]).train()
    make_run(config, tmp_path / "whole", callbacks=[StopAt()]).train()
    assert_same_runs(tmp_path / "a", tmp_path / "whole")


def test_a_stop_at_the_end_is_none(tmp_path: Path) -> None:
    run = make_run(tiny_config("vmpo"), tmp_path, callbacks=[StopAt("on_batch", 200)])
    assert run.train()["frames"] == 200
    assert run.stopped_by is None


def test_metrics_are_not_always_those_after_a_copy(tmp_path: Path) -> None:
    """With as many updates in a batch as between two copies to the target, which is MPO's default.

    Just after a copy the policy is its target, and no divergence says anything.
    """
    same = {"optim.updates_per_frame": 0.25, "optim.target_period": 5, "logger.interval": 20}
    train(tmp_path / "run", "mpo", **same)
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    divergences = [float(row["kl_mean"]) for row in rows if row["kl_mean"]]
    assert len(divergences) > 5
    assert min(divergences) == 0 < max(divergences)
