"""The package's front door."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import minerva_torchrl
import minerva_torchrl.runs


@pytest.mark.parametrize("module", [minerva_torchrl, minerva_torchrl.runs])
def test_public_names(module: ModuleType) -> None:
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("module", [minerva_torchrl, minerva_torchrl.runs])
def test_unknown_name(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"{module.__name__}' has no attribute 'DMPOLoss'"):
        _ = module.DMPOLoss


@pytest.mark.parametrize("name", ["minerva_torchrl", "minerva_torchrl.runs"])
def test_no_simulator_is_imported(name: str) -> None:
    # TorchRL itself imports mujoco, where it is installed.
    code = f"import sys, {name}; print(sys.modules.keys() & {{'dm_control', 'gymnasium'}})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()"


def test_one_version() -> None:
    root = Path(__file__).parents[1]
    version = re.escape(minerva_torchrl.__version__)
    assert re.search(rf'^version = "{version}"$', (root / "pyproject.toml").read_text(), re.M)
    assert re.search(rf"^version: {version}$", (root / "CITATION.cff").read_text(), re.M)
    assert re.search(rf"^## \[{version}\]", (root / "CHANGELOG.md").read_text(), re.M)
