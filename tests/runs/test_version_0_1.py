"""Runs that version 0.1 left behind: they are evaluated, resumed and reported as before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import softplus

from minerva_torchrl.report import load_runs, make_report
from minerva_torchrl.runs import evaluate, load_policy, open_checkpoint
from tests.runs.tiny import column, make_resumed, read_csv

FOLDER = Path(__file__).parents[1] / "fixtures" / "runs-0.1"
RESULTS = Path(__file__).parents[2] / "results"
DUALS = {
    "mpo": ["temperature", "penalty_temperature", "alpha_mean", "alpha_stddev"],
    "vmpo": ["temperature", "alpha_mean", "alpha_stddev"],
    "ppo": [],
}


@pytest.fixture(params=["mpo", "vmpo", "ppo"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return shutil.copytree(FOLDER / request.param, tmp_path / request.param, symlinks=True)


@pytest.mark.parametrize(("name", "row"), [("last", -1), ("best", None)])
def test_policies_act_as_they_did(run_dir: Path, name: str, row: int | None) -> None:
    policy = load_policy(run_dir, name=name)
    env = policy.make_env(episodes=2)
    result = evaluate(env, policy.actor, seed=policy.evaluation_seed).row()
    rows = [
        {name: float(cell) for name, cell in row.items()} for row in read_csv(run_dir / "eval.csv")
    ]
    recorded = max(rows, key=lambda row: row["return_mean"]) if row is None else rows[row]
    assert {"frames": policy.checkpoint.frames, **result} == pytest.approx(recorded, rel=1e-5)


def test_the_whole_state_is_restored(run_dir: Path) -> None:
    checkpoint = open_checkpoint(run_dir)
    model, training = checkpoint.load("model")["loss"], checkpoint.load("training")
    run = make_resumed(run_dir, total_frames=200)
    loss, trainer = run.assembly.loss, run.assembly.trainer
    for name in DUALS[run.config.algo]:
        value = getattr(loss, name)()
        torch.testing.assert_close(value, softplus(model[f"{name}.raw"]) + 1e-8)
    state = loss.state_dict()
    for name, tensor in model.items():
        if "network_params." in name:
            assert torch.equal(state[name], tensor), name
    optimizers = training["hooks"]["optimization_stepper"]
    for name in [name for name in optimizers if name.startswith("optimizer")]:
        optimizer = getattr(trainer.optimization_stepper, name)
        saved = optimizers[name]["state"]
        assert len(optimizer.state) == len(saved) > 0
        for moments, expected in zip(optimizer.state.values(), saved.values(), strict=True):
            assert torch.equal(moments["exp_avg"], expected["exp_avg"])
    assert trainer.collected_frames == 100
    assert trainer._optim_count == training["updates"]
    if run.assembly.replay_buffer is not None:
        assert len(run.assembly.replay_buffer) == 95  # transitions of five steps


def test_runs_go_on(run_dir: Path) -> None:
    evaluations = (run_dir / "eval.csv").read_text()
    before = open_checkpoint(run_dir).load("model")["loss"]
    run = make_resumed(run_dir, total_frames=200)
    assert run.train()["frames"] == 200
    assert (run_dir / "eval.csv").read_text().startswith(evaluations)
    assert column(run_dir / "eval.csv", "frames") == [0, 100, 200]
    assert column(run_dir / "metrics.csv", "frames")[-1] == 200
    after = run.assembly.loss.state_dict()
    assert all(tensor.isfinite().all() for tensor in after.values())
    trained = [name for name in before if name.startswith("actor_network_params")]
    assert any(not torch.equal(before[name], after[name]) for name in trained)


def test_runs_and_results_are_reported(tmp_path: Path) -> None:
    loaded = load_runs([FOLDER, RESULTS])
    assert loaded.problems == ()
    assert {run.algo for run in loaded.runs} >= {"mpo", "vmpo", "ppo"}
    assert len(loaded.runs) == 3 + len(list(RESULTS.rglob("eval.csv")))
    recorded = load_runs(FOLDER)
    page = make_report(recorded, tmp_path)
    for run in recorded.runs:
        assert f"{run.returns[-1]:.1f}" in page.read_text()
