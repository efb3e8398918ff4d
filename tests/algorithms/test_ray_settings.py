"""The section ``ray`` is checked before anything starts, and without Ray."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import minerva_torchrl
from minerva_torchrl.algorithms.ray_config import parse_address
from minerva_torchrl.runs import ConfigError
from minerva_torchrl.runs.settings import resumed_config
from tests.runs.tiny import make_run, tiny_config, train

TWO: dict[str, Any] = {"ray__collectors": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("mpo", {"ray__collectors": -1}, "ray.collectors must not be negative, got -1."),
        ("mpo", {"ray__learners": 2}, "ray.learners=2 is for runs on Ray: set ray.collectors, too"),
        ("mpo", {"ray__address": "auto"}, "ray.address=auto is for runs on Ray"),
        ("mpo", {**TWO, "ray__learners": 3}, "multiple of ray.learners, got 8 and 3."),
        ("mpo", {**TWO, "ray__learners": 0}, "ray.learners must be positive, got 0."),
        ("mpo", {"ray__collectors": 3}, "in each, got 20, 3 and 1; 30 is one."),
        ("mpo", {**TWO, "ray__envs_per_collector": 3}, "in each, got 20, 2 and 3; 24 is one."),
        ("mpo", {**TWO, "ray__envs_per_collector": 0}, "ray.envs_per_collector must be positive"),
        ("mpo", {**TWO, "ray__max_frames_ahead": 20}, "ray.max_frames_ahead=20 is for ray.sync="),
        ("mpo", {**TWO, "ray__publish_interval": 0}, "ray.publish_interval must be positive"),
        ("mpo", {**TWO, "ray__timeout": 0.0}, "ray.timeout must be positive, got 0.0."),
        ("mpo", {**TWO, "ray__max_restarts": -1}, "ray.max_restarts must not be negative"),
        ("mpo", {**TWO, "ray__cpus_per_learner": -1.0}, "ray.cpus_per_learner must not be neg"),
        ("mpo", {**TWO, "ray__gpus_per_learner": 0.5}, "gpus_per_learner must be a whole number"),
        ("mpo", {**TWO, "ray__backend": "nccl"}, "ray.backend=nccl needs ray.gpus_per_learner=1"),
        ("mpo", {**TWO, "ray__address": "somewhere"}, "must be host:port or auto, got 'somewhere'"),
        ("mpo", {**TWO, "env__num_workers": 1}, "env.num_workers is for one machine"),
        ("mpo", {**TWO, "compile__enabled": True}, "compile.enabled=true is for updates"),
        ("vmpo", {"ray__collectors": 1, "ray__learners": 2}, "ray.learners must be 1 for vmpo"),
        ("ppo", {"ray__collectors": 1, "ray__sync": False}, "ray.sync must be true for ppo"),
        ("ppo", {"ray__collectors": 1, "ray__publish_interval": 2}, "publish_interval must be 1"),
        ("vmpo", {"ray__collectors": 1, "ray__gpus_per_learner": 1.0}, "must be 0 for vmpo"),
    ],
)
def test_refused(kind: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_config(kind, **changes)
    assert problem in str(error.value)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("kind", ["mpo", "vmpo", "ppo"])
def test_accepted(kind: str) -> None:
    config = tiny_config(kind, ray__collectors=1, ray__address="10.0.0.7:6379")
    assert config.copies_per_collector == config.env.num_envs


def test_copies_of_a_collector_are_its_own() -> None:
    config = tiny_config("mpo", **TWO, env__num_envs=7, ray__envs_per_collector=5)
    assert config.copies_per_collector == 5


@pytest.mark.parametrize(
    ("address", "place"),
    [("auto", None), ("host:6379", ("host", 6379)), ("[::1]:6379", ("::1", 6379))],
)
def test_addresses(address: str, place: Any) -> None:
    assert parse_address(address) == place


@pytest.mark.parametrize("address", ["", "host", "host:", ":6379", "ray://host:1", "a b:1"])
def test_no_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="neither 'auto' nor host:port"):
        parse_address(address)


def test_without_ray_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    with (
        mock.patch("minerva_torchrl.runs.run.find_spec", return_value=None),
        pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install"),
    ):
        make_run(tiny_config("mpo", **TWO), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_can_go_on_with_another_section(tmp_path: Path) -> None:
    train(tmp_path, "mpo", total_frames=20)
    changed = {"ray.collectors": 2, "ray.learners": 4}
    assert resumed_config(tmp_path, changed).ray.learners == 4
    text = (tmp_path / "config.yaml").read_text()
    assert "\nray:\n  collectors: 0\n" in text
    elsewhere = text.replace("collectors: 0", "collectors: 2").replace("sync: true", "sync: false")
    (tmp_path / "config.yaml").write_text(elsewhere)
    assert not resumed_config(tmp_path, {}).ray.sync
    # Back to one process, the rest of the section means nothing.
    assert resumed_config(tmp_path, {"ray.collectors": 0}).ray.sync
    with pytest.raises(ConfigError, match=r"ray\.learners=4 is for runs on Ray"):
        resumed_config(tmp_path, {"ray.collectors": 0, "ray.learners": 4})


def test_compiled_updates_are_left_behind(tmp_path: Path) -> None:
    train(tmp_path, "mpo", total_frames=20)
    file = tmp_path / "config.yaml"
    file.write_text(file.read_text().replace("enabled: false", "enabled: true"))
    assert resumed_config(tmp_path, {}).compile.enabled is True
    assert resumed_config(tmp_path, {"ray.collectors": 2}).compile.enabled is False


def test_only_the_modules_for_it_import_ray() -> None:
    """And nothing imports them, but for the exception, before a run asks for a cluster."""
    package = Path(minerva_torchrl.__file__).parent
    for file in package.rglob("*.py"):
        if "distributed" in file.parts:
            continue
        for node in ast.parse(file.read_text()).body:  # at the top: not inside of functions
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(str(node.module))
            for name in names:
                assert name.partition(".")[0] != "ray", file
                assert not name.startswith("minerva_torchrl.runs.distributed."), file
    light = ast.parse((package / "runs" / "distributed" / "__init__.py").read_text())
    imported = [node for node in light.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [getattr(node, "module", None) for node in imported] == ["__future__"]
