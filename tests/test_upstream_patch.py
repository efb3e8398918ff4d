"""The losses work inside of TorchRL's tree, without this package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchrl

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("patch", ROOT / "docs" / "upstream" / "patch.py")
assert _SPEC is not None
assert _SPEC.loader is not None
patch = importlib.util.module_from_spec(_SPEC)
sys.modules["patch"] = patch
_SPEC.loader.exec_module(patch)


def test_names() -> None:
    source = "from minerva_torchrl import MPOLoss, Retrace\n    # eq: mpo-weights\nx = 1\n"
    assert patch.ported(source) == patch.HEADER + (
        "from torchrl.objectives.mpo import MPOLoss\n"
        "from torchrl.objectives.value.retrace import Retrace\n"
        "x = 1\n"
    )


def test_every_module_is_in_the_series() -> None:
    modules = [module for pull in patch.SERIES for module in pull.modules]
    assert sorted(modules) == sorted(patch.PLACES)
    assert all(patch.source_of(module).is_file() for module in modules)


def git(folder: Path, *arguments: str) -> None:
    names = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", "-C", str(folder), *names, *arguments], check=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed TorchRL as a repository, with all branches."""
    folder = tmp_path_factory.mktemp("torchrl")
    installed = Path(torchrl.__file__).parent
    shutil.copytree(
        installed, folder / "torchrl", ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
    )
    git(folder, "init", "-q")
    git(folder, "config", "user.name", "test")
    git(folder, "config", "user.email", "test@localhost")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "installed")
    patch.main([str(folder)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("pull", patch.SERIES, ids=lambda pull: pull.branch)
def test_branch(checkout: Path, tmp_path: Path, pull: patch.PullRequest) -> None:
    git(checkout, "checkout", "-q", f"minerva/{pull.branch}")
    (tmp_path / "minerva_torchrl").mkdir()
    (tmp_path / "minerva_torchrl" / "__init__.py").write_text("raise ImportError('not here')\n")
    tests = [str(checkout / "test" / "objectives" / name) for name in pull.tests.values()]
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{checkout}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    subprocess.run(command, cwd=tmp_path, env=variables, check=True)
