"""Whatever Gymnasium has registered trains a batch, or is refused in one line."""

from __future__ import annotations

import warnings
from pathlib import Path

import gymnasium
import pytest

from minerva_torchrl.envs import EnvironmentFailure
from minerva_torchrl.runs import ConfigError
from tests.runs.tiny import make_run, tiny_config

SAMPLE = {
    "CartPole-v1": True,
    "Pendulum-v1": True,
    "HalfCheetah-v5": True,
    "HalfCheetah-v2": False,  # needs a package that nobody has any more
    "CarRacing-v3": False,  # needs Box2D, and observes images
    "FrozenLake-v1": False,  # observes numbers of states
    "GymV21Environment-v0": False,  # needs another package and arguments
    "phys2d/CartPole-v1": False,  # needs JAX
    "tabular/Blackjack-v0": False,  # needs JAX
}
"""Names, and whether they can be trained on here."""


def trains(name: str, folder: Path) -> bool:
    """Whether a batch was trained on. If not, it was refused in one line."""
    changes = {"env__max_episode_steps": 5, "total_frames": 20, "eval__episodes": 1}
    config = tiny_config(
        "ppo",
        env__name=f"gym:{name}",
        collector__frames_per_batch=20,
        optim__minibatch_size=10,
        **changes,
    )
    refusal = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's own, about old versions
            run = make_run(config, folder)
            run.train()
    except (ConfigError, EnvironmentFailure) as error:
        refusal = error
    if refusal is None:
        assert run.updates > 0
        return True
    assert len(str(refusal).splitlines()) == 1
    assert len(str(refusal)) < 1000
    assert name in str(refusal) or "env.name" in str(refusal)
    assert not folder.exists() or isinstance(refusal, EnvironmentFailure)
    return False


@pytest.mark.parametrize(("name", "wanted"), SAMPLE.items())
def test_some_of_the_registry(name: str, wanted: bool, tmp_path: Path) -> None:
    assert trains(name, tmp_path / "run") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(gymnasium.registry))
def test_the_whole_registry(name: str, tmp_path: Path) -> None:
    trains(name, tmp_path / "run")
