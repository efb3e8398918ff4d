"""Policies that are passed on: what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minerva_torchrl.__main__ import main
from minerva_torchrl.runs import CheckpointError, evaluate, load_policy
from tests.runs.tiny import content, train

KINDS = ["mpo", "vmpo-discrete", "ppo"]  # the last one with statistics of its observations


@pytest.fixture(scope="module", params=KINDS)
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / request.param, request.param).run_dir


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with statistics of its observations. Tests change copies of it."""
    folder = tmp_path_factory.mktemp("ppo")
    run = train(folder / "run", "ppo", total_frames=50)
    load_policy(run.run_dir).publish(folder / "policy", episodes=2)
    return folder / "policy"


@pytest.fixture
def copied(published: Path, tmp_path: Path) -> Path:
    for name, data in content(published).items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_acts_like_the_run(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "new" / "policy"
    assert main(["publish", str(run_dir), "--out", str(out), "--episodes", "3"]) == 0
    assert str(out) in capsys.readouterr().out
    assert sorted(content(out)) == ["card.json", "config.yaml", "policy.safetensors"]
    first, second = load_policy(run_dir), load_policy(out)
    assert (second.frames, second.checkpoint) == (first.frames, None)
    rng = np.random.default_rng(0)
    observation = rng.normal(size=(20, first.deployed.observation_size)).astype(np.float32)
    np.testing.assert_array_equal(first.predict(observation), second.predict(observation))
    card = json.loads((out / "card.json").read_text())
    result = evaluate(second.make_env(episodes=3), second.actor, seed=second.evaluation_seed)
    assert card["return_mean"] == result.row()["return_mean"]
    assert card["frames"] == second.frames
    assert card["command"].startswith(f"python -m minerva_torchrl train {second.config.algo} ")
    assert f"seed={second.config.seed}" in card["command"]
    assert card["versions"]["torch"] == torch.__version__
    assert str(run_dir) not in "".join(data.decode("latin1") for data in content(out).values())


def test_is_evaluated_like_a_run(published: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", str(published), "--episodes", "2"]) == 0
    card = json.loads((published / "card.json").read_text())
    assert f"return {card['return_mean']:.2f}" in capsys.readouterr().out


def test_goes_to_an_empty_folder_only(published: Path) -> None:
    before = content(published)
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        load_policy(published).publish(published)
    assert content(published) == before


def test_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["publish", str(tmp_path), "--out", str(tmp_path / "policy")]) == 2
    assert "can't be published: it has no run of its own" in capsys.readouterr().err
    assert not (tmp_path / "policy").exists()


def change(file: Path, **tensors: torch.Tensor | None) -> None:
    saved = {**load_file(file), **tensors}
    save_file({name: x for name, x in saved.items() if x is not None}, file)


class TestRefused:
    def test_no_weights(self, copied: Path) -> None:
        (copied / "policy.safetensors").write_bytes(b"weights")
        with pytest.raises(CheckpointError, match="is no policy of its settings"):
            load_policy(copied)

    def test_cut_off(self, copied: Path) -> None:
        file = copied / "policy.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
        with pytest.raises(CheckpointError, match="is no policy of its settings"):
            load_policy(copied)

    @pytest.mark.parametrize("part", ["actor_network_params.", "observation_norm."])
    def test_other_tensors(self, copied: Path, part: str) -> None:
        file = copied / "policy.safetensors"
        name = next(name for name in load_file(file) if name.startswith(part))
        change(file, **{name: torch.zeros(77)})
        with pytest.raises(CheckpointError, match=r"is no policy of its settings: .*"):
            load_policy(copied)
        change(file, **{name: None})
        with pytest.raises(CheckpointError, match="has no"):
            load_policy(copied)

    def test_other_networks(self, copied: Path) -> None:
        config = copied / "config.yaml"
        text = config.read_text()
        assert "actor_sizes:\n  - 8\n" in text
        config.write_text(text.replace("actor_sizes:\n  - 8\n", "actor_sizes:\n  - 9\n"))
        with pytest.raises(CheckpointError, match="is no policy of its settings"):
            load_policy(copied)

    @pytest.mark.parametrize("card", ["", "[]", '{"frames": -1}', '{"frames": "many"}', "{}"])
    def test_card_without_frames(self, copied: Path, card: str) -> None:
        (copied / "card.json").write_text(card)
        with pytest.raises(CheckpointError, match=r"card\.json has no number of frames"):
            load_policy(copied)
