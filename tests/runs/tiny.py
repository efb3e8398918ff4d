"""Runs that take less than a second, and how to compare them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra.core.global_hydra import GlobalHydra

from minerva_torchrl.runs import (
    Callback,
    Checkpoint,
    Run,
    RunConfig,
    open_checkpoint,
    parse_config,
)
from minerva_torchrl.runs.settings import resumed_config

COMMON: dict[str, Any] = {
    "env.name": "gym:Pendulum-v1",
    "env.max_episode_steps": 15,
    "total_frames": 200,
    "eval.interval": 100,
    "eval.episodes": 2,
    "checkpoint.interval": 100,
    "logger.interval": 50,
    "network.actor_sizes": [8],
    "network.critic_sizes": [8],
}
MPO = {
    "collector.frames_per_batch": 20,
    "replay_buffer.size": 120,
    "replay_buffer.batch_size": 8,
    "replay_buffer.warmup_frames": 40,
    "loss.num_action_samples": 4,
    "optim.updates_per_frame": 0.1,
    "optim.target_period": 3,
}
SEQUENCES = {
    "replay_buffer.n_steps": 1,
    "replay_buffer.sequence_length": 4,
    "loss.value_estimator": "retrace",
}
VMPO = {
    "env.num_envs": 2,
    "collector.frames_per_batch": 50,
    "optim.num_policy_steps": 2,
    "optim.minibatch_size": 50,
}
PPO = {
    "env.num_envs": 2,
    "collector.frames_per_batch": 50,
    "optim.num_epochs": 2,
    "optim.minibatch_size": 25,
}
CARTPOLE = {"env.name": "gym:CartPole-v1"}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpo": ("mpo", MPO),
    "mpo-retrace": ("mpo", {**MPO, **SEQUENCES}),
    "vmpo": ("vmpo", VMPO),
    "ppo": ("ppo", PPO),
    "vmpo-discrete": ("vmpo", {**VMPO, **CARTPOLE}),
    "ppo-discrete": ("ppo", {**PPO, **CARTPOLE}),
    "mpo-solve": ("mpo", {**MPO, "loss.temperature_update": "solve"}),
    "suite": ("mpo", {**MPO, "env.name": "cartpole-balance", "env.frame_skip": 2}),
    "mpo-envs": ("mpo", {**MPO, "env.num_envs": 2}),
    "mpo-retrace-envs": ("mpo", {**MPO, **SEQUENCES, "env.num_envs": 2}),
}
"""Algorithm and settings by dotted name, beyond the common ones."""


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section, from dotted names."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        section = result
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return result


def dotted(kind: str, **changes: Any) -> dict[str, Any]:
    """Settings of a tiny run by dotted name; ``__`` stands for a dot in the changes."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    settings = {**COMMON, **SETTINGS[kind][1], **changed}
    warmup = "replay_buffer.warmup_frames"
    if warmup in settings and warmup not in changed:  # shorter runs have a shorter one
        settings[warmup] = min(settings[warmup], settings["total_frames"])
    return settings


def tiny_config(kind: str, **changes: Any) -> RunConfig:
    return parse_config(SETTINGS[kind][0], nested(dotted(kind, **changes)))


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as they are written on the command line."""
    return [f"{name}={_argument(value)}" for name, value in settings.items()]


def _argument(value: Any) -> str:
    named = {None: "null", True: "true", False: "false"}
    if isinstance(value, list):
        return str(value).replace(" ", "")
    return named[value] if value is None or isinstance(value, bool) else str(value)


class QuickRun(Run):
    """Draws no curve, which would take a third of its time."""

    def train(self) -> dict[str, Any]:
        with mock.patch("minerva_torchrl.runs.folder.draw_curve"):
            return super().train()


def make_run(
    config: RunConfig,
    folder: Path,
    *,
    checkpoint: Checkpoint | None = None,
    callbacks: Sequence[Callback] = (),
    stream: io.StringIO | None = None,
) -> Run:
    """A run that shows its progress to nobody."""
    stream = io.StringIO() if stream is None else stream
    return QuickRun(config, folder, checkpoint=checkpoint, callbacks=callbacks, stream=stream)


def train(folder: Path, kind: str, **changes: Any) -> Run:
    """A run from beginning to end."""
    run = make_run(tiny_config(kind, **changes), folder)
    run.train()
    return run


def make_resumed(
    folder: Path,
    stream: io.StringIO | None = None,
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Run:
    """A run that goes on where its last checkpoint is, in objects of its own."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    config, checkpoint = resumed_config(folder, changed), open_checkpoint(folder)
    return make_run(config, folder, checkpoint=checkpoint, callbacks=callbacks, stream=stream)


def resume(folder: Path, stream: io.StringIO | None = None, **changes: Any) -> Run:
    """Go on with a run to its end."""
    run = make_resumed(folder, stream, **changes)
    run.train()
    return run


class Killed(BaseException):
    """Ends a run in the middle, like a signal that can't be caught."""


def before_records(run: Run, hook: Callable[[], None]) -> None:
    """Have a hook called after each batch, before it is recorded, evaluated and saved."""
    run.assembly.trainer.register_op("post_steps", hook)


def after_records(run: Run, hook: Callable[[], None]) -> None:
    """Have a hook called after each batch, when it is recorded, evaluated and saved."""
    run.assembly.trainer.register_op("post_steps_log", lambda batch: hook())


def train_and_kill(
    folder: Path,
    kind: str,
    at: int,
    *,
    resumed: bool = False,
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> None:
    """Train to so many frames and stop there, before what comes after the batch.

    What was saved last is then older.
    """
    if resumed:
        run = make_resumed(folder, callbacks=callbacks)
    else:
        run = make_run(tiny_config(kind, **changes), folder, callbacks=callbacks)

    def kill() -> None:
        if run.frames >= at:
            raise Killed

    before_records(run, kill)
    try:
        run.train()
    except Killed:
        return
    raise AssertionError(f"the run ended before {at} frames")


# What a run left ---------------------------------------------------------------------------------


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def column(file: Path, name: str) -> list[float]:
    return [float(row[name]) for row in read_csv(file)]


def content(folder: Path) -> dict[str, Any]:
    """Everything in a folder: bytes of files, and where links lead to."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = path.readlink()
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


def assert_same_value(first: Any, second: Any, path: str = "") -> None:
    """Equal bit for bit, through dictionaries and lists."""
    assert type(first) is type(second), path
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype, path
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for name in first:
            assert_same_value(first[name], second[name], f"{path}/{name}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), path
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_same_value(one, other, f"{path}/{index}")
    else:
        assert first == second, path


def assert_same_parameters(first: Path, second: Path) -> None:
    """Networks and statistics of the last checkpoints are equal bit for bit."""
    one, other = (open_checkpoint(folder).load("model") for folder in (first, second))
    assert_same_value(one, other)


def assert_same_runs(first: Path, second: Path) -> None:
    """All parts of the last checkpoints and all evaluations are equal bit for bit.

    Except the generators of Python and NumPy, which a run does not seed.
    """
    one, other = open_checkpoint(first), open_checkpoint(second)
    assert one.frames == other.frames
    assert one.parts == other.parts
    for part in one.parts:
        values = one.load(part), other.load(part)
        if part == "training":
            for value in values:
                del value["random"]["numpy"], value["random"]["python"]
        assert_same_value(*values, part)
    assert (first / "eval.csv").read_text() == (second / "eval.csv").read_text()
    best = [open_checkpoint(folder / "checkpoints" / "best").frames for folder in (first, second)]
    assert best[0] == best[1]


# Commands ----------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {"mpo": "mpo_dmc.py", "vmpo": "vmpo_dmc.py", "ppo": "ppo_dmc.py"}


def run_script(name: str, *arguments: str) -> int:
    """Run an example in this process, as from the command line: its exit status."""
    before = sys.argv
    sys.argv = [str(EXAMPLES / name), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):  # Python would do the same
            sys.stderr.write(f"{end.code}\n")
            return 1
        return int(end.code or 0)
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()
    return 0


def fix_hash(checkpoint: Path, part: str) -> None:
    """Let the manifest tell the truth about a file that was changed."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    data = (checkpoint / f"{part}.pt").read_bytes()
    manifest["parts"][part] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
