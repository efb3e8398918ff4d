"""The examples in processes of their own, which are killed, stopped and resumed."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.runs import load_policy, open_checkpoint
from tests.runs.tiny import (
    EXAMPLES,
    SCRIPTS,
    arguments,
    assert_same_runs,
    column,
    content,
    dotted,
    train,
)

TIMEOUT = 300
LONG = {"total_frames": 600, "checkpoint.interval": 50, "eval.interval": 200}


class Shell:
    """Starts examples in a folder, without a screen, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {name: v for name, v in os.environ.items() if name != "DISPLAY"}
        environment |= {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / script), *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, script: str, *arguments: str) -> tuple[int, str, str]:
        """The exit status, the output and the errors."""
        process = self.start(script, *arguments)
        output, errors = process.communicate(timeout=TIMEOUT)
        return process.returncode, output, errors

    def train_until(self, script: str, *arguments: str, frames: int) -> subprocess.Popen[str]:
        """Start a run, and come back when its table has so many frames."""
        process = self.start(script, *arguments)
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end and process.poll() is None:
            if frames_in(self.folder / "run") >= frames:
                return process
            time.sleep(0.01)
        raise AssertionError(f"the run ended too early: {process.communicate()}")


def frames_in(run_dir: Path) -> float:
    """Frames of the last complete row; -1 before the first."""
    try:
        return max(column(run_dir / "metrics.csv", "frames"), default=-1)
    except (FileNotFoundError, TypeError, ValueError):
        return -1


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in shell.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def settings(kind: str, **changes: Any) -> list[str]:
    return arguments({**dotted(kind, **changes), "run_dir": "run"})


def assert_clean(output: tuple[int, str, str]) -> str:
    """No error, and nothing that only a terminal would understand."""
    status, out, errors = output
    assert status == 0, errors
    assert "Traceback" not in errors
    assert not re.search(r"[\r\x1b]", out + errors)
    return errors


# Killed ------------------------------------------------------------------------------------------


def kill_and_resume(shell: Shell, kind: str, kills: int) -> None:
    """Kill a run at some moments, and compare its end with that of one that was left alone."""
    script = SCRIPTS[kind.partition("-")[0]]
    command = settings(kind, **LONG)
    moments = random.Random(kind)
    frames = 0
    for _ in range(kills):
        process = shell.train_until(script, *command, frames=frames)
        time.sleep(moments.uniform(0.0, 0.6))
        process.kill()
        process.communicate()
        assert open_checkpoint(shell.folder / "run").frames >= 0
        command = ["resume=run"]
        frames += 100
    assert_clean(shell.run(script, *command))
    whole = train(shell.folder / "whole", kind, **LONG)
    assert_same_runs(shell.folder / "run", whole.run_dir)


@pytest.mark.slow
def test_killed_at_any_moment(shell: Shell) -> None:
    kill_and_resume(shell, "mpo", kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mpo", "mpo-retrace", "vmpo", "ppo"])
def test_killed_several_times(kind: str, shell: Shell) -> None:
    kill_and_resume(shell, kind, kills=5)


# Stopped -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("algo", list(SCRIPTS))
def test_stopped(algo: str, number: signal.Signals, shell: Shell) -> None:
    process = shell.train_until(SCRIPTS[algo], *settings(algo, **LONG), frames=50)
    process.send_signal(number)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert_clean((process.returncode, output, errors))
    assert f"{number.name}: finishing this batch and saving." in errors
    assert open_checkpoint(shell.folder / "run").frames < 600
    # What it says is what works.
    python, script, *rest = shlex.split(errors.splitlines()[-1])
    assert python == "python"
    assert rest == ["resume=run"]
    assert_clean(shell.run(script, *rest))
    whole = train(shell.folder / "whole", algo, **LONG)
    assert_same_runs(shell.folder / "run", whole.run_dir)


@pytest.mark.slow
def test_stopped_at_once(shell: Shell) -> None:
    # Batches long enough for a second signal before the first one is heeded.
    long = {**LONG, "total_frames": 100_000, "collector.frames_per_batch": 5000}
    command = settings("vmpo", **long, **{"optim.num_policy_steps": 500})
    process = shell.start("vmpo_dmc.py", *command)
    end = time.monotonic() + TIMEOUT
    while not (shell.folder / "run" / "checkpoints" / "last").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert open_checkpoint(shell.folder / "run").frames == 0
    assert load_policy(shell.folder / "run").actor is not None


# From beginning to end ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algo", list(SCRIPTS))
def test_trains_and_evaluates(algo: str, shell: Shell) -> None:
    errors = assert_clean(shell.run(SCRIPTS[algo], *settings(algo)))
    assert f"{algo} gym:Pendulum-v1: 200 frames in" in errors
    status, output, errors = shell.run("evaluate.py", "run", "--episodes", "2")
    assert (status, errors) == (0, "")
    mean = column(shell.folder / "run" / "eval.csv", "return_mean")[-1]
    assert f"return {mean:.2f} ± " in output


@pytest.mark.slow
def test_help_sweeps_and_errors(shell: Shell) -> None:
    status, output, _ = shell.run("mpo_dmc.py", "--help")
    assert status == 0
    assert "total_frames: 100000" in output
    status, output, errors = shell.run("mpo_dmc.py", "sead=1")
    assert (status, output) == (2, "")
    assert errors.startswith("error: there is no setting 'sead'. Did you mean seed?")
    assert content(shell.folder) == {}
    command = arguments(dotted("mpo", total_frames=40))
    assert_clean(shell.run("mpo_dmc.py", "--multirun", "seed=0,1", "run_dir='x_${seed}'", *command))
    assert {path.name for path in shell.folder.glob("x_*")} == {"x_0", "x_1"}


@pytest.mark.slow
def test_a_folder_in_use(shell: Shell) -> None:
    command = settings("mpo", **{**LONG, "total_frames": 100_000})
    process = shell.train_until("mpo_dmc.py", *command, frames=20)
    for wrong, message in (
        (command, "is not empty"),
        (["resume=run"], f"is in use by process {process.pid}"),
    ):
        status, _, errors = shell.run("mpo_dmc.py", *wrong)
        assert status == 2
        assert message in errors
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    open_checkpoint(shell.folder / "run")
