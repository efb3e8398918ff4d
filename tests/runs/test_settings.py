from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from minerva_torchrl.presets import PRESETS
from minerva_torchrl.runs import (
    CheckpointError,
    ConfigError,
    MPOConfig,
    load_config,
    parse_config,
)
from minerva_torchrl.runs.assemble import assemble
from minerva_torchrl.runs.folder import plain_settings
from minerva_torchrl.runs.run import Run
from minerva_torchrl.runs.settings import affects_learning
from tests.runs.tiny import content, make_run, nested, tiny_config

# Names and types ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "name", "value", "message"),
    [
        # Names.
        (
            "mpo",
            "sead",
            1,
            r"there is no setting 'sead'. Did you mean seed\? Allowed: algo, preset,",
        ),
        ("mpo", "optim.lr_acto", 1e-3, "no setting 'optim.lr_acto'. Did you mean optim.lr_actor"),
        (
            "mpo",
            "optim.xyz",
            1,
            "no setting 'optim.xyz'. Allowed: optim.optimizer, optim.momentum, ",
        ),
        ("ppo", "replay_buffer.size", 10, "there is no setting 'replay_buffer'. "),
        (
            "vmpo",
            "loss.epsilon_men",
            0.1,
            "Did you mean loss.epsilon_mean",
        ),
        ("mpo", "env.reward_scaling", True, "there is no setting 'env.reward_scaling'. "),
        # An integer.
        ("mpo", "seed", 1.5, r"seed must be an integer, got 1.5 \(float\)"),
        ("mpo", "seed", True, r"seed must be an integer, got True \(bool\)"),
        ("mpo", "seed", "1", r"seed must be an integer, got '1' \(str\)"),
        ("mpo", "total_frames", None, "total_frames must be an integer, got null"),
        ("mpo", "env.num_envs", [1], r"env.num_envs must be an integer, got \[1\] \(list\)"),
        # A number.
        ("mpo", "loss.gamma", "0.1", r"loss.gamma must be a number, got '0.1' \(str\)"),
        ("mpo", "loss.epsilon", "0.1", r"loss.epsilon must be a number or null, got '0.1'"),
        ("mpo", "optim.lr_actor", False, r"optim.lr_actor must be a number, got False \(bool\)"),
        ("mpo", "loss.gamma", {}, r"loss.gamma must be a number, got {} \(dict\)"),
        # True or false.
        ("ppo", "optim.anneal_lr", 1, r"optim.anneal_lr must be true or false, got 1 \(int\)"),
        ("ppo", "env.observation_norm", "yes", "observation_norm must be true or false, got 'yes'"),
        ("mpo", "eval.video", None, "eval.video must be true or false, got null"),
        # A text.
        ("mpo", "env.name", 3, r"env.name must be a text, got 3 \(int\)"),
        ("mpo", "device", None, "device must be a text, got null"),
        # A list.
        ("mpo", "network.actor_sizes", 64, "actor_sizes must be a list, each item an integer, got"),
        ("mpo", "network.actor_sizes", "64", r"each item an integer, got '64' \(str\)"),
        ("mpo", "network.actor_sizes", [64, "64"], r"got \[64, '64'\] \(list\)"),
        ("mpo", "network.actor_sizes", [64, 0.5], r"got \[64, 0.5\] \(list\)"),
        ("mpo", "network.actor_sizes", [True], r"got \[True\] \(list\)"),
        # One of several.
        ("mpo", "loss.policy_states", "last", "must be one of next, current, both, got 'last'"),
        ("mpo", "logger.backend", True, "logger.backend must be one of csv, tensorboard, wandb, "),
        ("ppo", "algo", "mpo", "algo must be one of ppo, got 'mpo'"),
        # Something or nothing.
        ("mpo", "env.max_episode_steps", "30", "must be an integer or null, got '30'"),
        ("mpo", "env.max_episode_steps", True, "must be an integer or null, got True"),
        ("mpo", "optim.clip_actor", "none", "must be a number or null, got 'none'"),
        ("mpo", "run_dir", 7, "run_dir must be a text or null, got 7"),
        ("vmpo", "optim.lr_scaling", "M", r"must be one of 1/sqrt\(M\), 1/M or null, got 'M'"),
        ("mpo", "loss.action_penalization", 0, "must be true or false or null, got 0"),
        # Sections.
        ("mpo", "optim", 3, r"optim must be a section of settings, got 3 \(int\)"),
        ("mpo", "loss", None, "loss must be a section of settings, got null"),
        ("ppo", "eval", ["interval"], "eval must be a section of settings, got"),
        # Presets.
        (
            "mpo",
            "preset",
            "acm",
            "preset must be one of default, minerva-seed, acme, tonic, acme-dmpo",
        ),
        ("ppo", "preset", "acme", "one of default, minerva-seed for ppo, got 'acme'"),
    ],
)
def test_wrong_names_and_types(algo: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(algo, nested({name: value}))
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("preset", [["acme"], {"acme": 1}, None, 1])
def test_a_preset_that_is_no_name(preset: Any) -> None:
    with pytest.raises(ConfigError, match="preset must be one of default"):
        parse_config("mpo", {"preset": preset})


def test_unknown_algorithm() -> None:
    with pytest.raises(ConfigError, match="algo must be one of mpo, vmpo, ppo, got 'sac'"):
        parse_config("sac", {})


def test_integers_are_numbers_and_nothing_else_is_converted() -> None:
    config = parse_config("mpo", nested({"loss.epsilon": 1, "network.actor_sizes": [4, 4]}))
    assert type(config.loss.epsilon) is float
    assert config.network.actor_sizes == (4, 4)
    assert parse_config("mpo", nested({"optim.clip_actor": None})).optim.clip_actor is None


def test_all_problems_are_told_together() -> None:
    settings = nested({"sead": 1, "optim.lr_critic": "fast", "env.num_envs": True, "loss": 1})
    with pytest.raises(ConfigError) as caught:
        parse_config("mpo", settings)
    assert len(caught.value.problems) == 4
    assert str(caught.value).splitlines() == caught.value.problems


# Impossible combinations -------------------------------------------------------------------------

SEQUENCES = {
    "replay_buffer.n_steps": 1,
    "replay_buffer.sequence_length": 4,
    "loss.value_estimator": "retrace",
}


def positive(algo: str, *names: str) -> list[tuple[str, dict[str, Any], str]]:
    return [(algo, {name: 0}, f"{name} must be positive, got 0") for name in names]


IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    *positive("mpo", "total_frames", "num_threads", "max_skipped", "env.frame_skip"),
    *positive("mpo", "env.max_episode_steps", "logger.interval"),
    *positive("vmpo", "collector.frames_per_batch"),
    *positive("mpo", "eval.interval", "eval.episodes", "checkpoint.interval", "checkpoint.keep"),
    *positive("mpo", "replay_buffer.n_steps", "replay_buffer.batch_size", "env.num_envs"),
    ("mpo", {"optim.lr_actor": 0.0}, "optim.lr_actor must be positive, got 0.0"),
    ("mpo", {"optim.lr_temperature": -1e-3}, "optim.lr_temperature must be positive, got -0.001"),
    ("mpo", {"optim.adam_eps": 0.0}, "optim.adam_eps must be positive"),
    ("mpo", {"optim.lr_critic": float("nan")}, "optim.lr_critic must be finite, got nan"),
    ("vmpo", {"optim.lr_alpha": 0.0}, "optim.lr_alpha must be positive"),
    ("mpo", {"total_frames": -1}, "total_frames must be positive, got -1"),
    ("ppo", {"optim.lr": 0.0}, "optim.lr must be positive"),
    ("ppo", {"optim.num_epochs": 0}, "optim.num_epochs must be positive, got 0"),
    ("ppo", {"optim.minibatch_size": 0}, "optim.minibatch_size must be positive, got 0"),
    ("mpo", {"seed": -1}, r"seed must be between 0 and 2\*\*32 - 1, got -1"),
    ("mpo", {"seed": 2**32}, r"seed must be between 0 and 2\*\*32 - 1, got 4294967296"),
    ("mpo", {"env.num_workers": -1}, "env.num_workers must not be negative, got -1"),
    (
        "vmpo",
        {"env.num_envs": 8, "env.num_workers": 3},
        "env.num_envs must be a multiple of env.num_workers, got 8 and 3",
    ),
    (
        "mpo",
        {"env.num_envs": 3},
        "collector.frames_per_batch must be a multiple of env.num_envs, got 50 and 3",
    ),
    ("mpo", {"network.actor_sizes": []}, r"network.actor_sizes must have at least one .* got \[\]"),
    ("ppo", {"network.critic_sizes": [8, 0]}, r"network.critic_sizes must have .* got \[8, 0\]"),
    ("mpo", {"loss.gamma": 1.5}, "loss.gamma must be between 0 and 1, got 1.5"),
    ("vmpo", {"loss.lmbda": -0.1}, "loss.lmbda must be between 0 and 1, got -0.1"),
    (
        "mpo",
        {"replay_buffer.sequence_length": 4, "replay_buffer.n_steps": 1},
        "loss.value_estimator=td0 is for transitions .* got sequences of 4",
    ),
    (
        "mpo",
        {"loss.value_estimator": "td_lambda"},
        "loss.value_estimator=td_lambda needs replay_buffer.sequence_length of at least 2, got 1",
    ),
    (
        "mpo",
        {**SEQUENCES, "replay_buffer.n_steps": 5},
        r"replay_buffer.n_steps must be 1 for sequences .*sequence_length=4\), got 5",
    ),
    (
        "mpo",
        {"replay_buffer.size": 63},
        "replay_buffer.size must be at least replay_buffer.batch_size, got 63 and 64",
    ),
    (
        "mpo",
        {"replay_buffer.size": 49, "replay_buffer.batch_size": 8},
        "replay_buffer.size must be at least collector.frames_per_batch, got 49 and 50",
    ),
    ("mpo", {"replay_buffer.warmup_frames": -1}, "warmup_frames must not be negative, got -1"),
    ("mpo", {"optim.target_period": None}, "exactly one of optim.target_period and .* None and N"),
    ("mpo", {"optim.target_tau": 0.1}, "exactly one of optim.target_period and .* 100 and 0.1"),
    (
        "mpo",
        {"optim.updates_per_frame": 0.001},
        "optim.updates_per_frame times collector.frames_per_batch must be at least one update",
    ),
    (
        "ppo",
        {"optim.minibatch_size": 60},
        "collector.frames_per_batch must be a multiple of optim.minibatch_size, got 2048 and 60",
    ),
]


@pytest.mark.parametrize(("algo", "settings", "message"), IMPOSSIBLE)
def test_impossible_combinations(algo: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(algo, nested(settings))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            {"replay_buffer.size": 0},
            ["replay_buffer.size must be positive", "batch_size, got", "frames_per_batch"],
        ),
        (
            {"replay_buffer.sequence_length": 0},
            ["replay_buffer.sequence_length must be positive"],
        ),
        (
            {"optim.updates_per_frame": 0.0},
            ["optim.updates_per_frame must be positive", "must be at least one update"],
        ),
        (
            {"seed": -1, "eval.episodes": 0, "loss.gamma": 2.0, "optim.target_tau": 0.1},
            ["eval.episodes must be pos", "seed must be", "loss.gamma must", "exactly one of"],
        ),
    ],
)
def test_several_impossible_settings(settings: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("mpo", nested(settings))
    problems = caught.value.problems
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert message in problem


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("mpo", "eval.seed", -1, "seed must be between 0 and"),
        ("mpo", "optim.num_policy_steps", 0, "num_policy_steps must be"),
        ("mpo", "optim.clip_critic", -1.0, "clip_critic must be positive"),
        ("mpo", "optim.clip_actor", 0.0, "clip_actor must be positive"),
        ("mpo", "optim.clip_dual", 0.0, "clip_dual must be positive"),
        ("mpo", "optim.target_period", 0, "period must be"),
        (
            "mpo",
            "network.num_critics",
            0,
            "num_critics must be|qvalue_network must not be an empty",
        ),
        ("mpo", "network.init_scale", -0.5, "init_scale must be positive"),
        ("mpo", "loss.epsilon", -0.1, "epsilon must be"),
        ("mpo", "loss.num_action_samples", 0, "num_action_samples must be"),
        ("vmpo", "optim.num_policy_steps", 0, "num_policy_steps must be"),
        ("vmpo", "optim.clip", 0.0, "clip must be positive"),
        ("vmpo", "loss.top_k_fraction", 1.5, "top_k_fraction must be"),
        ("ppo", "optim.clip", 0.0, "clip must be positive"),
        ("ppo", "loss.clip_epsilon", -0.1, "loss.clip_epsilon must be between 0 and 1"),
        ("ppo", "optim.target_kl", float("nan"), "target_kl must be"),
    ],
)
def test_values_out_of_range(
    kind: str, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=message):
        make_run(tiny_config(kind, **{name: value}), folder)
    assert not folder.exists()


def test_a_moving_average_beyond_one(tmp_path: Path) -> None:
    changes = {"optim.target_period": None, "optim.target_tau": 1.5}
    with pytest.raises(ConfigError, match="tau must be"):
        make_run(tiny_config("mpo", **changes), tmp_path / "run")


def test_sequences_longer_than_episodes_and_batches() -> None:
    changes = {"env.max_episode_steps": 3, "env.num_envs": 10, "collector.frames_per_batch": 20}
    assert tiny_config("mpo-retrace", **changes).replay_buffer.sequence_length == 4


# There and back ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "preset"), [(algo, name) for algo, presets in PRESETS.items() for name in presets]
)
def test_settings_survive_a_file(algo: str, preset: str, tmp_path: Path) -> None:
    config = parse_config(algo, {"preset": preset, "seed": 3, "eval": {"interval": 7}})
    assert config.preset == preset
    assert list(config.problems()) == []
    text = OmegaConf.to_yaml(OmegaConf.create(plain_settings(config, tmp_path)))
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path) == replace(config, run_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "it has no config.yaml"),
        ("", "is not the configuration of a run"),
        ("[1, 2]", "is not the configuration of a run"),
        ("a: [", "is not the configuration of a run"),
        ("seed: 1", "is not the configuration of a run"),
        ("algo: [mpo]", "can't be used|is not the configuration"),
        ("algo: sac", "has settings that can't be used: algo must be one of"),
        ("algo: mpo\nsead: 1", "has settings that can't be used: there is no setting 'sead'"),
        ("algo: mpo\nseed: ${sead}", "seed|is not the configuration"),
        ("\x00\x01", "is not the configuration of a run"),
    ],
)
def test_folders_without_settings_of_a_run(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_config(tmp_path / "nothing")


# Before anything is written ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "mpo",
            {"env.name": "cheeta-run"},
            "env.name: there is no environment 'cheeta-run'. Did you mean 'cheetah-run'",
        ),
        ("ppo", {"env.name": "gym:CartPol-v1"}, "env.name: .*Did you mean 'CartPole-v1'"),
        (
            "mpo",
            {"env.name": "gym:CartPole-v1", "network.policy": "full_covariance"},
            "network.policy=full_covariance does not fit a task whose actions are discrete",
        ),
        ("mpo", {"device": "nonsense"}, "device 'nonsense' can't be used here: "),
        ("mpo", {"replay_buffer.device": "nonsense"}, "device 'nonsense' can't be used here: "),
    ],
)
def test_runs_that_cannot_be_built(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(tiny_config(kind, **changes), tmp_path / "a" / "run")
    assert content(tmp_path) == {}


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_replay_is_where_it_should_be(name: str) -> None:
    config = tiny_config("mpo", device="cpu", **{"replay_buffer.device": name})
    assert assemble(config).replay_buffer.storage.device == torch.device("cpu")
    assert not affects_learning("replay_buffer.device")
    assert affects_learning("replay_buffer.size")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device 'cuda' can't be used here: ") as caught:
        make_run(tiny_config("mpo", device="cuda"), tmp_path / "run")
    assert len(str(caught.value).splitlines()) == 1
    assert content(tmp_path) == {}


def test_a_run_checks_settings_that_were_not_parsed(tmp_path: Path) -> None:
    config = MPOConfig(total_frames=0, seed=-1)
    with pytest.raises(ConfigError) as caught:
        Run(config, tmp_path / "run")
    assert len(caught.value.problems) == 2
