"""``collector.noise`` in runs: who has it, what is refused, and that checkpoints have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minerva_torchrl.runs import CheckpointError, ConfigError, open_checkpoint
from minerva_torchrl.runs.assemble import assemble
from minerva_torchrl.runs.snapshot import restore
from tests.runs.tiny import tiny_config, train


def noise_after_a_batch(kind: str, **changes: Any) -> torch.Tensor | None:
    assembly = assemble(tiny_config(kind, **changes))
    assembly.collector.rollout()
    return assembly.collector.noise


@pytest.mark.parametrize("kind", ["mpo-envs", "suite"])
def test_mpo_explores_with_pink_noise(kind: str) -> None:
    noise = noise_after_a_batch(kind)
    assert noise is not None
    assert noise.shape == (9, 2, 1) if kind == "mpo-envs" else (9, 1, 1)


@pytest.mark.parametrize("kind", ["vmpo", "ppo"])
def test_on_policy_algorithms_do_not(kind: str) -> None:
    assert noise_after_a_batch(kind) is None


def test_full_covariance() -> None:
    noise = noise_after_a_batch("mpo", network__policy="full_covariance", collector__noise="pink")
    assert noise is not None


def test_discrete_actions_have_none() -> None:
    assert noise_after_a_batch("mpo", env__name="gym:CartPole-v1") is None


def test_discrete_actions_can_not_have_it() -> None:
    with pytest.raises(ConfigError, match="noise=pink: the policy must have Independent"):
        noise_after_a_batch("mpo", env__name="gym:CartPole-v1", collector__noise="pink")


def test_a_word_that_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"collector\.noise"):
        tiny_config("mpo", collector__noise="brown")


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "mpo-envs")
    noise = run.assembly.collector.noise
    other = assemble(run.config)
    restore(other, open_checkpoint(tmp_path / "run"))
    assert noise is not None
    assert torch.equal(other.collector.noise, noise)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (torch.full((9, 2, 1), torch.nan), "noise is not finite"),
        (torch.zeros(9, 3, 1), "environment.noise"),
        (torch.zeros(9, 2, 1, dtype=torch.float64), "environment.noise"),
        ("loud", "environment.noise"),
    ],
)
def test_a_checkpoint_with_other_noise(
    noise: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path / "run", "mpo-envs")
    checkpoint = open_checkpoint(tmp_path / "run")
    parts = {name: checkpoint.load(name) for name in checkpoint.parts}
    parts["environment"]["noise"] = noise
    monkeypatch.setattr(type(checkpoint), "load", lambda self, name: parts[name])
    assembly = assemble(run.config)
    with pytest.raises(CheckpointError, match=message):
        restore(assembly, checkpoint)
