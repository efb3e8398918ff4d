from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from minerva_torchrl.report import group_runs, load_runs
from minerva_torchrl.report.commands import commands, override
from minerva_torchrl.runs import (
    RunConfig,
    check_overrides,
    load_config,
    parse_config,
    register_configs,
)
from minerva_torchrl.runs.settings import explicit_overrides
from tests.report.synthetic import straight, write_run


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def configs_of(command: str) -> list[RunConfig]:
    """What the command would train with, by Hydra and the package's own parser."""
    *start, algo = shlex.split(command.replace("\\\n", ""))[:5]
    assert start == ["python", "-m", "minerva_torchrl", "train"]
    arguments = check_overrides(algo, shlex.split(command.replace("\\\n", ""))[5:])
    jobs = [arguments]
    if arguments[0] == "--multirun":
        overrides = OverridesParser.create().parse_overrides(arguments[1:])
        ((*jobs,),) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    register_configs(algo)
    configs = []
    with initialize(None, version_base="1.3"):
        for job in jobs:
            settings: Any = OmegaConf.to_container(compose("train", overrides=job), resolve=True)
            configs.append(parse_config(settings["algo"], settings))
    return configs


def commands_in(folder: Path) -> list[str]:
    (group,) = group_runs(load_runs(folder).runs)
    return commands(group)


def recorded(folder: Path) -> RunConfig:
    return replace(load_config(folder), run_dir=None)


def test_simple(tmp_path: Path) -> None:
    write_run(tmp_path / "run", seed=3)
    (command,) = commands_in(tmp_path)
    assert command == (
        "python -m minerva_torchrl train mpo env.name=walker-walk seed=3 total_frames=100_000"
    )


def test_seeds_preset_and_changes(tmp_path: Path) -> None:
    for seed in (1, 0):
        write_run(
            tmp_path / str(seed),
            seed=seed,
            preset="acme",
            task="gym:HalfCheetah-v5",
            optim__lr_actor=1e-3,
        )
    (command,) = commands_in(tmp_path)
    assert command == (
        "python -m minerva_torchrl train mpo --multirun env.name=gym:HalfCheetah-v5 seed=0,1 "
        "preset=acme \\\n    total_frames=100_000 optim.lr_actor=1e-3"
    )


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("mpo", {}),
    ("mpo", {"preset": "tonic", "optim__target_tau": 0.01}),
    ("mpo", {"preset": "tonic", "optim__target_tau": None, "optim__target_period": 10}),
    ("mpo", {"preset": "minerva-seed", "network__actor_sizes": [32, 16], "device": "cuda:1"}),
    (
        "mpo",
        {
            "loss__value_estimator": "retrace",
            "replay_buffer__sequence_length": 8,
            "replay_buffer__n_steps": 1,
            "loss__action_penalization": False,
            "env__max_episode_steps": 250,
        },
    ),
    ("mpo", {"eval__seed": 12, "eval__video": True, "checkpoint__best": False, "num_threads": 4}),
    ("mpo", {"logger__project": "my, 'own' \"project\" = {x} $HOME", "loss__epsilon": 1 / 3}),
    ("mpo", {"logger__project": "null", "replay_buffer__size": 12_345_678}),
    ("vmpo", {"optim__lr_scaling": "1/sqrt(M)", "optim__clip": None, "optim__lr_alpha": 1e-10}),
    ("vmpo", {"preset": "minerva-seed", "env__reward_scaling": False}),
    ("ppo", {"optim__target_kl": 0.015, "collector__frames_per_batch": 1024}),
    ("ppo", {"preset": "minerva-seed", "compile__mode": "max-autotune", "total_frames": 99_999}),
    (
        "ppo",
        {
            "env__factory": "mine.envs:make",
            "env__kwargs": {
                "gravity": 5,
                "mode": "1e-3",
                "sizes": [[1, 2], [3]],
                "deep": {"x": True},
            },
            "env__wrappers": ["mine:Clip", "mine:Shift"],
            "network__factory": "mine.nets:make",
            "callbacks": ["mine:Stop"],
        },
    ),
]


@pytest.mark.parametrize(("algo", "settings"), SETTINGS)
def test_round_trip(tmp_path: Path, algo: str, settings: dict[str, Any]) -> None:
    """The command gives back the settings that it was made from, all of them."""
    write_run(tmp_path / "run", algo, seed=7, **settings)
    (command,) = commands_in(tmp_path)
    assert configs_of(command) == [recorded(tmp_path / "run")]


def test_round_trip_of_several_seeds(tmp_path: Path) -> None:
    settings = {"optim__lr_scaling": "1/M", "logger__project": "a, 'b', [c]"}
    for seed in (4, 0):
        write_run(tmp_path / str(seed), "vmpo", seed=seed, **settings)
    (command,) = commands_in(tmp_path)
    assert configs_of(command) == [recorded(tmp_path / "0"), recorded(tmp_path / "4")]


def test_a_command_for_each_way_the_runs_were_made(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, points=straight(50_000))
    write_run(tmp_path / "c", seed=2)
    first, second = commands_in(tmp_path)
    assert "seed=0,2 total_frames=100_000" in first
    assert "seed=1 total_frames=50_000" in second
    assert "--multirun" not in second


def test_changes_to_preset(tmp_path: Path) -> None:
    write_run(tmp_path / "run", preset="acme", optim__lr_actor=1e-4, loss__gamma=0.9, seed=4)
    (run,) = load_runs(tmp_path).runs
    assert run.changes_to_preset == {"loss.gamma": 0.9}  # the learning rate is the preset's


@given(st.text(st.characters(exclude_categories=["C"], exclude_characters="$"), max_size=12))
def test_any_text_as_hydra_reads_it(text: str) -> None:
    assert explicit_overrides([override("logger.project", text)]) == {"logger.project": text}


@given(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.lists(st.integers(), max_size=3)
)
def test_any_value_as_hydra_reads_it(value: object) -> None:
    assert explicit_overrides([override("optim.clip", value)]) == {"optim.clip": value}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-3, "1e-3"),
        (0.00025, "2.5e-4"),
        (0.01, "0.01"),
        (0.0, "0"),
        (40.0, "40"),
        (-0.5, "-0.5"),
        (1e12, "1e12"),
        (9999, "9999"),
        (10_000, "10_000"),
        (True, "true"),
        ([], "[]"),
        ("a-b_c.d/e:f", "a-b_c.d/e:f"),
        ("1", '"1"'),
        ("a,b", '"a,b"'),
    ],
)
def test_values_are_short(value: object, text: str) -> None:
    assert override("x", value) == f"x={text}"
