"""Runs whose environments go wrong: what that costs, and what is left."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minerva_torchrl.envs import EnvironmentFailure, PolicyFailure
from minerva_torchrl.runs import CheckpointError, open_checkpoint
from minerva_torchrl.runs.evaluation import evaluate
from minerva_torchrl.trainers import NonFiniteError
from tests.envs.faulty import Faulty
from tests.runs.tiny import (
    QuickRun,
    arguments,
    assert_same_runs,
    before_records,
    column,
    dotted,
    make_resumed,
    run_script,
    tiny_config,
)

ALGORITHMS = ["mpo", "mpo-retrace", "vmpo", "ppo"]
FACTORY = "tests.envs.faulty:Faulty"


def make_run(folder: Path, kind: str, *, env: dict[str, Any], **changes: Any) -> QuickRun:
    """A run of faulty environments; the evaluations' are the same."""
    changes = {"env__max_episode_steps": None, "eval__interval": 1000, **changes}
    config = tiny_config(kind, **changes)
    return QuickRun(
        config, folder, make_env=partial(Faulty, **env), callbacks=(), stream=io.StringIO()
    )


def watch_losses(run: QuickRun) -> list[bool]:
    """Whether each batch that reaches the optimisation steps is finite."""
    seen: list[bool] = []
    stepper = run.assembly.trainer.optimization_stepper
    update = stepper._update

    def watched(learner: Any, batch: Any) -> Any:
        tensors = [t for t in batch.values(True, True) if t.is_floating_point()]
        seen.append(all(bool(t.isfinite().all()) for t in tensors))
        return update(learner, batch)

    stepper._update = watched
    return seen


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_lost_steps_cost_nothing_else(kind: str, tmp_path: Path) -> None:
    """Also at the first and last step of a batch, and at the first of an episode."""
    length = 20 if kind.startswith("mpo") else 25  # steps of a batch
    at = [3, length, length + 1, 2 * length + 1, 61, 62]
    run = make_run(tmp_path, kind, env={"fault": "nan", "at": at, "length": 11})
    seen = watch_losses(run)
    summary = run.train()
    copies = run.config.env.num_envs
    lost = copies * len([t for t in set(at) if t <= 200 // copies])
    assert summary["frames"] == 200
    assert summary["skipped_frames"] == lost
    assert column(tmp_path / "metrics.csv", "skipped_frames")[-1] == lost
    assert column(tmp_path / "metrics.csv", "skipped_batches")[-1] == 0
    assert column(tmp_path / "metrics.csv", "skipped_updates")[-1] == 0
    assert seen
    assert all(seen)
    assert json.loads((tmp_path / "summary.json").read_text())["skipped_frames"] == lost
    # Whole episodes only.
    lengths = column_with_gaps(tmp_path / "metrics.csv", "episode_length")
    assert set(lengths) == {11.0}


def column_with_gaps(file: Path, name: str) -> list[float]:
    from tests.runs.tiny import read_csv

    return [float(row[name]) for row in read_csv(file) if row[name]]


@pytest.mark.parametrize("kind", ["vmpo", "ppo"])
@pytest.mark.parametrize("fault", ["nan_reward", "inf_reward"])
def test_one_bad_reward_spoils_no_statistics(kind: str, fault: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, kind, env={"fault": fault, "at": [7]})
    run.train()
    transforms = open_checkpoint(tmp_path).load("model")["transforms"]
    tensors = [t for entry in transforms.values() for t in tensors_of(entry)]
    assert tensors
    assert all(t.isfinite().all() for t in tensors)
    assert run.updates > 0
    make_resumed_faulty(tmp_path, total_frames=300).train()


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for item in items for t in tensors_of(item)]


def make_resumed_faulty(folder: Path, **changes: Any) -> QuickRun:
    from minerva_torchrl.runs.settings import resumed_config

    config, checkpoint = resumed_config(folder, changes), open_checkpoint(folder)
    return QuickRun(
        config, folder, make_env=Faulty, callbacks=(), checkpoint=checkpoint, stream=io.StringIO()
    )


def test_resume_is_exact_after_lost_steps(tmp_path: Path) -> None:
    """Simulators that can be restored, with a fault of their own."""

    def spoiled(run: QuickRun) -> QuickRun:
        simulator = run.assembly.env.base_env._simulators[0]
        step = simulator.step

        def faulty(action: Any) -> Any:
            observation, reward, *ends = step(action)
            angle = observation[0][2]  # a rare one
            return observation, float("nan") if abs(angle) < 0.2 else reward, *ends

        simulator.step = faulty
        return run

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = tiny_config("mpo")
    spoiled(QuickRun(config, whole, stream=io.StringIO())).train()
    run = spoiled(QuickRun(config, parts, stream=io.StringIO()))
    before_records(run, lambda: run.stop("enough") if run.frames >= 100 else None)
    run.train()
    assert run.frames == 100
    again = spoiled(make_resumed(parts))
    assert again.train()["skipped_frames"] > 0
    assert_same_runs(whole, parts)


# Evaluation --------------------------------------------------------------------------------------


def test_an_evaluation_begins_lost_episodes_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, "ppo", env={"fault": "inf", "at": [4]})
    result = evaluate(run.eval_env, run.assembly.actor, seed=0)
    assert result.returns.tolist() == [6.0, 6.0]
    assert result.lengths.tolist() == [6, 6]
    assert result.lost == 2


def test_an_evaluation_that_loses_every_episode(tmp_path: Path) -> None:
    run = make_run(tmp_path, "ppo", env={"at": range(0, 1000, 4)}, total_frames=50)
    with pytest.raises(EnvironmentFailure, match="lost 10 episodes of an evaluation in a row"):
        run.train()
    assert open_checkpoint(tmp_path).frames == 0


# Ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpo", "ppo"])
def test_an_environment_that_raises_leaves_the_last_whole_batch(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, kind, env={"fault": "raise", "at": [64]}, checkpoint__interval=1000)
    with pytest.raises(EnvironmentFailure, match=r"Faulty.* raised ZeroDivisionError"):
        run.train()
    whole = 60 if kind == "mpo" else 100
    assert open_checkpoint(tmp_path).frames == run.saved_frames == whole
    again = make_resumed_faulty(tmp_path)
    assert again.frames == whole
    assert again.train()["frames"] == 200


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dotted("ppo", env__factory=FACTORY, eval__interval=1000, run_dir=tmp_path / "run")
    settings |= {"env.kwargs.fault": "exit", "env.kwargs.at": [40], "env.name": "broken"}
    assert run_script("ppo_dmc.py", *arguments(settings)) == 1
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith("error: environment tests.envs.faulty:Faulty, copy 0 of 2, raised Syst")
    assert second.endswith("checkpoints/last at 50 frames")


def test_a_policy_without_finite_parameters(tmp_path: Path) -> None:
    run = make_run(tmp_path, "ppo", env={})

    def spoil() -> None:
        with torch.no_grad():
            for parameter in run.assembly.loss.actor_network_params.parameters():
                parameter.fill_(torch.nan)

    before_records(run, spoil)
    with pytest.raises(PolicyFailure, match="policy"):
        run.train()
    assert open_checkpoint(tmp_path).frames == 0


# Checkpoints -------------------------------------------------------------------------------------


def spoil_adam(run: QuickRun) -> None:
    optimizer = run.assembly.trainer.optimization_stepper.optimizer
    next(iter(optimizer.state.values()))["exp_avg"].fill_(torch.inf)


def test_no_checkpoint_of_what_is_not_finite(tmp_path: Path) -> None:
    run = make_run(tmp_path, "ppo", env={}, checkpoint__interval=50, total_frames=150)
    before_records(run, lambda: spoil_adam(run) if run.frames == 100 else None)
    with pytest.raises((NonFiniteError, PolicyFailure)):  # sooner or later
        run.train()
    assert "warning: no checkpoint was written (the one before is kept): training/" in (
        run._stream.getvalue()
    )
    assert open_checkpoint(tmp_path).frames == 50


def test_an_end_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, "ppo", env={}, checkpoint__interval=50, total_frames=100)
    before_records(run, lambda: spoil_adam(run) if run.frames == 100 else None)
    with pytest.raises(NonFiniteError, match=r"no checkpoint was written .* training/"):
        run.train()
    assert open_checkpoint(tmp_path).frames == 50


def test_no_resume_from_what_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "ppo", env={}, total_frames=50)
    before_records(run, lambda: spoil_adam(run))
    with monkeypatch.context() as patched:
        patched.setattr("minerva_torchrl.runs.snapshot.not_finite", lambda parts: None)
        run.train()
    with pytest.raises(CheckpointError, match=r"can't be resumed from: training/.* not finite"):
        make_resumed_faulty(tmp_path, total_frames=100)
