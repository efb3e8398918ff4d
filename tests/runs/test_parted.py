"""Runs on tasks whose actions have several parts: training, resuming, acting, exporting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.runs import ConfigError, load_policy, open_checkpoint
from minerva_torchrl.runs.assemble import assemble
from tests.envs.hybrid import Hybrid, Switches
from tests.runs.test_parts import go_on
from tests.runs.tiny import (
    SEQUENCES,
    assert_same_parameters,
    column,
    run_script,
    tiny_config,
    train,
)

HYBRID = {"env.factory": "tests.envs.hybrid:Hybrid"}
SWITCHES = {"env.factory": "tests.envs.hybrid:Switches"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mpo": ("mpo", HYBRID),
    "mpo, Retrace": ("mpo", {**HYBRID, **SEQUENCES}),
    "mpo, discrete": ("mpo", {**SWITCHES, "network.critic": "two_hot"}),
    "mpo, full covariance": ("mpo", {**HYBRID, "network.policy": "full_covariance"}),
    "vmpo": ("vmpo", {**HYBRID, "loss.importance_weights": True}),
    "vmpo, tanh": ("vmpo", {**HYBRID, "network.policy": "tanh_gaussian", "network.shared": True}),
    "vmpo, discrete": ("vmpo", SWITCHES),
}


@pytest.mark.parametrize(
    "case",
    [
        x if x in ("mpo", "vmpo, discrete") else pytest.param(x, marks=pytest.mark.slow)
        for x in CASES
    ],
)
def test_train_resume_and_act(case: str, tmp_path: Path) -> None:
    """A run that was stopped and resumed ends as one that was not, and its policy acts."""
    algo, changes = CASES[case]
    train(tmp_path / "whole", algo, **changes)
    train(tmp_path / "parts", algo, **{**changes, "total_frames": 100})
    go_on(tmp_path / "parts", trust=True).train()
    assert_same_parameters(tmp_path / "whole", tmp_path / "parts")
    assert np.isfinite(column(tmp_path / "whole" / "metrics.csv", "loss_actor")[-1])
    policy = load_policy(tmp_path / "whole", trust=True)
    env = Switches() if "discrete" in case else Hybrid()
    for deterministic in (True, False):
        observation = env.observation_space.sample()
        action = policy.predict(observation, deterministic=deterministic)
        assert env.action_space.contains(action), action
    actions = policy.predict(np.zeros((5, *observation.shape), np.float32))
    assert (actions if "discrete" in case else actions["arm"]).shape[0] == 5


def test_constraints_and_metrics_by_part(tmp_path: Path) -> None:
    train(tmp_path / "run", "mpo", **HYBRID)
    for name in ("kl_arm_mean_rel", "kl_arm_stddev_rel", "kl_tool_policy_rel", "tool_entropy"):
        assert np.isfinite(column(tmp_path / "run" / "metrics.csv", name)[-1])
    model = open_checkpoint(tmp_path / "run").load("model")["loss"]
    assert model["duals.alpha_arm_mean.log"].shape == (1,)
    assert model["duals.alpha_tool_policy.log"].shape == ()


def test_export(tmp_path: Path) -> None:
    """The file has the form that the environment takes."""
    train(tmp_path / "run", "vmpo", **HYBRID)
    policy = load_policy(tmp_path / "run", trust=True)
    policy.export(tmp_path / "policy.pt2")
    observation = torch.rand(3, 2) * 2 - 1
    exported = torch.export.load(tmp_path / "policy.pt2").module()(observation)
    expected = policy.predict(observation.numpy())
    assert exported.keys() == expected.keys() == {"arm", "tool"}
    for name, part in exported.items():
        np.testing.assert_allclose(part.numpy(), expected[name], rtol=1e-5)
    file = str(tmp_path / "example.pt2")  # the example compares all parts
    assert run_script("export.py", str(tmp_path / "run"), file, "--trust") == 0


def test_critic_tells_parts_apart() -> None:
    """Its value changes with every part of the action."""
    config = tiny_config("mpo", **HYBRID)
    assembly = assemble(config)
    algorithm = ALGORITHMS["mpo"](config)
    _, (critic,) = algorithm.make_networks(assembly.env)
    data = assembly.env.rollout(1)[:, 0]
    value = critic(data.clone())["state_action_value"]
    for name in ("arm", "tool"):
        changed = data.clone()
        part = changed["action", name]
        changed["action", name] = part + 1 if part.is_floating_point() else part.roll(1, -1)
        assert (critic(changed)["state_action_value"] != value).all()


@pytest.mark.parametrize(
    ("algo", "changes", "message"),
    [
        ("mpo", {**SWITCHES, "network.policy": "full_covariance"}, "does not fit a task"),
        ("mpo", {**SWITCHES, "loss.epsilon_mean": 0.3}, "epsilon_mean does not apply"),
        (
            "mpo",
            {**HYBRID, "network.policy": "full_covariance", "network.scale": "free"},
            "needs network.scale other than free",
        ),
        ("ppo", HYBRID, "PPO .*several parts.*MPO and V-MPO"),
    ],
)
def test_refused(algo: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble(tiny_config(algo, **changes))
