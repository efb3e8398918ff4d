"""The policies in pretrained/: what each folder has, and that they do what their cards say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import results
from minerva_torchrl.runs import evaluate, load_policy

FOLDER = Path(__file__).parents[1] / "pretrained"
POLICIES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", POLICIES)
def test_pretrained_folder(name: str) -> None:
    """The files of a policy, small enough for a repository."""
    files = {path.name: path for path in (FOLDER / name).iterdir()}
    assert set(files) == {"card.json", "config.yaml", "policy.safetensors"}
    assert files["policy.safetensors"].stat().st_size < 1_000_000
    card = json.loads(files["card.json"].read_text())
    assert name == f"{card['algo']}-{card['task']}"
    assert {"seed", "frames", "episodes", "return_mean", "command", "versions"} <= set(card)
    recorded = FOLDER.parent / "results" / "suite" / f"{name}-{card['seed']}" / "eval.csv"
    assert recorded.is_file()


@pytest.mark.parametrize("name", ["mpo-cartpole-balance", "mpo-cartpole-swingup"])
def test_pretrained_return(name: str) -> None:
    """What `python -m minerva_torchrl evaluate` measures is what the card says."""
    card = json.loads((FOLDER / name / "card.json").read_text())
    policy = load_policy(FOLDER / name)
    env = policy.make_env(episodes=card["episodes"])
    result = evaluate(env, policy.actor, seed=policy.evaluation_seed)
    assert result.row()["return_mean"] == pytest.approx(card["return_mean"], rel=0.02)


def test_index() -> None:
    """The page of the folder has the returns of the cards."""
    assert (FOLDER / "README.md").read_text() == results.index(FOLDER)
