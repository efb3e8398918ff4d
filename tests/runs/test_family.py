"""Runs with other policies, critics and objectives: training, resuming, acting, refusing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minerva_torchrl.algorithms.family import make_critic
from minerva_torchrl.algorithms.mpo import PRESETS
from minerva_torchrl.objectives.critics import (
    CategoricalCritic,
    GaussianMixtureCritic,
    TwoHotCritic,
)
from minerva_torchrl.runs import load_policy, open_checkpoint, parse_config
from tests.runs.test_parts import go_on
from tests.runs.tiny import (
    EXAMPLES,
    arguments,
    assert_same_parameters,
    column,
    dotted,
    nested,
    resume,
    run_script,
    tiny_config,
    train,
)

CARTPOLE = {"env.name": "gym:CartPole-v1"}
ENERGY = {"env.wrappers": ["minerva_torchrl.envs.energy:EnergyCost"]}
MEMBERS: dict[str, dict[str, Any]] = {
    "discrete": {**CARTPOLE, "network.critic": "quantile"},
    "full covariance": {"network.policy": "full_covariance"},
    "categorical critic": {
        "network.critic": "categorical",
        "network.critic_kwargs": {"v_min": -20.0, "v_max": 0.0, "adaptive": True},
        "network.num_critics": 2,
    },
    "objectives": {**ENERGY, "loss.objectives": {"energy": {"epsilon": 0.1, "reward": "energy"}}},
    "objectives apart": {
        **ENERGY,
        "loss.objectives": {"energy": {"epsilon": 0.1, "reward": "energy"}},
        "network.objective_networks": "separate",
        "network.num_critics": 2,
    },
}


@pytest.mark.parametrize(
    "member",
    [
        x if x in ("discrete", "objectives") else pytest.param(x, marks=pytest.mark.slow)
        for x in MEMBERS
    ],
)
def test_train_resume_and_act(member: str, tmp_path: Path) -> None:
    """A run that was stopped and resumed ends as one that was not, and its policy acts."""
    changes = MEMBERS[member]
    trust = {"trust": True} if "env.wrappers" in changes else {}
    train(tmp_path / "whole", "mpo", **changes)
    train(tmp_path / "parts", "mpo", **{**changes, "total_frames": 100})
    if trust:
        go_on(tmp_path / "parts", **trust).train()
    else:
        resume(tmp_path / "parts", total_frames=200)
    assert_same_parameters(tmp_path / "whole", tmp_path / "parts")
    assert np.isfinite(column(tmp_path / "whole" / "metrics.csv", "loss_qvalue")[-1])
    policy = load_policy(tmp_path / "whole", **trust)
    size = 4 if "discrete" in member else 3
    assert policy.predict(np.zeros((5, size), np.float32)).shape[0] == 5


@pytest.mark.parametrize("algo", ["vmpo", "ppo"])
@pytest.mark.parametrize("critic", ["two_hot", "hl_gauss"])
def test_bins_of_state_values(algo: str, critic: str, tmp_path: Path) -> None:
    """A support that grows is resumed as well."""
    settings = {"v_min": -0.1, "v_max": 0.1, "num_atoms": 5, "adaptive": True}
    changes: dict[str, Any] = {"network.critic": critic, "network.critic_kwargs": settings}
    if algo == "ppo":
        # A rate that falls would fall with the number of frames.
        changes |= {"loss.clip_value": False, "optim.anneal_lr": False}
    train(tmp_path / "whole", algo, **changes)
    train(tmp_path / "parts", algo, **{**changes, "total_frames": 100})
    resume(tmp_path / "parts", total_frames=200)
    assert_same_parameters(tmp_path / "whole", tmp_path / "parts")
    model = open_checkpoint(tmp_path / "whole").load("model")["loss"]
    assert model["critic.support.low"] < -0.1
    assert np.isfinite(column(tmp_path / "whole" / "metrics.csv", "clipped_targets")[-1])


@pytest.mark.parametrize(
    ("algo", "changes", "message"),
    [
        ("ppo", {"network.critic": "two_hot"}, "network.critic=two_hot needs loss.clip_value=fal"),
        (
            "vmpo",
            {"network.critic": "hl_gauss", "loss.clip_value": 0.2},
            "network.critic=hl_gauss needs loss.clip_value=null",
        ),
        (
            "vmpo",
            {"network.critic": "two_hot", "loss.loss_critic_type": "l1"},
            "loss.loss_critic_type=l1 is for network.critic=scalar",
        ),
        ("vmpo", {"network.critic": "quantile"}, "network.critic"),
        (
            "ppo",
            {"network.critic_kwargs": {"v_min": 0}},
            "network.critic_kwargs: ScalarCritic has no",
        ),
    ],
)
def test_refused_critics_of_states(algo: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(algo, **changes)


def test_presets() -> None:
    """They are Acme's, with critics that the loss is made with."""
    kinds = {
        "acme-dmpo": CategoricalCritic,
        "acme-mog": GaussianMixtureCritic,
        "acme-categorical": TwoHotCritic,
    }
    for name, kind in kinds.items():
        assert PRESETS[name].loss == {**PRESETS["acme"].loss, "critic_coeff": 1.0}
        config = parse_config("mpo", {"preset": name, **PRESETS[name].settings()})
        assert config.network.critic in ("categorical", "gaussian_mixture", "two_hot")
        critic = make_critic(config.network.critic, config.network.critic_kwargs)
        assert isinstance(critic, kind)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network.critic_kwargs": {"atoms": 3}}, "network.critic_kwargs: ScalarCritic has no"),
        (
            {"network.critic": "categorical", "network.critic_kwargs": {"vmin": 0}},
            "CategoricalCritic has no argument 'vmin'. Allowed: .* Did you mean v_min",
        ),
        (
            {"network.critic": "categorical", "network.critic_kwargs": {"num_atoms": 1}},
            "network.critic_kwargs: num_atoms must be at least 2, got 1",
        ),
        (
            {
                "network.critic": "quantile",
                "loss.value_estimator": "retrace",
                "replay_buffer.sequence_length": 4,
                "replay_buffer.n_steps": 1,
            },
            "network.critic=quantile takes one-step and n-step targets",
        ),
        (
            {"network.critic": "two_hot", "loss.loss_function": "l1"},
            "loss.loss_function=l1 is for network.critic=scalar, got two_hot",
        ),
        ({"loss.objectives": {"energy": None}}, r"objectives\['energy'\] needs a bound"),
        ({"loss.objectives": {"energy": -1.0}}, r"objectives\['energy'\].epsilon must be positive"),
        (
            {"loss.objectives": {"energy": {"epsilo": 1}}},
            "loss.objectives: energy: Objective has no argument 'epsilo'.* Did you mean epsilon",
        ),
        (
            {"loss.objectives": {"energy": {"reward": "energy"}}},
            "loss.objectives: energy: Objective needs epsilon, got reward",
        ),
    ],
)
def test_refused_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("mpo", **changes)


def test_bounds_of_other_policies_are_refused(tmp_path: Path) -> None:
    """A default that is not for this policy is left out; what was set for it is an error."""
    with pytest.raises(ValueError, match="epsilon_mean does not apply to a policy whose"):
        train(tmp_path / "run", "mpo", **CARTPOLE, **{"loss.epsilon_mean": 0.3})


def test_settings_are_nested() -> None:
    config = parse_config("mpo", nested({"loss.objectives": {"energy": 0.1}}))
    assert config.loss.objectives == {"energy": 0.1}


@pytest.mark.parametrize(
    "script",
    [
        "mpo_discrete.py",
        pytest.param("mpo_hybrid.py", marks=pytest.mark.slow),
        pytest.param("mpo_distributional.py", marks=pytest.mark.slow),
        pytest.param("mpo_multi_objective.py", marks=pytest.mark.slow),
    ],
)
def test_examples(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They train, and go on where they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script
    settings = dotted("mpo", total_frames=100, run_dir="run")
    del settings["env.name"]
    assert run_script(script, *arguments(settings)) == 0
    assert run_script(script, "resume=run", "total_frames=140", "trust=true") == 0
    assert open_checkpoint("run").frames == 140
