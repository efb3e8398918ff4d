"""Settings that are refused, and how: the campaign has many more of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.runs import ConfigError, parse_config, sizes
from minerva_torchrl.runs.help import settings_text
from tests.campaign import bad_settings
from tests.runs.tiny import make_run, run_script, tiny_config

NAN, INF = math.nan, math.inf
LISTED: list[tuple[str, str, Any]] = [
    *(("mpo", "optim.updates_per_frame", value) for value in (NAN, INF, 1e308)),
    *((algo, "optim.adam_eps", INF) for algo in ("mpo", "vmpo", "ppo")),
    ("mpo", "optim.lr_dual", INF),
    ("vmpo", "optim.lr_alpha", INF),
    ("ppo", "loss.value_coeff", INF),
    ("ppo", "loss.entropy_coeff", INF),
    ("ppo", "optim.target_kl", -1.0),
    ("mpo", "replay_buffer.n_steps", 100_000),
    ("vmpo", "optim.minibatch_size", 51),
    ("mpo", "device", "meta"),
    ("mpo", "device", "hpu"),
    ("mpo", "run_dir", "x" * 300),
    ("mpo", "env.max_episode_steps", 2**63),
    ("mpo", "optim.target_tau", 2.0),
    ("mpo", "loss.init_temperature", 1e-12),
    ("mpo", "replay_buffer.size", 10**30),
    ("mpo", "network.num_critics", 1_000_000_000),
    ("mpo", "num_threads", 100_000),
    ("ppo", "eval.episodes", 10_000_000_000),
    ("mpo", "replay_buffer.warmup_frames", 201),  # of 200
]


@pytest.mark.parametrize(("algo", "name", "value"), LISTED)
def test_listed(algo: str, name: str, value: Any, tmp_path: Path) -> None:
    assert bad_settings._try(algo, name, value, tmp_path) is None


def test_a_sample_of_all(tmp_path: Path) -> None:
    found = list(bad_settings._wrong_types())
    assert len(found) > 500
    broken = {case.name: case.run(tmp_path) for case in random.Random(0).sample(found, 150)}
    assert {name: problem for name, problem in broken.items() if problem} == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [case for case in bad_settings.COMMANDS if case[0][0].startswith(("-", "seed", "res", "env"))],
)
def test_commands(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert bad_settings._try_command("ppo", arguments, message, tmp_path) is None


def test_good_settings_are_not_refused(tmp_path: Path) -> None:
    """Else nothing above would mean anything."""
    for algo in ("mpo", "vmpo", "ppo"):
        assert bad_settings._try(algo, "seed", 3, tmp_path) == "it was accepted"


def test_whole_numbers_are_integers() -> None:
    config = parse_config("mpo", {"total_frames": 1e5, "network": {"actor_sizes": [6.4e1]}})
    assert (config.total_frames, config.network.actor_sizes) == (100_000, (64,))
    assert isinstance(config.total_frames, int)


@pytest.mark.parametrize("algo", ["mpo", "vmpo", "ppo"])
def test_help_has_the_meaning_of_every_setting(algo: str) -> None:
    lines = settings_text(parse_config(algo, {})).splitlines()
    settings = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(settings) > 40
    assert [line for line in settings if "#" not in line] == []


# Sizes -------------------------------------------------------------------------------------------


def test_estimates_are_compared_with_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("mpo", replay_buffer__size=1_000_000)
    needed = dict(config.memory(3, 1))["replay_buffer.size=1000000"]
    assert needed == 1e6 * 4 * (2 * 3 + 1 + 8)
    monkeypatch.setattr(sizes, "free_memory", lambda: 5e7)
    message = r"needs about 0\.06\d* GB, and 0\.05 GB are free\. What needs most: replay_buffer\.si"
    with pytest.raises(ConfigError, match=message):
        make_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_copies_are_estimated_before_one_is_made() -> None:
    config = tiny_config("ppo", env__name="cartpole-balance")
    many = replace(config, env=replace(config.env, num_envs=50_000_000))
    with pytest.raises(ConfigError, match=r"What needs most: env\.num_envs=50000000 5e\+04 GB\."):
        sizes.check_copies(many)
    with pytest.raises(ConfigError, match="episodes side by side"):
        sizes.check_copies(config, episodes=10_000_000)


def test_free_memory() -> None:
    assert 1e7 < sizes.free_memory() < 1e14


def test_a_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": ["3000000"], "memory.current": ["1000000"]}
    monkeypatch.setattr(sizes, "_lines", lambda file: files.get(file.name, []))
    assert sizes.free_memory() == 2e6
    files["memory.max"] = ["max"]
    assert sizes.free_memory() > 2e6


# Pictures ----------------------------------------------------------------------------------------


def test_missing_pygame_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pygame", None)
    monkeypatch.setattr("minerva_torchrl.runs.run.require_video_support", lambda: None)
    with pytest.raises(ConfigError, match=r"^eval\.video: .*pygame") as error:
        make_run(tiny_config("ppo", eval__video=True), tmp_path / "run")
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_resume_must_be_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("mpo_dmc.py", "resume=5") == 2
    assert capsys.readouterr().err == "error: resume must be the folder of a run, got 5.\n"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no OpenGL\nhere"), KeyError("joint"), SystemExit(3), ImportError("Box2D")],
)
def test_an_environment_that_can_not_be_made(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("dm_control.suite.load", fail)
    message = rf"^env\.name: {type(error).__name__}: "
    with pytest.raises(ConfigError, match=message) as refused:
        make_run(tiny_config("ppo", env__name="cartpole-balance"), tmp_path / "run")
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()
