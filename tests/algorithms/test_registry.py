from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minerva_torchrl
from minerva_torchrl.algorithms import ALGORITHMS, Registry
from minerva_torchrl.algorithms.mpo import MPO
from minerva_torchrl.presets import PRESETS
from minerva_torchrl.runs import MPOConfig, PPOConfig, VMPOConfig
from tests.algorithms.a2c import A2C

PACKAGE = Path(minerva_torchrl.__file__).parent


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_names(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert algorithm.config_class().algo == name
    assert PRESETS[name] is algorithm.presets
    assert next(iter(algorithm.presets)) == "default"
    assert all(preset.description for preset in algorithm.presets.values())


def test_settings_of_each() -> None:
    classes = {name: algorithm.config_class for name, algorithm in ALGORITHMS.items()}
    assert classes == {"mpo": MPOConfig, "vmpo": VMPOConfig, "ppo": PPOConfig}


def test_unknown_name() -> None:
    assert "sac" not in ALGORITHMS
    with pytest.raises(KeyError):
        ALGORITHMS["sac"]


def test_listing_names_imports_no_algorithm_and_no_simulator() -> None:
    code = (
        "import sys; from minerva_torchrl.algorithms import ALGORITHMS; list(ALGORITHMS);"
        "assert 'mpo' in ALGORITHMS; print('minerva_torchrl.algorithms.mpo' in sys.modules);"
        "import minerva_torchrl.report, minerva_torchrl.runs; ALGORITHMS['mpo'];"
        "print('dm_control' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["False", "False"]


def test_register() -> None:
    registry = Registry(mpo="minerva_torchrl.algorithms.mpo:MPO")
    assert registry.register(A2C) is A2C
    assert dict(registry) == {"mpo": MPO, "a2c": A2C}
    registry.register(A2C)  # once more, as a notebook does
    assert len(registry) == 2


def test_a_name_that_is_taken_is_refused() -> None:
    registry = Registry(a2c="minerva_torchrl.algorithms.mpo:MPO")
    with pytest.raises(ValueError, match="algo must have a default that no other algorithm has"):
        registry.register(A2C)


# Nothing else knows an algorithm ----------------------------------------------------------------

NAMES = {*ALGORITHMS, *(f"{name.upper()}Config" for name in ALGORITHMS)}


def mentions(file: Path) -> set[str]:
    """Names of algorithms, and of their settings, in code; docstrings may have examples."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, (ast.Name, ast.alias)):
            found.add(node.id if isinstance(node, ast.Name) else node.name)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found & NAMES


@pytest.mark.parametrize("part", ["runs", "report", "envs", "__main__.py"])
def test_no_algorithm_is_known_by_name(part: str) -> None:
    path = PACKAGE / part
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    files.remove(path / "__init__.py") if part == "runs" else None  # it hands the settings on
    assert files
    assert {file.name: found for file in files if (found := mentions(file))} == {}
