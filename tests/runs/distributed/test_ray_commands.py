"""Commands that start a cluster of their own, and addresses that lead nowhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minerva_torchrl.runs import ConfigError, open_checkpoint
from tests.runs.distributed.cluster import SMALL
from tests.runs.tiny import EXAMPLES, arguments, column, dotted, make_run, tiny_config

pytestmark = pytest.mark.ray

PATIENCE = 600.0


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    root = EXAMPLES.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # as a user would start it
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


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The driver is killed and goes on from its checkpoint. Then a learner is killed, and the run
    goes back to its checkpoint by itself.
    """
    settings = arguments(dotted("mpo", **SMALL, total_frames=100_000))
    callback = "callbacks=[tests.runs.distributed.cluster:LosesALearner]"
    process = start(tmp_path, *settings, "run_dir=run", callback)
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "run" / "checkpoints" / "frames-000000200").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.2)
    process.kill()
    process.communicate()
    frames = open_checkpoint(tmp_path / "run").frames
    assert frames >= 100
    total = frames + 300
    again = start(tmp_path, "resume=run", f"total_frames={total}", "trust=true")
    _, errors = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, errors
    assert "warning: a learner was lost. Going back to the last checkpoint" in errors
    assert open_checkpoint(tmp_path / "run").frames == total
    rows = column(tmp_path / "run" / "metrics.csv", "frames")
    assert rows == sorted(set(rows))
    assert rows[-1] == total


def test_stopped_by_a_signal(tmp_path: Path) -> None:
    process = start(tmp_path, *arguments(dotted("mpo", **SMALL, total_frames=10**6)), "run_dir=run")
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "run" / "checkpoints" / "frames-000000100").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "SIGINT: finishing this batch and saving." in errors


def test_nobody_answers(tmp_path: Path) -> None:
    begin = time.monotonic()
    config = tiny_config("mpo", **SMALL, ray__address="127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^ray.address=127.0.0.1:9: nothing answers there \("):
        make_run(config, tmp_path)
    assert time.monotonic() - begin < 60  # Ray itself would try for minutes
    assert not list(tmp_path.iterdir())
