from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from minerva_torchrl.runs import CheckpointError, open_checkpoint
from tests.runs.tiny import (
    Killed,
    after_records,
    assert_same_parameters,
    assert_same_runs,
    before_records,
    column,
    content,
    make_resumed,
    make_run,
    resume,
    tiny_config,
    train,
    train_and_kill,
)

# The same as without an interruption -------------------------------------------------------------


def assert_resumes(folder: Path, kind: str, *kills: int, **changes: Any) -> None:
    """A run that is killed at some frames, and resumed each time, ends like any other."""
    whole = train(folder / "whole", kind, **changes)
    first, *others = kills
    train_and_kill(folder / "killed", kind, at=first, **changes)
    for at in others:
        train_and_kill(folder / "killed", kind, at=at, resumed=True)
    resumed = resume(folder / "killed")
    assert_same_runs(whole.run_dir, resumed.run_dir)
    assert list(json.loads((folder / "killed" / "summary.json").read_text())) == list(
        json.loads((folder / "whole" / "summary.json").read_text())
    )


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mpo", {"network.num_critics": 2}),
        ("mpo-envs", {"optim.target_period": None, "optim.target_tau": 0.1}),
        ("mpo-retrace-envs", {}),
        ("suite", {}),
        ("vmpo", {"loss.temperature_update": "gradient"}),
        ("ppo", {"optim.target_kl": 1e-4}),
        pytest.param("mpo-solve", {}, marks=slow),
        pytest.param("mpo-retrace", {}, marks=slow),
        pytest.param("vmpo-discrete", {}, marks=slow),
        pytest.param("ppo-discrete", {"env.num_envs": 1}, marks=slow),
        pytest.param("ppo", {"env.observation_norm": False}, marks=slow),
    ],
)
def test_goes_on_as_if_nothing_had_happened(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    # The buffer of MPO has gone round by the checkpoint at 140 frames.
    assert_resumes(tmp_path, kind, 180, checkpoint__interval=140, **changes)


def test_ppo_goes_on_with_its_schedule_and_statistics(tmp_path: Path) -> None:
    train_and_kill(tmp_path, "ppo", at=150)
    run = make_resumed(tmp_path)
    [group] = run.assembly.trainer.optimization_stepper.optimizer.param_groups
    assert group["lr"] == pytest.approx(3e-4 / 2)  # annealed
    norm, scaling = list(run.assembly.env.transform)[-2:]
    assert norm.get_extra_state()["count.-|-.observation"] > 100  # beginnings of episodes, too
    assert scaling.get_extra_state()["moments"][2] == pytest.approx(100, abs=0.1)
    assert scaling._discounted_return.shape == (2, 1)


def test_all_generators_go_on(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    run = make_run(tiny_config("vmpo", total_frames=50), tmp_path)
    expected: list[float] = []
    before_records(run, np.random.normal)  # leaves a second one for the next call
    after_records(
        run,
        lambda: expected.extend([random.random(), np.random.normal(), torch.rand(()).item()]),
    )
    run.train()
    random.seed(4)
    np.random.seed(4)
    make_resumed(tmp_path)
    assert [random.random(), np.random.normal(), torch.rand(()).item()] == expected


@pytest.mark.parametrize("kind", ["mpo", "vmpo"])
def test_from_the_first_moment_on(kind: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, kind, 20)


def test_killed_before_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("vmpo", total_frames=100)
    killed = make_run(config, tmp_path / "killed")
    monkeypatch.setattr("minerva_torchrl.runs.loop.evaluate", kill)
    with pytest.raises(Killed):
        killed.train()
    monkeypatch.undo()
    # There is nothing to lose yet: the same command, or resuming, must do.
    try:
        resume(killed.run_dir)
    except CheckpointError:
        make_run(config, killed.run_dir).train()
    assert_same_runs(killed.run_dir, train(tmp_path / "whole", "vmpo", total_frames=100).run_dir)


def kill(*args: Any, **kwargs: Any) -> None:
    raise Killed


def test_several_times(tmp_path: Path) -> None:
    assert_resumes(tmp_path, "mpo", 50, 130, 190, checkpoint__interval=40)


@slow
@pytest.mark.parametrize("kind", ["mpo-retrace", "ppo"])
def test_environments_in_processes(kind: str, tmp_path: Path) -> None:
    changes = {"env.num_envs": 4, "env.num_workers": 2, "collector.frames_per_batch": 40}
    if kind == "ppo":
        changes["optim.minibatch_size"] = 20
    assert_resumes(tmp_path, kind, 160, **changes)


# More frames -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpo", "vmpo"])
def test_more_frames(kind: str, tmp_path: Path) -> None:
    train(tmp_path / "extended", kind, total_frames=100)
    run = resume(tmp_path / "extended", total_frames=200)
    assert run.config.total_frames == 200
    whole = train(tmp_path / "whole", kind)
    assert_same_runs(whole.run_dir, run.run_dir)
    assert make_resumed(run.run_dir).config.total_frames == 200  # written down


@pytest.mark.parametrize("kind", ["vmpo", "ppo"])
def test_more_frames_stretch_the_annealing(kind: str, tmp_path: Path) -> None:
    train(tmp_path, kind, total_frames=100, optim__anneal_lr=True)
    run = make_resumed(tmp_path, total_frames=200)
    optimizer = run.assembly.trainer.optimization_stepper.optimizer
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    run.train()
    # Four batches in all, of which two are done.
    assert sorted(set(rates), reverse=True) == pytest.approx([3e-4 / 2, 3e-4 / 4])


@pytest.mark.parametrize("changes", [{}, {"total_frames": 100}])
def test_a_complete_run_stays_as_it_is(changes: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path, "mpo")
    before = content(tmp_path)
    stream = io.StringIO()
    resume(tmp_path, stream, **changes)
    assert f"{tmp_path} is complete: it has 200 frames." in stream.getvalue()
    after = content(tmp_path)
    assert {name for name in before if before[name] != after.get(name)} == set()
    assert after.keys() == before.keys()


# What came after the checkpoint ------------------------------------------------------------------


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    train_and_kill(tmp_path, "mpo", at=180, eval__interval=40, logger__interval=20)
    assert column(tmp_path / "eval.csv", "frames") == [0, 40, 80, 120, 160]
    metrics = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(metrics) == 1 + 8
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("180,2")  # killed while it was written
    resume(tmp_path)
    assert column(tmp_path / "eval.csv", "frames") == [0, 40, 80, 120, 160, 200]
    assert column(tmp_path / "metrics.csv", "frames") == list(range(20, 220, 20))
    assert (tmp_path / "metrics.csv").read_text().splitlines()[:6] == metrics[:6]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    train_and_kill(tmp_path, "vmpo", at=150)
    for name in (".tmp-1234", "frames-000000150"):
        (tmp_path / "checkpoints" / name).mkdir()
    resume(tmp_path)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert names <= {"last", "best", "frames-000000200"} | {
        path.name for path in (tmp_path / "checkpoints").glob("best-*")
    }


def test_wall_time_adds_up(tmp_path: Path) -> None:
    train_and_kill(tmp_path, "vmpo", at=150)
    run = make_resumed(tmp_path)
    run.earlier_seconds = 1000.0
    summary = run.train()
    assert summary["wall_seconds"] > 1000
    assert open_checkpoint(tmp_path).metadata["wall_seconds"] > 1000


# Without the replay buffer -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpo", "mpo-retrace"])
def test_an_empty_buffer_if_none_was_saved(kind: str, tmp_path: Path) -> None:
    # With transitions of one step each frame is stored once.
    changes = {"checkpoint__replay_buffer": False, "replay_buffer__n_steps": 1}
    train_and_kill(tmp_path, kind, at=120, **changes)
    checkpoint = open_checkpoint(tmp_path)
    assert "replay" not in checkpoint.parts
    run = make_resumed(tmp_path)
    assert len(run.assembly.replay_buffer) == 0
    run.train()
    assert len(run.assembly.replay_buffer) == 100
    assert run.frames == 200


# Simulators that can't be restored within an episode ---------------------------------------------


class Diary(gymnasium.Env):
    """Rewards depend on a page that only the object knows; observations name the episode."""

    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.page, self.episode = 0.0, self.np_random.uniform(-1.0, 1.0)
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return np.float32([self.episode, self.np_random.uniform(-1.0, 1.0)])

    def step(self, action):
        self.page += float(action[0])
        return self.observe(), self.page * self.episode, False, False, {}


@pytest.fixture(autouse=True)
def diary() -> Any:
    gymnasium.register("Diary-v0", Diary)
    yield
    del gymnasium.registry["Diary-v0"]


DIARY = {"env.name": "gym:Diary-v0"}


def stored(folder: Path) -> dict[str, Any]:
    return open_checkpoint(folder).load("replay")["data"]["entries"]


def episodes_are_whole(entries: dict[str, Any]) -> bool:
    """Whether every stored transition begins and ends in the same episode."""
    return torch.equal(entries["observation"][:, 0], entries["next"]["observation"][:, 0])


@pytest.mark.parametrize("kind", ["mpo", "mpo-retrace-envs", "ppo"])
def test_inexact_simulators_go_on_alike(kind: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, kind, 180, checkpoint__interval=140, **DIARY)
    assert not make_resumed(tmp_path / "whole").exact


@pytest.mark.parametrize("kind", ["mpo", "vmpo"])
def test_inexact_simulators_from_the_first_moment_on(kind: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, kind, 40, **DIARY)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_episodes_end_at_the_checkpoints_of_inexact_simulators(
    num_envs: int, tmp_path: Path
) -> None:
    changes = {**DIARY, "env.num_envs": num_envs, "replay_buffer.size": 1000}
    train(tmp_path, "mpo-retrace", total_frames=140, **changes)
    entries = stored(tmp_path)
    # Batches of 20 are stored one environment after the other; the cut is in the fifth.
    assert not entries["next"]["terminated"].any()
    assert episodes_are_whole(entries)
    ids = entries["collector"]["traj_ids"].reshape(7, num_envs, -1)
    assert (ids[4, :, -1] != ids[5, :, 0]).all()
    names = entries["observation"].reshape(7, num_envs, -1, 2)[..., 0]
    assert (names[4, :, -1] != names[5, :, 0]).all()


@pytest.mark.parametrize("kind", ["mpo", "mpo-retrace"])
def test_no_transition_goes_across_the_end_of_a_session(kind: str, tmp_path: Path) -> None:
    # A session that ends between two checkpoints: at its last frame, or when it is asked to.
    changes = {**DIARY, "replay_buffer.size": 1000, "env.max_episode_steps": 50}
    train(tmp_path, kind, total_frames=60, **changes)
    resume(tmp_path, total_frames=160)
    assert episodes_are_whole(stored(tmp_path))


def test_no_transition_goes_across_a_stop(tmp_path: Path) -> None:
    changes = {**DIARY, "replay_buffer.size": 1000, "env.max_episode_steps": 50}
    run = make_run(tiny_config("mpo", **changes), tmp_path)
    before_records(run, lambda: run.stop("enough") if run.frames == 60 else None)
    run.train()
    assert open_checkpoint(tmp_path).frames == 60
    resume(tmp_path)
    assert episodes_are_whole(stored(tmp_path))


def test_exact_simulators_are_not_cut(tmp_path: Path) -> None:
    changes = {"env.max_episode_steps": 1000, "replay_buffer.size": 1000}
    train(tmp_path, "mpo-retrace", total_frames=140, **changes)
    entries = stored(tmp_path)
    assert not entries["next"]["done"].any()
    assert len(entries["collector"]["traj_ids"].unique()) == 1


def test_evaluation_has_no_part_in_it(tmp_path: Path) -> None:
    often = train(tmp_path / "often", "mpo", eval__interval=20, **DIARY)
    seldom = train(tmp_path / "seldom", "mpo", eval__interval=1000, **DIARY)
    assert_same_parameters(often.run_dir, seldom.run_dir)
