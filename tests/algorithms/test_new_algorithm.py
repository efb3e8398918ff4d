"""An algorithm in a file of its own is trained, resumed, evaluated and reported like the others."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from minerva_torchrl import algorithms
from minerva_torchrl.__main__ import main
from minerva_torchrl.report import load_runs, make_report
from minerva_torchrl.runs import Run, load_config, open_checkpoint, parse_config
from minerva_torchrl.runs.settings import resumed_config
from tests.algorithms.a2c import A2C
from tests.runs.tiny import COMMON, arguments, assert_same_runs, column, content, nested

SETTINGS = {**COMMON, "env.num_envs": 2, "collector.frames_per_batch": 50}


@pytest.fixture(autouse=True)
def _a2c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The algorithm is known, by one line."""
    registry = algorithms.ALGORITHMS
    monkeypatch.setattr(registry, "_places", dict(registry._places))
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr("sys.argv", ["__main__.py"])
    monkeypatch.chdir(tmp_path)
    algorithms.register(A2C)
    yield
    GlobalHydra.instance().clear()


def train(folder: str, *more: str) -> None:
    assert main(["train", "a2c", *arguments(SETTINGS), f"run_dir={folder}", *more]) == 0


def test_trains_and_evaluates(capsys: pytest.CaptureFixture[str]) -> None:
    train("run", "preset=slow")
    errors = capsys.readouterr().err
    assert "a2c gym:Pendulum-v1: 200 frames in" in errors
    assert "-m minerva_torchrl train a2c resume=run total_frames=400" in errors
    config = load_config(Path("run"))
    assert (config.algo, config.preset, config.optim.lr) == ("a2c", "slow", 1e-4)
    assert main(["evaluate", "run", "--episodes", "2"]) == 0
    mean = column(Path("run/eval.csv"), "return_mean")[-1]
    assert f"return {mean:.2f} ± " in capsys.readouterr().out


def test_goes_on_as_if_never_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    train("whole")
    train("parts", "total_frames=100")
    assert main(["train", "a2c", "resume=parts", "total_frames=200"]) == 0
    assert_same_runs(Path("whole"), Path("parts"))
    first = open_checkpoint("whole").load("training")["hooks"]["optimization_stepper"]
    assert first["state"][0]["step"] == 4  # Adam's counter went on, too


def test_is_reported() -> None:
    for seed in (0, 1):
        train(f"runs/{seed}", f"seed={seed}")
    make_report(load_runs("runs"), Path("report"))
    text = Path("report/report.md").read_text()
    assert "| 200 | A2C | 2 |" in text
    assert "python -m minerva_torchrl train a2c --multirun env.name=gym:Pendulum-v1" in text
    assert "All runs of A2C share these settings." in text


def test_its_settings_are_checked_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "a2c", "optim.lr_actor=1"])
    message = "no setting 'optim.lr_actor'. Allowed: optim.optimizer, optim.momentum, optim.adam_"
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "a2c", "optim.lr=0", "run_dir=x"])
    assert "optim.lr must be positive, got 0.0" in capsys.readouterr().err
    assert main(["train", "a2c", "--help"]) == 0
    output = capsys.readouterr().out
    for piece in (
        "Train A2C. Advantage actor-critic: one step per rollout.",
        "  slow          small steps",
        "# The weight of the critic loss.",  # the words of TorchRL
        "# Learning rate.",
    ):
        assert piece in output
    assert content(Path()) == {}


def test_a_run_in_python() -> None:
    config = parse_config("a2c", nested({**SETTINGS, "total_frames": 50}))
    run = Run(config, Path("run"), stream=io.StringIO())
    before = [p.clone() for p in run.assembly.loss.parameters()]
    assert run.train()["algo"] == "a2c"
    after = run.assembly.loss.parameters()
    assert all(not torch.equal(b, a) for b, a in zip(before, after, strict=True))
    assert resumed_config(Path("run"), {"total_frames": 100}).total_frames == 100
