"""Commands as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.runs.tiny import EXAMPLES

PATIENCE = 600.0
"""Seconds after which a command has failed."""


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    """A run of MPO, which begins in a folder and in an environment that knows no cluster."""
    root = EXAMPLES.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "mpo_dmc.py"), *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_checkpoint(process: subprocess.Popen[str], run_dir: Path, frames: int) -> None:
    """Until a run has a checkpoint of so many frames or more: it deletes those before."""
    end = time.monotonic() + PATIENCE
    saved = 0
    while saved < frames:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.2)
        folders = (run_dir / "checkpoints").glob("frames-*")
        saved = max((int(folder.name.removeprefix("frames-")) for folder in folders), default=0)
