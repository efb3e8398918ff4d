"""Runs that are killed, and go on as if they had not been.

A run is killed with SIGKILL, by itself at a chosen file operation or step of an evaluation, or from
outside at some moment. Then it is resumed, or started again if it had not begun, to its end. All
that it leaves must be the same, bit for bit, as what a run leaves that was left alone.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from minerva_torchrl.runs import CheckpointError, open_checkpoint
from minerva_torchrl.runs import loop as loop_module
from tests.campaign import trained
from tests.campaign.case import Case
from tests.campaign.trained import in_child
from tests.runs.tiny import read_csv

GROUP = "kill -9"

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    # Rows of metrics and checkpoints do not coincide, and the buffer of 120 steps goes round.
    "mpo": ("mpo", {"checkpoint__interval": 60, "logger__interval": 100}),
    "sequences": ("mpo-retrace-envs", {"checkpoint__interval": 60, "logger__interval": 80}),
    "suite": ("suite", {"checkpoint__interval": 80, "logger__interval": 120}),
    "vmpo": ("vmpo", {"checkpoint__interval": 100, "logger__interval": 150}),
    "ppo": ("ppo", {"checkpoint__interval": 100, "logger__interval": 150}),
    "discrete": ("ppo-discrete", {"checkpoint__interval": 50, "logger__interval": 100}),
    "keep": ("mpo", {"checkpoint__interval": 40, "checkpoint__keep": 3, "logger__interval": 60}),
    "workers": ("vmpo", {"env__num_workers": 2, "checkpoint__interval": 100}),
}
OPERATIONS = {
    "open",
    "os.rename",
    "os.mkdir",
    "os.symlink",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "os.truncate",
    "shutil.rmtree",
}


def settings(name: str) -> tuple[str, dict[str, Any]]:
    kind, changes = RUNS[name]
    return kind, {"total_frames": 300, "eval__interval": 100, **changes}


def reference(name: str) -> Path:
    kind, changes = settings(name)
    return trained.trained(kind, **changes)


def begin_or_go_on(folder: Path, name: str) -> None:
    """What a user would do: resume, and if there is nothing yet, start again."""
    if not (folder / "config.yaml").exists():
        kind, changes = settings(name)
        trained.train(folder, kind, **changes)
    else:
        trained.resume(folder)


# Ways to be killed -------------------------------------------------------------------------------


def is_operation(event: str, arguments: tuple[Any, ...], folder: Path) -> bool:
    """Whether an audit event is an operation on a file in a folder, or on the folder itself."""
    return event in OPERATIONS and f"{arguments[0]}/".startswith(f"{folder}/")


def kill_at_operation(folder: Path, number: int) -> None:
    """Have this process killed just before its n-th file operation in a folder."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if is_operation(event, arguments, folder):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def count_operations(name: str, until: Callable[[Path], bool]) -> int:
    """File operations of a run until a condition is true."""
    folder = trained.shared_folder() / f"count-{name}-{random.randrange(2**60)}"
    report = folder.with_suffix(".txt")

    def count() -> None:
        number = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal number
            if is_operation(event, arguments, folder):
                number += 1
                if until(folder):
                    descriptor = os.open(report, os.O_WRONLY | os.O_CREAT)
                    os.write(descriptor, str(number).encode())
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        begin_or_go_on(folder, name)

    in_child(count)
    return int(report.read_text())


def kill_in_evaluation(number: int) -> None:
    """Have this process killed at the n-th step of its evaluations."""
    count = 0
    evaluate = loop_module.evaluate

    def step() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args: Any, **kwargs: Any) -> Any:
        return evaluate(*args, **{**kwargs, "on_step": step})

    mock.patch.object(loop_module, "evaluate", counted).start()


def kill_after(folder: Path, name: str, seconds: float) -> bool:
    """Kill a run from outside; whether it was still there."""
    process = os.fork()
    if process == 0:
        try:
            begin_or_go_on(folder, name)
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


# What is left ------------------------------------------------------------------------------------


def difference(first: Any, second: Any, path: str) -> str | None:
    """Where two values are not the same, bit for bit."""
    if type(first) is not type(second):
        return path
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        same = same and first.numpy().tobytes() == second.numpy().tobytes()
        return None if same else path
    if isinstance(first, dict):
        if list(first) != list(second):
            return path
        pairs: Any = [(name, first[name], second[name]) for name in first]
    elif isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return path
        pairs = zip(range(len(first)), first, second, strict=True)
    else:
        return None if first == second or (first != first and second != second) else path
    found = (difference(one, other, f"{path}.{name}") for name, one, other in pairs)
    return next(filter(None, found), None)


def compare(run: Path, whole: Path) -> str | None:
    """What is not the same in a run and in one that was left alone."""
    for name in ("last", "best"):
        one, other = (open_checkpoint(folder, name) for folder in (run, whole))
        if (one.frames, one.parts) != (other.frames, other.parts):
            return f"{name}: {one.frames} frames and {one.parts}, not {other.frames}"
        if one.metadata["best_return"] != other.metadata["best_return"]:
            return f"{name}: another best return"
        for part in one.parts:
            problem = difference(one.load(part), other.load(part), f"{name}.{part}")
            if problem is not None:
                return f"{problem} differs"
    if (run / "eval.csv").read_bytes() != (whole / "eval.csv").read_bytes():
        return "eval.csv differs"
    tables = [read_csv(folder / "metrics.csv") for folder in (run, whole)]
    for table in tables:
        for row in table:  # what depends on the clock
            del row["frames_per_second"], row["updates_per_second"]
    if tables[0] != tables[1] or list(tables[0][0]) != list(tables[1][0]):
        return "metrics.csv differs"
    left = [path for path in run.rglob(".tmp-*") if path.is_file() and path.parent == run]
    return f"left behind: {left}" if left else None


def finish_and_compare(folder: Path, name: str) -> str | None:
    status = in_child(lambda: begin_or_go_on(folder, name))
    if status:
        try:
            begin_or_go_on(folder, name)
        except CheckpointError as error:
            return f"it can't go on: {error}"
        return f"it ended with {status} when it went on"
    return compare(folder, reference(name))


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


# Cases -------------------------------------------------------------------------------------------


def at_operations(name: str, numbers: list[int]) -> Callable[[Path], str | None]:
    """Kill one after the other session of a run at a file operation each."""

    def run(place: Path) -> str | None:
        folder = place / "run"
        for number in numbers:

            def session(number: int = number) -> None:
                kill_at_operation(folder, number)
                begin_or_go_on(folder, name)

            status = in_child(session)
            if status == 0:
                break  # there were fewer of them
            if not was_killed(status):
                return f"it ended with {status} before it could be killed at {number}"
        return finish_and_compare(folder, name)

    return run


def in_evaluation(name: str, numbers: list[int]) -> Callable[[Path], str | None]:
    def run(place: Path) -> str | None:
        folder = place / "run"
        for number in numbers:

            def session(number: int = number) -> None:
                kill_in_evaluation(number)
                begin_or_go_on(folder, name)

            status = in_child(session)
            if not was_killed(status) and status:
                return f"it ended with {status} before it could be killed at step {number}"
        return finish_and_compare(folder, name)

    return run


def at_moments(name: str, moments: list[float]) -> Callable[[Path], str | None]:
    def run(place: Path) -> str | None:
        folder = place / "run"
        for moment in moments:
            if not kill_after(folder, name, moment):
                break
        return finish_and_compare(folder, name)

    return run


def saved(folder: Path) -> bool:
    """Whether the first checkpoint is there."""
    return os.path.lexists(folder / "checkpoints" / "last")


def saved_again(folder: Path) -> bool:
    """Whether a later checkpoint has taken the place of the first."""
    link = folder / "checkpoints" / "last"
    return os.path.lexists(link) and not os.readlink(link).startswith("frames-000000000")


def cases(rng: random.Random, quick: bool) -> Iterator[Case]:
    names = ["mpo", "ppo"] if quick else list(RUNS)
    quickly = [name for name in names if name != "workers"]
    for name in quickly:
        reference(name)
    start = count_operations("mpo", saved) + 4
    save = count_operations("mpo", saved_again)
    every = range(1, start, 5 if quick else 1)
    for number in every:
        yield Case(f"at file operation {number} of a start", at_operations("mpo", [number]))
    for number in range(save - 34, save + 6, 8 if quick else 1):
        yield Case(f"at file operation {number}, in a save", at_operations("mpo", [number]))
    for index in range(3 if quick else 40):
        name = quickly[index % len(quickly)]
        numbers = [rng.randrange(1, 200) for _ in range(1 + index % 3)]
        yield Case(f"{name} at file operations {numbers}", at_operations(name, numbers))
    for index in range(2 if quick else 16):
        name = quickly[index % len(quickly)]
        numbers = [rng.randrange(1, 60) for _ in range(1 + index % 2)]
        yield Case(f"{name} at steps {numbers} of evaluations", in_evaluation(name, numbers))
    for index in range(2 if quick else 16):
        name = quickly[index % len(quickly)]
        moments = [round(rng.uniform(0.2, 4.0), 3) for _ in range(1 + index % 3)]
        yield Case(f"{name} after {moments} seconds", at_moments(name, moments))
    if not quick:
        reference("workers")
    for index in range(0 if quick else 6):
        numbers = [rng.randrange(30, 90) for _ in range(1 + index % 2)]
        yield Case(f"workers at file operations {numbers}", at_operations("workers", numbers))
