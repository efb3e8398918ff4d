"""Environments that give what is not finite, raise or die, and loggers that fail."""

from __future__ import annotations

import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from minerva_torchrl.envs import EnvironmentFailure, PolicyFailure
from minerva_torchrl.runs import ConfigError, Run, open_checkpoint, parse_config
from minerva_torchrl.runs.settings import resumed_config
from minerva_torchrl.runs.snapshot import not_finite
from tests.campaign.case import Case
from tests.envs.faulty import FAULTS, Faulty
from tests.runs.tiny import EXAMPLES, SCRIPTS, QuickRun, dotted, nested, read_csv

GROUP = "data faults"

KINDS = ("mpo", "mpo-retrace", "mpo-envs", "vmpo", "ppo")
STEPS = {"mpo": 200, "mpo-retrace": 200, "mpo-envs": 100, "vmpo": 100, "ppo": 100}
"""Steps of a copy in a tiny run."""


def cases(rng: random.Random, quick: bool) -> Iterator[Case]:
    """Faults of data and loggers, some of them or all."""
    found = [*_lost_steps(rng), *_ends(rng), *_loggers()]
    if quick:
        found = rng.sample(found, 12)
    else:
        found += _processes(rng)
    yield from found


def _lost_steps(rng: random.Random) -> Iterator[Case]:
    for kind in KINDS:
        for fault in FAULTS:
            at = sorted(rng.sample(range(1, STEPS[kind]), rng.randint(1, 8)))
            length = rng.randint(3, 30)
            env = {"fault": fault, "at": at, "length": length, "on_reset": rng.random() < 0.3}
            yield Case(f"{kind} {fault} at {at}", partial(_goes_on, kind, env))


def _ends(rng: random.Random) -> Iterator[Case]:
    for kind in ("mpo", "vmpo", "ppo"):
        for fault in ("raise", "exit", "shape"):
            env = {"fault": fault, "at": [rng.randint(1, STEPS[kind])]}
            yield Case(f"{kind} {fault} at {env['at']}", partial(_ends_well, kind, env))
        env = {"fault": "nan", "at": [rng.randint(1, STEPS[kind] - 20)], "always": True}
        yield Case(f"{kind} nan from {env['at']} on", partial(_ends_well, kind, env))
        yield Case(f"{kind} policy without numbers", partial(_tells_policy_apart, kind))


def _loggers() -> Iterator[Case]:
    for kind in ("vmpo", "ppo"):
        yield Case(f"{kind} tensorboard in a file", partial(_refuses_file, kind))
        yield Case(f"{kind} wandb without a key", partial(_refuses_wandb, kind))
        for method in ("log_scalar", "close"):
            name = f"{kind} tensorboard fails in {method}"
            yield Case(name, partial(_goes_on_without_logger, kind, method))


def _processes(rng: random.Random) -> Iterator[Case]:
    at = rng.randint(3, 60)
    yield Case(f"worker raises at {at}", partial(_worker_ends, "raise", at))
    yield Case(f"worker is killed at {at}", partial(_worker_ends, "kill", at))
    yield Case("Ctrl-C with workers", _ctrl_c_with_workers)


# Runs --------------------------------------------------------------------------------------------


def make_run(folder: Path, kind: str, env: dict[str, Any], **changes: Any) -> Run:
    changed = {"env.max_episode_steps": None, "max_skipped": 12, **changes}
    config = parse_config(kind.partition("-")[0], nested({**dotted(kind), **changed}))
    make = partial(Faulty, **env)
    return QuickRun(config, folder / "run", make_env=make, callbacks=(), stream=io.StringIO())


def _goes_on(kind: str, env: dict[str, Any], folder: Path) -> str | None:
    """The run ends as if nothing had happened, but for the frames that it lost."""
    run = make_run(folder, kind, env)
    unseen = _watch(run)
    try:
        summary = run.train()
    except EnvironmentFailure as error:
        return f"it ended: {error}"
    if unseen:
        return f"the loss saw {unseen[0]}"
    rows = read_csv(run.run_dir / "metrics.csv")
    counts = [float(rows[-1][name]) for name in ("skipped_batches", "skipped_updates")]
    if counts != [0.0, 0.0]:
        return f"batches or updates were left out: {counts}"
    if summary["frames"] != 200 or not summary["skipped_frames"]:
        return f"frames {summary['frames']}, lost {summary['skipped_frames']}"
    if not math.isfinite(summary["final_return"]):
        return f"final return {summary['final_return']}"
    return _is_good_checkpoint(run.run_dir, 200)


def _watch(run: Run) -> list[str]:
    """Names of entries that are not finite when they come to the optimisation steps."""
    unseen: list[str] = []
    stepper: Any = run.assembly.trainer.optimization_stepper
    update: Callable[..., Any] = stepper._update

    def watched(learner: Any, batch: Any) -> Any:
        for key, entry in batch.items(True, True):
            if entry.is_floating_point() and not entry.isfinite().all():
                unseen.append(str(key))
        return update(learner, batch)

    stepper._update = watched
    return unseen


def _is_good_checkpoint(run_dir: Path, frames: int) -> str | None:
    checkpoint = open_checkpoint(run_dir)
    bad = not_finite({name: checkpoint.load(name) for name in checkpoint.parts})
    if bad is not None:
        return f"the checkpoint has {bad}, which is not finite"
    if checkpoint.frames != frames:
        return f"the checkpoint has {checkpoint.frames} frames and not {frames}"
    config = resumed_config(run_dir, {"total_frames": frames + 100})
    run = QuickRun(
        config,
        run_dir,
        make_env=Faulty,
        callbacks=(),
        checkpoint=checkpoint,
        stream=io.StringIO(),
    )
    end = run.train()["frames"]
    return None if end >= frames + 100 else f"it went on to {end} frames only"


def _ends_well(kind: str, env: dict[str, Any], folder: Path) -> str | None:
    """One line, and a checkpoint of the last whole batch."""
    run = make_run(folder, kind, env, **{"eval.interval": 10_000, "checkpoint.interval": 10_000})
    try:
        run.train()
    except EnvironmentFailure as error:
        if len(str(error).splitlines()) != 1 or "Faulty" not in str(error):
            return f"it said {error}"
    else:
        return "it did not end"
    if run.saved_frames < run.frames:
        return f"saved at {run.saved_frames} of {run.frames} frames"
    return _is_good_checkpoint(run.run_dir, run.frames)


def _tells_policy_apart(kind: str, folder: Path) -> str | None:
    run = make_run(folder, kind, {})

    def spoil() -> None:
        with torch.no_grad():
            for parameter in run.assembly.loss.actor_network_params.parameters():
                parameter.fill_(torch.nan)

    run.assembly.trainer.register_op("post_steps", spoil)
    try:
        run.train()
    except PolicyFailure:
        return _is_good_checkpoint(run.run_dir, 0)
    return "it did not end"


# Loggers -----------------------------------------------------------------------------------------


def _refuses_file(kind: str, folder: Path) -> str | None:
    run = make_run(folder, kind, {}, **{"logger.backend": "tensorboard"})
    writer = "torchrl.record.loggers.tensorboard.TensorboardLogger._create_experiment"
    error = NotADirectoryError(20, "Not a directory", "run/tensorboard")
    with mock.patch(writer, side_effect=error):
        return _refuses(run, "logger.backend=csv")


def _refuses_wandb(kind: str, folder: Path) -> str | None:
    variables = {"HOME": str(folder), "WANDB_CONFIG_DIR": str(folder), "WANDB_SILENT": "true"}
    kept = {name: v for name, v in os.environ.items() if not name.startswith("WANDB")}
    with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
        run = make_run(folder, kind, {}, **{"logger.backend": "wandb"})
        return _refuses(run, "logger.mode=offline")


def _refuses(run: Run, advice: str) -> str | None:
    try:
        run.train()
    except ConfigError as error:
        lines = str(error).splitlines()
        return None if len(lines) == 1 and advice in lines[0] else f"it said {error}"
    return "it was accepted"


def _goes_on_without_logger(kind: str, method: str, folder: Path) -> str | None:
    run = make_run(folder, kind, {}, **{"logger.backend": "tensorboard"})
    target = "torchrl.record.loggers.tensorboard.TensorboardLogger.log_scalar"
    if method == "close":
        target = "torch.utils.tensorboard.SummaryWriter.close"
    with mock.patch(target, side_effect=OSError(28, "No space left on device")):
        summary = run.train()
    shown = run._stream.getvalue().count("failed and is switched off")  # type: ignore[attr-defined]
    if shown != 1:
        return f"{shown} warnings"
    return None if summary["frames"] == 200 else f"{summary['frames']} frames"


# Processes ---------------------------------------------------------------------------------------


def _command(kind: str, folder: Path, **changes: Any) -> list[str]:
    settings = {**dotted(kind), "run_dir": str(folder / "run"), "env.max_episode_steps": None}
    settings |= {"env.num_envs": 2, "env.num_workers": 2, "env.name": "faulty"}
    settings |= {"env.factory": "tests.envs.faulty:Faulty", "compile.enabled": False, **changes}
    named = {None: "null", True: "true", False: "false"}
    words = [
        f"{name}={named[value] if value is None or isinstance(value, bool) else value}"
        for name, value in settings.items()
    ]
    return [
        sys.executable,
        str(EXAMPLES / SCRIPTS[kind]),
        *(word.replace(" ", "") for word in words),
    ]


def _start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    root = str(EXAMPLES.parent)
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as in a terminal
    )


def _group_is_gone(group: int) -> bool:
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return False


def _worker_ends(fault: str, at: int, folder: Path) -> str | None:
    changes = {"env.kwargs.fault": fault, "env.kwargs.at": [at], "eval.interval": 10_000}
    process = _start(_command("ppo", folder, **changes), folder)
    errors = process.communicate(timeout=300)[1]
    if not _group_is_gone(process.pid):
        return "a process was left"
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    if process.returncode != 1 or len(lines) != 1 or "Traceback" in errors:
        return f"exit status {process.returncode}: {errors[-300:]}"
    open_checkpoint(folder / "run")
    return None


def _ctrl_c_with_workers(folder: Path) -> str | None:
    process = _start(_command("ppo", folder, total_frames=10_000_000), folder)
    table, end = folder / "run" / "metrics.csv", time.monotonic() + 240
    while time.monotonic() < end and not (table.exists() and read_csv(table)):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=240)[1]
    if not _group_is_gone(process.pid):
        return "a process was left"
    if process.returncode != 0 or "Traceback" in errors:
        return f"exit status {process.returncode}: {errors[-300:]}"
    frames = open_checkpoint(folder / "run").frames
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return None if frames == summary["frames"] > 0 else f"saved at {frames} frames"
