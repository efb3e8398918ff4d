from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from minerva_torchrl.runs import ConfigError, parse_config
from minerva_torchrl.runs.folder import plain_settings, resume_argument
from minerva_torchrl.runs.run import python_command
from minerva_torchrl.runs.settings import (
    check_overrides,
    default_run_dir,
    explicit_overrides,
    resumed_config,
)
from tests.runs.tiny import nested, tiny_config

# The command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lr_act=1"], "no setting 'optim.lr_act'. Did you mean optim.lr_actor"),
        (["optim.lr=1e-3"], "no setting 'optim.lr'. Allowed: optim.optimizer, optim.momentum, "),
        (["lr_actor=1"], "no setting 'lr_actor'. Did you mean optim.lr_actor?"),
        (["+xyz=1"], "no setting 'xyz'. Allowed: algo, "),
        (["seed.x=1"], "error: there is no setting 'seed.x'."),
        (
            ["preset=acm"],
            "preset must be one of default, minerva-seed, acme, tonic, acme-dmpo, ",
        ),
        (["sed=1", "env.nam=x"], "'env.nam'"),
    ],
)
def test_unknown_overrides_end_the_program(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        check_overrides("mpo", ["seed=1", *arguments])
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    lines = output.err.splitlines()
    assert len(lines) == len(arguments)
    assert all(line.startswith("error: ") for line in lines)


def test_known_overrides_pass(capsys: pytest.CaptureFixture[str]) -> None:
    check_overrides(
        "mpo",
        [
            *(
                "--multirun",
                "seed=0,1",
                "preset=acme,tonic",
                "env.name=gym:Hopper-v5",
                "loss.lmbda=1",
            ),
            *("hydra/launcher=joblib", "hydra/sweeper=optuna", "optim.lr_actor=interval(0,1)"),
            *("hydra.sweep.dir=x", "network.actor_sizes=[8,8]", "run_dir='x_${seed}'", "--help"),
            *("a=[", "preset=tonic"),  # Hydra has the word about what can't be parsed
        ],
    )
    assert capsys.readouterr().err == ""


def test_explicit_overrides() -> None:
    assert explicit_overrides(["total_frames=2_000", "run_dir=x/y", "optim.clip_dual=null"]) == {
        "total_frames": 2000,
        "run_dir": "x/y",
        "optim.clip_dual": None,
    }


def test_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20250102-030405")
    config = parse_config("mpo", nested({"preset": "acme", "env.name": "gym:a/B-v0", "seed": 3}))
    first = default_run_dir(config)
    assert str(first) == "runs/mpo_acme_a_B-v0_seed3_20250102-030405"
    assert not (tmp_path / "runs").exists()
    first.mkdir(parents=True)
    second = default_run_dir(config)
    assert second.name == first.name + "-2"
    plain_name = default_run_dir(parse_config("ppo", {})).name
    assert re.fullmatch(r"ppo_cartpole-balance_seed0_[\d-]+", plain_name)


# Resuming ----------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = plain_settings(tiny_config("mpo"), tmp_path)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return tmp_path


def test_settings_that_may_change(run_dir: Path) -> None:
    changes = {
        "total_frames": 400,
        "device": "cpu",
        "num_threads": 2,
        "checkpoint.keep": 3,
        "checkpoint.replay_buffer": False,
        "logger.interval": 10,
        "eval.video": True,
    }
    config = resumed_config(run_dir, changes)
    assert config == tiny_config("mpo", run_dir=str(run_dir), **changes)
    assert resumed_config(run_dir, {}) == tiny_config("mpo", run_dir=str(run_dir))


@pytest.mark.parametrize(
    "name",
    ["loss.epsilon", "seed", "preset", "eval.interval", "eval.episodes", "env.name", "run_dir"],
)
def test_settings_that_may_not_change(run_dir: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} can't change when a run is resumed. What can: "):
        resumed_config(run_dir, {name: 1, "total_frames": 400})


def test_all_settings_that_may_not_change_are_told(run_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed_config(run_dir, {"seed": 1, "loss.gamma": 0.9, "num_threads": 1})
    assert len(caught.value.problems) == 2


def test_changed_settings_are_checked(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="total_frames must be an integer, got 'many'"):
        resumed_config(run_dir, {"total_frames": "many"})
    with pytest.raises(ConfigError, match=r"checkpoint.keep must be positive"):
        resumed_config(run_dir, {"checkpoint.keep": 0})
    with pytest.raises(ConfigError, match=r"no setting 'checkpoint.kep'"):
        resumed_config(run_dir, {"checkpoint.kep": 2})


def test_commands_name_the_python_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv/bin/python"))
    assert python_command() == ".venv/bin/python"
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    assert python_command() == "python"


@pytest.mark.parametrize(
    "name",
    [
        "runs/walker",
        "10",
        "1e-3",
        "null",
        "true",
        "a b",
        "a\\b",
        "a\\",
        'say "x"',
        "it's",
        "a,b",
        "${x}",
    ],
)
def test_resume_argument_is_read_as_the_folder(name: str) -> None:
    argument = resume_argument(Path(name))
    override = OverridesParser.create().parse_override(argument)
    assert override.key_or_group == "resume"
    assert override.value() == name
