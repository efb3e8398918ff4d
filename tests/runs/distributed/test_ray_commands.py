"""Commands that start a cluster of their own, and addresses that lead nowhere."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch.cuda import device_count as cuda_devices

from minerva_torchrl.runs import ConfigError, open_checkpoint
from tests.runs.distributed.cluster import SMALL
from tests.runs.distributed.commands import PATIENCE, start, wait_for_checkpoint
from tests.runs.tiny import arguments, column, dotted, make_run, tiny_config

pytestmark = pytest.mark.ray


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The driver is killed and goes on from its checkpoint. Then a learner is killed, and the run
    goes back to its checkpoint by itself.
    """
    settings = arguments(dotted("mpo", **SMALL, total_frames=100_000))
    callback = "callbacks=[tests.runs.distributed.cluster:LosesALearner]"
    process = start(tmp_path, *settings, "run_dir=run", callback)
    wait_for_checkpoint(process, tmp_path / "run", frames=200)
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
    wait_for_checkpoint(process, tmp_path / "run", frames=100)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "SIGINT: finishing this batch and saving." in errors


def test_a_slow_start_is_tried_again() -> None:
    """Without the processes of the first one. Other errors are not."""
    from minerva_torchrl.runs.distributed.cluster import patiently

    started: list[subprocess.Popen[bytes]] = []

    def start_slowly() -> str:
        started.append(subprocess.Popen(["sleep", "600"]))
        if len(started) == 1:
            raise Exception("The current node timed out during startup.")
        return "there"

    assert patiently(start_slowly) == "there"
    assert started[0].wait(timeout=60) == -signal.SIGKILL
    assert started[1].poll() is None
    started[1].kill()
    started[1].wait()
    failing = mock.Mock(side_effect=ValueError("another error"))
    with pytest.raises(ValueError, match="another error"):
        patiently(failing)
    failing.assert_called_once()


@contextlib.contextmanager
def port(answer: bytes | None) -> Iterator[int]:
    """One that gives everybody the same answer, or lets them wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        yield server.getsockname()[1]
        if answer is not None:
            thread.join()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "nothing answers there (timed out)"),
        (b"", "what answers there is not Ray"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers there is not Ray"),
    ],
)
def test_an_address_that_is_not_rays(answer: bytes | None, problem: str, tmp_path: Path) -> None:
    with port(answer) as number:
        refused_quickly(tmp_path, f"127.0.0.1:{number}", problem)


def test_nobody_is_there(tmp_path: Path) -> None:
    with port(None) as number:
        pass
    refused_quickly(tmp_path, f"127.0.0.1:{number}", "nothing answers there (Connection refused)")


def refused_quickly(folder: Path, address: str, problem: str) -> None:
    begin = time.monotonic()
    config = tiny_config("mpo", **SMALL, ray__address=address)
    with pytest.raises(ConfigError, match=rf"^ray.address={address}: {re.escape(problem)}"):
        make_run(config, folder)
    assert time.monotonic() - begin < 30  # Ray itself would try for minutes
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("cluster")
def test_connected_to_another_cluster(tmp_path: Path) -> None:
    with port(b"\0\0\0\4\0\0\0\0\0") as number:  # as Ray would begin
        config = tiny_config("mpo", **SMALL, ray__address=f"127.0.0.1:{number}")
        with pytest.raises(ConfigError, match=r": this process is connected to .* already\.$"):
            make_run(config, tmp_path)


@pytest.mark.parametrize("whose", ["collector", "learner"])
def test_more_gpus_than_there_are(whose: str, tmp_path: Path) -> None:
    config = tiny_config("mpo", **SMALL, **{f"ray__gpus_per_{whose}": 1000.0})
    wanted = 1000 * (config.ray.collectors if whose == "collector" else 1)
    problem = f"^the section ray asks for {wanted} GPUs, but this machine has {cuda_devices()}.$"
    with (
        mock.patch("ray.init", side_effect=AssertionError("nothing may start")),
        pytest.raises(ConfigError, match=problem),
    ):
        make_run(config, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("what", "amount"), [("gpus_per_learner", 1000.0), ("cpus_per_collector", 1000.0)]
)
def test_more_than_a_cluster_has(what: str, amount: float, tmp_path: Path) -> None:
    changes = {f"ray__{what}": amount, "ray__address": "auto"}
    config = tiny_config("mpo", **SMALL, **changes)
    with pytest.raises(ConfigError, match=r"^the section ray asks for .*, but the cluster has "):
        make_run(config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_command_that_asks_for_too_much_says_so_in_a_line(tmp_path: Path) -> None:
    process = start(tmp_path, "ray.collectors=1", "ray.gpus_per_learner=1000")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    problem = f"the section ray asks for 1000 GPUs, but this machine has {cuda_devices()}."
    assert errors.splitlines()[-1] == f"error: {problem}"
    assert not list(tmp_path.iterdir())
