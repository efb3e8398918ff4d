"""Runs that cases begin with: trained once, in a process of their own."""

from __future__ import annotations

import atexit
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from minerva_torchrl.runs import Run
from minerva_torchrl.runs.run import resume_run
from tests.runs.tiny import tiny_config

OWNER = os.getpid()


@cache
def shared_folder() -> Path:
    """A folder that lasts as long as the campaign."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-shared-"))

    def remove() -> None:
        if os.getpid() == OWNER:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def in_child(function: Callable[[], None]) -> int:
    """Call a function in a forked process: the status it ended with, as ``os.waitpid`` has it."""
    process = os.fork()
    if process == 0:
        status = 70
        try:
            function()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            if os.environ.get("CAMPAIGN_TRACEBACK"):
                import traceback

                with open(os.environ["CAMPAIGN_TRACEBACK"], "a") as file:
                    traceback.print_exc(file=file)
        finally:
            os._exit(status)
    return os.waitpid(process, 0)[1]


def train(folder: Path, kind: str, **changes: Any) -> None:
    """Train a tiny run to its end, or until it is killed."""
    with mock.patch("minerva_torchrl.runs.folder.draw_curve"):
        Run(tiny_config(kind, **changes), folder, stream=io.StringIO()).train()


def resume(folder: Path, **changes: Any) -> None:
    """Go on with a run as the command line does."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    with mock.patch("minerva_torchrl.runs.folder.draw_curve"):
        resume_run(folder, changed, stream=io.StringIO()).train()


@cache
def trained(kind: str, **changes: Any) -> Path:
    """A run that was left alone until its end."""
    name = "-".join([kind, *(f"{key}={value}" for key, value in changes.items())])
    folder = shared_folder() / name.replace("/", "_")
    status = in_child(lambda: train(folder, kind, **changes))
    if status:
        raise RuntimeError(f"the run {name} ended with {status}")
    return folder
