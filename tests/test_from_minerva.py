"""Every name of ours in the counterpart table of the reference agents exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.runs import Run, RunConfig, parse_config
from tests.runs.tiny import read_csv, train

PAGE = Path(__file__).parents[1] / "docs" / "from-minerva.md"
TITLES = {"MPO": "mpo", "V-MPO": "vmpo", "PPO": "ppo"}
PLACES = (
    *("minerva_torchrl", "minerva_torchrl.algorithms.common", "minerva_torchrl.envs"),
    *("minerva_torchrl.modules", "minerva_torchrl.objectives.functional", "torchrl.modules"),
    *("minerva_torchrl.objectives.policies", "minerva_torchrl.runs", "minerva_torchrl.trainers"),
    *("minerva_torchrl.trainers.hooks", "minerva_torchrl.trainers.stepping"),
)
# What is written like code, but is not a name: values, entries of the data, files and arguments.
OTHERS = {"gae", "returns", "td0", "dae", "loc", "scale", "action_spec=", "log_prob", "gym:"}
OTHERS |= {"metrics.csv", "dm_control/cheetah/run", "cheetah-run", "vf_coef", "m_steps"}
METRICS_OF_RUNS = {"episode_return", "episode_length"}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Algorithm, title of the table, and both cells of each row."""
    algo = table = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("### "):
            table = line[4:]
        elif line.startswith("## "):
            algo = TITLES[line[3:]]
        elif line.startswith("| ") and line != "| reference | here |":
            reference, here = (cell.strip() for cell in line.strip("|").split("|"))
            yield algo, table, reference, here


def names(cell: str) -> list[str]:
    return [name for name in re.findall(r"`([^`]+)`", cell) if name not in OTHERS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs that report all they can, by algorithm."""
    made = {}
    for algo in TITLES.values():
        changes = {} if algo == "mpo" else {"optim__anneal_lr": True}
        changes |= {"logger__param_delta": True, "eval__interval": 0.25}
        made[algo] = train(tmp_path_factory.mktemp(algo), algo, **changes)
    return made


def setting(config: RunConfig, name: str) -> Any:
    """The value of a setting; an error if there is none."""
    value: Any = config
    for part in name.split("."):
        assert is_dataclass(value)
        value = getattr(value, part)
    return value


def is_setting(algo: str, name: str) -> bool:
    first = name.partition(".")[0]
    return first in vars(ALGORITHMS[algo].config_class())


def test_settings() -> None:
    """They exist, and have the values that the page says, in the preset or by default."""
    count = 0
    for algo, _, _, here in rows():
        presets = [parse_config(algo, {"preset": name}) for name in ("minerva-seed", "default")]
        for name in names(here):
            name, equals, value = name.partition("=")
            if not is_setting(algo, name):
                continue
            found = [setting(config, name) for config in presets]
            count += 1
            if equals and name not in ("loss.value_estimator", "loss.lmbda"):
                # Options that no preset of the reference uses.
                known = {"logger.backend", "logger.param_delta", "loss.importance_weights"}
                assert yaml.safe_load(value) in found or name in known, f"{name}={value}"
    assert count > 120


def test_names_of_python() -> None:
    count = 0
    for algo, table, _, here in rows():
        for name in names(here) if table != "Metrics" else ():
            if is_setting(algo, name.partition("=")[0]) or name in METRICS_OF_RUNS:
                continue
            first, *attributes = name.split(".")
            owners = [m for m in map(import_module, PLACES) if hasattr(m, first)]
            assert owners, name
            part = getattr(owners[0], first)
            for attribute in attributes:
                part = getattr(part, attribute)
            count += 1
    assert count > 50


def test_names_of_metrics(runs: dict[str, Run]) -> None:
    columns = {}
    for algo, run in runs.items():
        tables = [read_csv(run.run_dir / name)[-1] for name in ("metrics.csv", "eval.csv")]
        columns[algo] = {name for table in tables for name, value in table.items() if value}
    count = 0
    for algo, table, _, here in rows():
        for name in names(here) if table == "Metrics" else METRICS_OF_RUNS & {*names(here)}:
            if not is_setting(algo, name.partition("=")[0]):
                assert name in columns[algo], f"{algo}: {name}"
                count += 1
    assert count > 80


def test_nothing_is_there_twice_or_without_a_counterpart() -> None:
    found = [(algo, table, reference) for algo, table, reference, _ in rows()]
    assert len(found) == len(set(found))
    assert all(here for *_, here in rows())


RATES = {
    "mpo": {"lr_critic", "lr_actor", "lr_temperature", "lr_alpha"},
    "vmpo": {"lr_actor", "lr_critic", "lr_alpha"},
    "ppo": {"lr"},
}


@pytest.mark.parametrize("kind", list(RATES))
def test_values_of_metrics(kind: str, runs: dict[str, Run]) -> None:
    run: Any = runs[kind]
    recorded = read_csv(run.run_dir / "metrics.csv")
    assert {name for name in recorded[0] if name.startswith("lr")} == RATES[kind]
    last = {name: float(value) for name, value in recorded[-1].items() if value}
    duals = [v for k, v in last.items() if k.startswith("loss_") and ("alph" in k or "temp" in k)]
    if duals:
        assert last["loss_dual"] == pytest.approx(sum(duals), rel=1e-5, abs=1e-6)
    names = {"mpo": ("qvalue", "actor"), "vmpo": ("actor", "critic")}
    losses = names.get(kind, ("objective", "critic", "entropy"))
    expected = sum(last[f"loss_{name}"] for name in losses)
    assert last["loss_total"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert last["param_delta"] > 0
    if kind != "mpo":
        name = "lr_actor" if kind == "vmpo" else "lr"
        rates = [float(row[name]) for row in recorded]
        # Those that the updates of each of four rollouts were taken with, as in the reference.
        highest = run.config.optim.lr_actor if kind == "vmpo" else run.config.optim.lr
        assert rates == pytest.approx([highest * share for share in (1, 0.75, 0.5, 0.25)])
    if kind == "vmpo":
        assert last["epsilon"] == pytest.approx(run.config.loss.epsilon)
    evaluated = [float(row["frames"]) for row in read_csv(run.run_dir / "eval.csv")]
    # MPO has batches of 20 frames, the others of 50.
    assert evaluated == ([0, 60, 100, 160, 200] if kind == "mpo" else [0, 50, 100, 150, 200])
