from __future__ import annotations

import errno
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.runs import checkpoints
from minerva_torchrl.runs.checkpoints import CheckpointStore, open_checkpoint
from tests.runs.checkpoint_problem import (
    ROOT,
    check_numbered,
    names,
    numbered,
)

# Kills, errors and full disks --------------------------------------------------------------------


def test_all_is_on_disk_before_it_is_in_use(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    flushed_before: dict[str, set[int]] = {}
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record_fsync(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        flushed_before["rename"] = set(flushed)
        rename(source, target)

    def record_replace(source: Path, target: Path) -> None:
        flushed_before["replace"] = set(flushed)
        replace(source, target)
        flushed.clear()

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    path = store.save(numbered(1), frames=1)
    inodes = {file.stat().st_ino for file in (path, *path.iterdir())}
    assert len(inodes) == 4
    assert flushed_before["rename"] == inodes
    assert flushed_before["replace"] == {*inodes, store.folder.stat().st_ino}
    assert flushed == [store.folder.stat().st_ino]


def run(function: Callable[[str], None], folder: Path) -> None:
    """Call a function of this file in a process of its own."""
    code = f"from {__name__} import *; {function.__name__}({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def fork(function: Callable[..., object], *arguments: object) -> int:
    """Call a function in a copy of this process, which exits with what it returns."""
    process = os.fork()
    if process == 0:
        code: object = 99
        try:
            code = function(*arguments)
        finally:
            os._exit(code if isinstance(code, int) else 98)
    return process


def save_for_ever(store: CheckpointStore, frames: int) -> None:
    while True:
        frames += 1
        store.save(numbered(frames, size=400_000), frames=frames)


def kill_at_random(folder: str) -> None:
    rng = random.Random(0)
    store = CheckpointStore(folder)
    store.save(numbered(0), frames=0)
    frames = 0
    deadline = time.monotonic() + 4
    for trial in range(1000):
        process = fork(save_for_ever, store, frames)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(process, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
        before, frames = frames, check_numbered(store)
        assert frames >= before
        if trial % 2:
            store.clean()
            assert names(store) == [store.find().name]
            assert check_numbered(store) == frames
        if trial >= 10 and time.monotonic() > deadline:
            break
    assert frames > 0


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path: Path) -> None:
    run(kill_at_random, tmp_path)


KILLED, RAISED, SWALLOWED, NEVER_REACHED = range(4)


def save_and_fail(store: CheckpointStore, number: int, failure: str) -> int:
    """Fail just before a file operation of a save, the first one being number 1."""
    step = 0

    def hook(event: str, _: object) -> None:
        nonlocal step
        if event == "open" or event.startswith(("os.", "shutil.")):
            step += 1
            if step == number and failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif step == number and failure == "interrupt":
                raise KeyboardInterrupt
            elif step == number:
                raise OSError(errno.ENOSPC, "No space left on device")

    sys.addaudithook(hook)  # can't be taken back, but this is a copy of the process
    try:
        store.save(numbered(2), frames=2)
    except (KeyboardInterrupt, OSError):
        return RAISED
    return SWALLOWED if step >= number else NEVER_REACHED


def fail_at_every_step(folder: str) -> None:
    os.fsync = lambda _: None  # slow, and no help against the end of a process
    for failure in ("kill", "interrupt", "full disk"):
        check_every_step(Path(folder) / failure, failure)


def check_every_step(folder: Path, failure: str) -> None:
    last_frames = set()
    for number in range(1, 1000):
        store = CheckpointStore(folder / str(number))
        store.save(numbered(1), frames=1)
        store.save(numbered(1), frames=1, name="best")
        before = names(store)
        status = os.waitpid(fork(save_and_fail, store, number, failure), 0)[1]
        outcome = os.WEXITSTATUS(status) if os.WIFEXITED(status) else KILLED
        assert outcome in (NEVER_REACHED, KILLED if failure == "kill" else RAISED, SWALLOWED)
        frames = check_numbered(store)
        last_frames.add(frames)
        for name in names(store):  # what looks like a checkpoint is a whole one
            assert name.startswith(".tmp-") or open_checkpoint(store.folder / name)
        if frames == 1 and failure != "kill":
            assert outcome == RAISED
            assert names(store) == before
        store.clean()
        assert names(store) == ["best-000000001", f"frames-{frames:09d}"]
        assert (check_numbered(store), check_numbered(store, "best")) == (frames, 1)
        store.save(numbered(2), frames=2)
        assert check_numbered(store) == 2
        if outcome == NEVER_REACHED:
            break
    assert number > 10
    assert last_frames == {1, 2}


@pytest.mark.slow
def test_fail_at_every_step(tmp_path: Path) -> None:
    run(fail_at_every_step, tmp_path)


def exceed_the_size_of_files(folder: str) -> None:
    store = CheckpointStore(folder)
    store.save(numbered(1), frames=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 1, 100, 5_000, 100_000, 1_000_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large") as error:
            store.save(numbered(2, size=200_000), frames=2)
        assert error.value.errno == errno.EFBIG
        assert names(store) == ["frames-000000001"]
        assert check_numbered(store) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.save(numbered(2, size=200_000), frames=2)
    assert check_numbered(store) == 2


def test_file_size_limit(tmp_path: Path) -> None:
    run(exceed_the_size_of_files, tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_errors_in_the_middle_of_a_file(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """PyTorch replaces some of them by an error of its own."""
    store.save(numbered(1), frames=1)
    write = checkpoints._HashingFile.write
    calls, failing_call = 0, math.inf

    def write_or_fail(file: checkpoints._HashingFile, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls >= failing_call:
            raise error
        return write(file, data)

    monkeypatch.setattr(checkpoints._HashingFile, "write", write_or_fail)
    store.save(numbered(1), frames=1)
    total = calls
    assert total > 20
    before = names(store)
    for number in range(1, total + 1):
        calls, failing_call = 0, number
        with pytest.raises(type(error)) as raised:
            store.save(numbered(2), frames=2)
        assert raised.value is error
        assert names(store) == before
        assert check_numbered(store) == 1
