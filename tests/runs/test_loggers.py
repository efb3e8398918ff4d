from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.algorithms.config import LoggerConfig
from minerva_torchrl.runs import ConfigError
from minerva_torchrl.runs.loggers import check_backend, make_logger
from tests.runs.tiny import (
    arguments,
    column,
    content,
    dotted,
    make_run,
    resume,
    run_script,
    tiny_config,
    train,
    train_and_kill,
)

# Backends ----------------------------------------------------------------------------------------


def test_csv_needs_no_logger(tmp_path: Path) -> None:
    check_backend(LoggerConfig())
    assert make_logger(LoggerConfig(), tmp_path, {}) is None
    assert content(tmp_path) == {}


@pytest.mark.parametrize("backend", ["tensorboard", "wandb"])
def test_a_backend_that_is_not_installed(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *args: None if name == backend else find_spec(name, *args),
    )
    message = rf'needs the package {backend}: pip install "minerva_torchrl\[{backend}\]"'
    with pytest.raises(ConfigError, match=message):
        make_run(tiny_config("vmpo", logger__backend=backend), tmp_path / "run")
    assert content(tmp_path) == {}


# TensorBoard -------------------------------------------------------------------------------------


def read_events(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of all scalars, by name."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard(tmp_path: Path) -> None:
    # Read at once: everything must be on disk when a run has ended.
    run = train(tmp_path, "vmpo", logger__backend="tensorboard")
    events = read_events(run.run_dir)
    returns = column(tmp_path / "eval.csv", "return_mean")
    assert [step for step, _ in events["eval/return_mean"]] == [0, 100, 200]
    assert [value for _, value in events["eval/return_mean"]] == pytest.approx(returns)
    assert [step for step, _ in events["train/loss_actor"]] == [50, 100, 150, 200]
    losses = column(tmp_path / "metrics.csv", "loss_actor")
    assert [value for _, value in events["train/loss_actor"]] == pytest.approx(losses)
    assert {"train/episode_return", "eval/length_mean", "time/frames_per_second"} <= set(events)
    assert {name.partition("/")[0] for name in events} == {"train", "eval", "time"}


def test_tensorboard_goes_on(tmp_path: Path) -> None:
    train_and_kill(tmp_path, "vmpo", at=150, logger__backend="tensorboard")
    resume(tmp_path)
    steps = [step for step, _ in read_events(tmp_path)["eval/return_mean"]]
    assert sorted(set(steps)) == [0, 100, 200]


# Weights & Biases --------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """What wandb takes for its server, while its folders are in a temporary place."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield listener


def was_called(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def offline_runs(run_dir: Path) -> list[str]:
    """Ids of the runs that wandb wrote into a folder."""
    return [path.name.rpartition("-")[2] for path in run_dir.glob("wandb/offline-run-*")]


OFFLINE: dict[str, Any] = {"logger.backend": "wandb", "logger.mode": "offline"}


def test_wandb_offline(server: socket.socket, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    train_and_kill(run_dir, "vmpo", at=150, **OFFLINE)
    wandb.finish()  # as at the end of a process
    first = (run_dir / "wandb_id").read_text()
    assert set(offline_runs(run_dir)) == {first}
    resume(run_dir)
    assert (run_dir / "wandb_id").read_text() == first
    assert set(offline_runs(run_dir)) == {first}
    wandb.finish()
    [*files] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert all(file.stat().st_size > 0 for file in files)
    assert not was_called(server)
    assert {path.name for path in tmp_path.iterdir()} == {"home", "run"}


@pytest.mark.slow
def test_wandb_tells_runs_of_a_sweep_apart(
    server: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)  # for what Hydra writes
    settings = arguments({**dotted("vmpo", total_frames=50), **OFFLINE})
    pattern = f"run_dir='{tmp_path}/x_${{seed}}'"
    assert run_script("vmpo_dmc.py", "--multirun", "seed=0,1", pattern, *settings) == 0
    left_open = wandb.run is not None
    wandb.finish()
    assert not left_open  # each run ends its own
    ids = [(tmp_path / name / "wandb_id").read_text() for name in ("x_0", "x_1")]
    assert ids[0] != ids[1]
    assert [offline_runs(tmp_path / name) for name in ("x_0", "x_1")] == [[ids[0]], [ids[1]]]
    assert not was_called(server)


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "logger", "advice"),
    [
        ("tensorboard", "TensorboardLogger", "What helps: logger.backend=csv needs nothing."),
        ("wandb", "WandbLogger", "logger.mode=offline needs none"),
    ],
)
def test_a_logger_that_can_not_be_made(
    backend: str, logger: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("No API key\nconfigured.")

    monkeypatch.setattr(f"minerva_torchrl.runs.loggers.{logger}", fail)
    run = make_run(tiny_config("vmpo", logger__backend=backend), tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        run.train()
    text = str(error.value)
    assert text.startswith(f"logger.backend={backend} can't be used: No API key configured. What")
    assert advice in text
    assert len(text.splitlines()) == 1


def test_a_folder_of_the_logger_that_is_a_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").touch()
    with pytest.raises(ConfigError, match=r"logger\.backend=tensorboard can't be used"):
        make_logger(LoggerConfig(backend="tensorboard"), tmp_path, {})


@pytest.mark.parametrize("method", ["add_scalar", "close"])
def test_a_logger_that_fails_is_switched_off(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"torch.utils.tensorboard.SummaryWriter.{method}", fail)
    run = train(tmp_path, "vmpo", logger__backend="tensorboard")
    shown = run._stream.getvalue()
    assert shown.count("warning: TensorboardLogger failed and is switched off") == 1
    assert "No space left on device" in shown
    assert run.frames == 200
