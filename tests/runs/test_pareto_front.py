"""The example that draws the return against another objective."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from minerva_torchrl.runs import load_policy
from tests.runs.tiny import EXAMPLES, run_script, train

SCRIPT = "pareto_front.py"
LABEL = "loss.objectives.energy.epsilon"


def test_front() -> None:
    """Points that another one is at least as good as in both are not on it."""
    front = runpy.run_path(str(EXAMPLES / SCRIPT))["front"]
    assert front([(5.0, -2.0), (9.0, -8.0), (4.0, -3.0), (9.0, -7.0), (1.0, -1.0)]) == [
        (9.0, -7.0),
        (5.0, -2.0),
        (1.0, -1.0),
    ]


def energetic(folder: Path, epsilon: float) -> Path:
    objectives = {"energy": {"epsilon": epsilon, "reward": "energy"}}
    changes: dict[str, Any] = {
        "env.wrappers": ["minerva_torchrl.envs.energy:EnergyCost"],
        "loss.objectives": objectives,
    }
    train(folder, "mpo", total_frames=60, **changes)
    return folder


def test_draws_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [energetic(tmp_path / str(epsilon), epsilon) for epsilon in (0.1, 0.5)]
    picture = tmp_path / "pictures" / "pareto.png"
    options = ["--label", LABEL, "--episodes", "2", "--out", str(picture)]
    capsys.readouterr()
    assert run_script(SCRIPT, *map(str, runs), *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The first line again, step by step.
    policy = load_policy(runs[0], trust=True)
    env = policy.make_env(episodes=2)
    data = env.rollout(1000, policy.actor, break_when_all_done=True, break_when_any_done=False)
    before = data["next", "done"].cumsum(1) - data["next", "done"].long()
    totals = [
        torch.where(before == 0, data["next", key], 0.0).sum(1).mean().item()
        for key in ("reward", "energy")
    ]
    assert totals[1] < 0
    assert lines[0] == f"{runs[0]}: return {totals[0]:.4g}, energy {totals[1]:.4g}"
    name = runpy.run_path(str(EXAMPLES / SCRIPT))["name"]
    assert [name(run, LABEL) for run in runs] == ["epsilon 0.1", "epsilon 0.5"]
    assert name(runs[0], None) == "0.1"


def test_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train(folder, "mpo", total_frames=60)
    out = ["--out", str(tmp_path / "pareto.png")]
    assert run_script(SCRIPT, str(folder), "--label", LABEL, *out) == 1
    assert f"has no setting {LABEL!r}" in capsys.readouterr().err
    assert run_script(SCRIPT, str(folder), *out) == 1
    assert "has no 'energy' among" in capsys.readouterr().err
    assert not (tmp_path / "pareto.png").exists()
