"""Sweeps side by side, and searches, with Hydra's launchers and sweepers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs.distributed.commands import PATIENCE, start
from tests.runs.tiny import arguments, dotted

pytestmark = pytest.mark.ray

TINY = arguments(dotted("mpo", total_frames=60, eval__interval=60, checkpoint__interval=60))


def sweep(folder: Path, *command: str) -> tuple[dict[Any, Any], str]:
    """Settings and summaries of the runs of a sweep, and what it wrote."""
    process = start(folder, "--multirun", *TINY, *command)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    runs = sorted((folder / "runs").iterdir())
    return {run: json.loads((run / "summary.json").read_text()) for run in runs}, errors


def assert_report_has(folder: Path, runs: int) -> None:
    command = [sys.executable, "-m", "minerva_torchrl.report", "runs", "--out", "report"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert f"report/report.html: {runs} runs" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("launcher", "options"),
    [("joblib", ["hydra.launcher.n_jobs=2"]), ("ray", ["+hydra.launcher.ray.init.num_cpus=2"])],
)
def test_side_by_side(launcher: str, options: list[str], tmp_path: Path) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    runs, _ = sweep(tmp_path, "seed=0,1", f"hydra/launcher={launcher}", *options)
    assert sorted(summary["seed"] for summary in runs.values()) == [0, 1]
    assert {summary["frames"] for summary in runs.values()} == {60}
    assert_report_has(tmp_path, runs=2)


def test_a_search_says_what_is_best(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    runs, errors = sweep(
        tmp_path,
        "hydra/sweeper=optuna",
        "hydra.sweeper.direction=maximize",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=0",
        "optim.lr_actor=tag(log,interval(1e-4,1e-1))",
    )
    assert len(runs) == 3
    best = max(runs, key=lambda run: runs[run]["final_return"])
    found = re.search(r"^best of the search: (\S+) with optim.lr_actor=(\S+)$", errors, re.M)
    assert found is not None
    assert float(found[1]) == pytest.approx(runs[best]["final_return"], abs=0.06)
    assert f"lr_actor: {found[2]}" in (best / "config.yaml").read_text()
    assert_report_has(tmp_path, runs=3)
