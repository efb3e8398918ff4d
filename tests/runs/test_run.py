from __future__ import annotations

import errno
import io
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from minerva_torchrl.envs import EnvironmentFailure
from minerva_torchrl.runs import CheckpointStore, ConfigError, Run, load_config, open_checkpoint
from minerva_torchrl.runs.cli import _last_lines
from minerva_torchrl.runs.csv_table import CsvTable
from minerva_torchrl.runs.folder import RunFolder
from tests.runs.tiny import (
    SETTINGS,
    after_records,
    assert_same_runs,
    assert_same_value,
    before_records,
    column,
    content,
    make_run,
    read_csv,
    resume,
    tiny_config,
    train,
)

SUMMARY = [
    "algo",
    "env",
    "seed",
    "frames",
    "final_return",
    "best_return",
    "skipped_frames",
    "wall_seconds",
    "frames_per_second",
    "updates_per_second",
]


KINDS = ["mpo", "mpo-retrace-envs", "suite", "vmpo", "vmpo-discrete", "ppo", "ppo-discrete"]
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in SETTINGS if kind not in KINDS]


@pytest.fixture(scope="module", params=[*KINDS, *OTHERS])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of each kind, whose end is at no multiple of any interval."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / request.param
    run = Run(tiny_config(request.param, total_frames=230), folder, stream=io.StringIO())
    run.train()
    return run


def parameters(run: Run) -> dict[str, torch.Tensor]:
    return open_checkpoint(run.run_dir).load("model")["loss"]


# What a run leaves -------------------------------------------------------------------------------


def test_files(finished: Run) -> None:
    names = {path.name for path in finished.run_dir.iterdir()} - {".lock"}
    assert names == {
        "checkpoints",
        "config.yaml",
        "curve.png",
        "eval.csv",
        "metrics.csv",
        "summary.json",
    }
    assert (finished.run_dir / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_frames_are_rounded_up_to_whole_batches(finished: Run) -> None:
    batch = finished.config.collector.frames_per_batch * finished.config.env.frame_skip
    assert finished.frames == math.ceil(230 / batch) * batch


def test_evaluations(finished: Run) -> None:
    file = finished.run_dir / "eval.csv"
    header = file.read_text().splitlines()[0]
    assert header == "frames,return_mean,return_std,return_min,return_max,length_mean"
    rows = read_csv(file)
    # At the start, with the first batch that reaches a multiple of the interval, and at the end.
    batch = finished.config.collector.frames_per_batch * finished.config.env.frame_skip
    expected = [0, *(math.ceil(due / batch) * batch for due in (100, 200)), finished.frames]
    assert [int(row["frames"]) for row in rows] == list(dict.fromkeys(expected))
    for row in rows:
        low, mean, high = (float(row[f"return_{name}"]) for name in ("min", "mean", "max"))
        assert low <= mean <= high
        # Two episodes: their mean and deviation follow from the extremes.
        assert mean == pytest.approx((low + high) / 2)
        assert float(row["return_std"]) == pytest.approx((high - low) / 2, abs=1e-6)
        assert 0 < float(row["length_mean"]) <= 15


def test_metrics(finished: Run) -> None:
    file = finished.run_dir / "metrics.csv"
    rows = read_csv(file)
    assert list(rows[0])[:2] == ["frames", "updates"]
    frames = column(file, "frames")
    assert frames == sorted(set(frames))
    assert frames[-1] == finished.frames
    assert column(file, "updates")[-1] == finished.assembly.trainer._optim_count > 0
    last = rows[-1]
    assert any(name.startswith("loss_") and last[name] for name in last)
    assert last["skipped_batches"] == last["skipped_updates"] == "0"
    assert float(last["frames_per_second"]) > 0
    lengths = [float(row["episode_length"]) for row in rows if row["episode_length"]]
    assert lengths
    assert max(lengths) <= 15


def test_summary(finished: Run) -> None:
    summary = json.loads((finished.run_dir / "summary.json").read_text())
    assert list(summary) == SUMMARY
    returns = column(finished.run_dir / "eval.csv", "return_mean")
    assert summary["algo"] == finished.config.algo
    assert summary["env"] == finished.config.env.name
    assert summary["seed"] == 0
    assert summary["frames"] == finished.frames
    assert summary["final_return"] == returns[-1]
    assert summary["best_return"] == max(returns)
    assert summary["frames_per_second"] > 0
    assert summary["updates_per_second"] > 0


def test_settings_load_back(finished: Run) -> None:
    expected = replace(finished.config, run_dir=str(finished.run_dir))
    assert load_config(finished.run_dir) == expected


def test_checkpoints(finished: Run) -> None:
    last, best = (
        open_checkpoint(finished.run_dir / "checkpoints" / name) for name in ("last", "best")
    )
    rows = read_csv(finished.run_dir / "eval.csv")
    assert last.frames == finished.frames
    assert best.frames == int(max(rows, key=lambda row: float(row["return_mean"]))["frames"])
    replay = {"replay"} if finished.config.algo == "mpo" else set()
    assert set(last.parts) == {"model", "training", "environment"} | replay
    assert set(best.parts) == {"model", "training", "environment"}
    state = last.load("model")["loss"]
    trained = finished.assembly.loss.state_dict()
    assert_same_value(state, {name: tensor.detach() for name, tensor in trained.items()})
    folders = [p for p in (finished.run_dir / "checkpoints").iterdir() if not p.is_symlink()]
    assert len(folders) == 2


def test_older_checkpoints_are_kept_if_asked_for(tmp_path: Path) -> None:
    train(tmp_path, "vmpo", checkpoint__keep=2, checkpoint__best=False)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"frames-000000100", "frames-000000200", "last"}


# Seeds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpo-retrace-envs", "vmpo", "ppo-discrete"])
def test_seed(kind: str, tmp_path: Path) -> None:
    first, again, other = (
        train(tmp_path / name, kind, total_frames=100, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert_same_runs(first.run_dir, again.run_dir)
    assert (first.run_dir / "eval.csv").read_text() != (other.run_dir / "eval.csv").read_text()
    states = zip(parameters(first).values(), parameters(other).values(), strict=True)
    assert any(not torch.equal(one, two) for one, two in states)


def test_evaluations_begin_the_same_way_every_time(tmp_path: Path) -> None:
    # A policy that does not learn has the same return at every evaluation.
    train(tmp_path, "mpo", replay_buffer__warmup_frames=200)
    first, second, last = column(tmp_path / "eval.csv", "return_mean")
    assert first == second != last


# Folders -----------------------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=f"run_dir {tmp_path} is not empty.* resume={tmp_path}"):
        make_run(tiny_config("mpo"), tmp_path)
    assert content(tmp_path) == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"run_dir .*file"):
        make_run(tiny_config("mpo"), file)
    with pytest.raises(ConfigError, match=r"run_dir .*file"):
        make_run(tiny_config("mpo"), file / "run").train()
    assert file.read_text() == "mine"


def test_two_runs_that_begin_together_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = (
        make_run(tiny_config("vmpo", seed=seed, total_frames=50), tmp_path) for seed in (0, 1)
    )
    first.train()
    before = content(tmp_path)
    with pytest.raises(ConfigError, match=r"is not empty|is in use"):
        second.train()
    assert content(tmp_path) == before


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    first = make_run(tiny_config("vmpo", total_frames=100), tmp_path)
    attempts: list[str] = []

    def attempt() -> None:
        before = content(tmp_path)
        with pytest.raises(ConfigError, match="is in use by process") as caught:
            resume(tmp_path, total_frames=150)
        attempts.append(str(caught.value))
        assert content(tmp_path) == before

    after_records(first, attempt)
    first.train()
    assert len(attempts) == 2
    resume(tmp_path, total_frames=150)  # free again


# What can't be written ---------------------------------------------------------------------------


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = CheckpointStore.save

    def save_if_there_is_room(self: CheckpointStore, *args: Any, **kwargs: Any) -> Path:
        if kwargs["frames"] > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "save", save_if_there_is_room)
    stream = io.StringIO()
    run = make_run(tiny_config("vmpo"), tmp_path, stream=stream)
    summary = run.train()
    assert summary["frames"] == 200
    assert run.saved_frames == 100
    warning = "warning: could not write a checkpoint (the one before is kept): [Errno 28] No space"
    assert warning in stream.getvalue()
    assert open_checkpoint(tmp_path).frames == 100
    monkeypatch.undo()
    resume(tmp_path)
    assert open_checkpoint(tmp_path).frames == 200
    assert_same_runs(tmp_path, train(tmp_path.parent / "whole", "vmpo").run_dir)


def test_tables_and_pictures_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CsvTable, "append", fail)
    monkeypatch.setattr("minerva_torchrl.runs.folder.draw_curve", fail)
    monkeypatch.setattr(RunFolder, "write_summary", fail)
    stream = io.StringIO()
    run = Run(tiny_config("vmpo"), tmp_path, stream=stream)
    summary = run.train()
    for name in ("eval.csv", "metrics.csv", "curve.png", "summary.json"):
        assert f"warning: could not write {name}: [Errno 28]" in stream.getvalue()
    assert open_checkpoint(tmp_path).frames == 200
    assert summary["final_return"] is None
    assert _last_lines(run, summary)  # no evaluation to tell of, but the rest


# Stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number: signal.Signals, tmp_path: Path) -> None:
    stream = io.StringIO()
    run = make_run(tiny_config("mpo", total_frames=100), tmp_path / "stopped", stream=stream)
    handler = signal.getsignal(number)
    e_step = run.assembly.loss.e_step
    calls: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(run.frames)
        if len(calls) == 3:
            signal.raise_signal(number)
        return e_step(*args, **kwargs)

    run.assembly.loss.e_step = interrupted
    summary = run.train()
    assert signal.getsignal(number) is handler
    assert run.stopped_by == number.name
    assert summary["frames"] == calls[2] == open_checkpoint(run.run_dir).frames == 60
    assert f"{number.name}: finishing this batch and saving." in stream.getvalue()
    assert f"resume={run.run_dir}" in run.resume_command()
    resume(run.run_dir)
    assert_same_runs(run.run_dir, train(tmp_path / "whole", "mpo", total_frames=100).run_dir)


def test_a_signal_after_the_batch_was_saved_waits_for_the_next(tmp_path: Path) -> None:
    run = make_run(tiny_config("mpo"), tmp_path)
    after_records(run, lambda: signal.raise_signal(signal.SIGTERM) if run.frames == 60 else None)
    assert run.train()["frames"] == run.saved_frames == open_checkpoint(tmp_path).frames == 80


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    run = make_run(tiny_config("vmpo"), tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        if run.frames == 150:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)  # does not add anything
            signal.raise_signal(signal.SIGINT)

    before_records(run, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert signal.getsignal(signal.SIGINT) is before
    assert open_checkpoint(tmp_path).frames == 100
    resume(tmp_path)  # the folder is free


# Numbers that are not finite ---------------------------------------------------------------------


class Breaks(gymnasium.Env):
    """Its rewards are not numbers after 70 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, (1,))
    steps = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        reward = float(action[0]) if self.steps <= 70 else math.nan
        return self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32), reward, False, False, {}


@pytest.fixture
def breaks() -> Iterator[str]:
    gymnasium.register("Breaks-v0", Breaks)
    yield "gym:Breaks-v0"
    del gymnasium.registry["Breaks-v0"]


@pytest.mark.parametrize("kind", ["mpo", "ppo"])
def test_rewards_that_are_not_numbers_end_a_run(kind: str, breaks: str, tmp_path: Path) -> None:
    changes = {"env.name": breaks, "env.num_envs": 1, "max_skipped": 3, "checkpoint.interval": 50}
    batch = tiny_config(kind).collector.frames_per_batch
    run = make_run(tiny_config(kind, **changes, total_frames=1000), tmp_path)
    with pytest.raises(EnvironmentFailure, match=r"Breaks-v0 gave numbers .* 3 times in a row"):
        run.train()
    assert run.assembly.trainer.finite_batches.skipped_batches == 0
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.frames >= 70 // batch * batch
    assert all(tensor.isfinite().all() for tensor in checkpoint.load("model")["loss"].values())


def test_some_rewards_that_are_not_numbers_are_left_out(breaks: str, tmp_path: Path) -> None:
    # No whole episode can be evaluated later on.
    run = train(tmp_path, "mpo", env__name=breaks, max_skipped=1000, env__max_episode_steps=20)
    skipped = run.assembly.trainer.finite_batches
    assert skipped.skipped_frames == 130
    assert skipped.skipped_batches == 6  # in which there was nothing else
    assert all(tensor.isfinite().all() for tensor in parameters(run).values())
    replay = open_checkpoint(tmp_path).load("replay")["data"]["entries"]
    assert replay["next"]["reward"].isfinite().all()
