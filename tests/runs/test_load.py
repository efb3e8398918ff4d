from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torchrl.envs import ExplorationType, set_exploration_type

from minerva_torchrl.runs import CheckpointError, evaluate, load_policy
from tests.runs.tiny import assert_same_value, column, content, fix_hash, read_csv, train


@pytest.fixture(scope="module", params=["mpo", "vmpo-discrete", "ppo", "suite"])
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / request.param, request.param).run_dir


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "one", "ppo", total_frames=50).run_dir


def test_is_the_policy_of_the_run(run_dir: Path) -> None:
    before = content(run_dir)
    policy = load_policy(run_dir)
    assert policy.checkpoint.frames == 200
    result = evaluate(policy.make_env(episodes=2), policy.actor, seed=policy.evaluation_seed)
    last = read_csv(run_dir / "eval.csv")[-1]
    assert result.row() == {name: float(v) for name, v in last.items() if name != "frames"}
    assert content(run_dir) == before


def test_best(run_dir: Path) -> None:
    policy = load_policy(str(run_dir), name="best")
    result = evaluate(policy.make_env(episodes=2), policy.actor, seed=policy.evaluation_seed)
    assert result.row()["return_mean"] == max(column(run_dir / "eval.csv", "return_mean"))


def test_from_a_checkpoint(one_run: Path) -> None:
    folder = load_policy(one_run)
    checkpoint = load_policy(one_run / "checkpoints" / "last")
    assert_same_value(dict(folder.actor.state_dict()), dict(checkpoint.actor.state_dict()))
    assert checkpoint.config == folder.config


def test_training_itself_is_not_set_up(one_run: Path) -> None:
    policy = load_policy(one_run)
    env = policy.make_env(episodes=3)
    assert env.batch_size == (3,)
    assert policy.config.env.num_envs == 2  # as it was
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        action = policy.actor(env.reset())["action"]
    assert action.shape == (3, 1)


def test_seeds_of_environments(one_run: Path) -> None:
    policy = load_policy(one_run)
    usual, again, other = (policy.make_env(seed=s).reset()["observation"] for s in (None, None, 5))
    assert torch.equal(usual, again)
    assert not torch.equal(usual, other)


def test_a_moved_folder(one_run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(one_run, tmp_path / "elsewhere", symlinks=True)
    assert load_policy(moved).checkpoint.path.is_relative_to(tmp_path)


def test_a_copy_without_links(one_run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(one_run, tmp_path / "copied", symlinks=False)
    assert load_policy(copied, name="best").checkpoint.frames >= 0
    assert load_policy(copied).checkpoint.frames == 50


def test_errors(one_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_policy(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        load_policy(tmp_path)
    broken = shutil.copytree(one_run, tmp_path / "broken", symlinks=True)
    (broken / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"no config.yaml"):
        load_policy(broken)
    with pytest.raises(CheckpointError, match="third"):
        load_policy(one_run, name="third")


def test_a_model_without_its_networks(one_run: Path, tmp_path: Path) -> None:
    shutil.copytree(one_run, tmp_path / "run", symlinks=True)
    folder = (tmp_path / "run" / "checkpoints" / "last").resolve()
    torch.save({"transforms": {}}, folder / "model.pt")
    fix_hash(folder, "model")
    with pytest.raises(CheckpointError, match=r"does not fit the run: KeyError, 'loss'"):
        load_policy(tmp_path / "run")


def test_settings_of_another_run(one_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(one_run, tmp_path / "run", symlinks=True)
    settings = folder / "config.yaml"
    text = settings.read_text()
    settings.write_text(text.replace("actor_sizes:\n  - 8", "actor_sizes:\n  - 9"))
    with pytest.raises(CheckpointError, match=r"is from other networks: .* instead of"):
        load_policy(folder)
    settings.write_text(text.replace("name: gym:Pendulum-v1", "name: gym:Pendulu-v1"))
    with pytest.raises((CheckpointError, ValueError), match="Did you mean 'Pendulum-v1'"):
        load_policy(folder)
