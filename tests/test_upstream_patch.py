"""The losses work inside of TorchRL's tree, without this package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchrl

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "upstream"))
import edits  # noqa: E402
import patch  # noqa: E402
import port  # noqa: E402
import series  # noqa: E402

sys.path.pop(0)

BY_BRANCH = pytest.mark.parametrize("pull", series.SERIES, ids=lambda pull: pull.branch)


def test_names() -> None:
    source = "from minerva_torchrl import MPOLoss, Retrace\n    # eq: mpo-weights\nx = 1\n"
    assert port.ported(source) == port.HEADER + (
        "from torchrl.objectives.mpo import MPOLoss\n"
        "from torchrl.objectives.value.retrace import Retrace\n"
        "x = 1\n"
    )


def test_every_module_is_in_the_series() -> None:
    """All but PPO, which TorchRL has, and once each."""
    brought = [module for pull in series.SERIES for module in series.modules_of(pull)]
    assert len(brought) == len(set(brought))
    assert set(port.all_modules()) - set(brought) == {"ppo"}


@BY_BRANCH
def test_sources(pull: series.PullRequest) -> None:
    """They name nothing of ours, and what they import of ours is in the series so far."""
    so_far = series.SERIES[: series.SERIES.index(pull) + 1]
    there = {path for earlier in so_far for path in patch.sources(earlier)}
    for path, text in patch.sources(pull).items():
        assert "minerva" not in text
        assert not re.search(r"(from|import) tests[. ].*import|import tests", text)
        if path.suffix != ".py":
            continue
        assert text.startswith(port.HEADER)
        for module in re.findall(r"torchrl\.objectives\.(?:_mpo|mpo_functional)[\w.]*", text):
            file = Path(module.replace(".", "/"))
            places = [p / "__init__.py" for p in (file, *file.parents)]
            places += [p.with_suffix(".py") for p in (file, *file.parents) if p.name]
            assert there & set(places), f"{path} names {module}"


def test_an_edit_needs_its_place(tmp_path: Path) -> None:
    (tmp_path / "torchrl").mkdir()
    file = tmp_path / "torchrl" / "x.py"
    file.write_text("a\nb\na\n")
    edits.Edit("torchrl/x.py", "b\n", "c\n").apply(tmp_path)
    edits.Edit("torchrl/x.py", "b\n", "d\n", before=True).apply(tmp_path)
    assert file.read_text() == "a\nd\nb\nc\na\n"
    with pytest.raises(ValueError, match="should occur once, not 2 times"):
        edits.Edit("torchrl/x.py", "a\n", "c\n").apply(tmp_path)
    edits.Edit("docs/absent.rst", "a\n", "c\n").apply(tmp_path)  # no whole checkout


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


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
@BY_BRANCH
def test_branch(checkout: Path, tmp_path: Path, pull: series.PullRequest) -> None:
    """Its tests pass, its script runs, and so does its benchmark, with our package out of reach.

    ``files`` has tests on TorchRL's own base class, too, which is not in the installed package.
    """
    git(checkout, "checkout", "-q", f"minerva/{pull.branch}")
    (tmp_path / "minerva_torchrl").mkdir()
    (tmp_path / "minerva_torchrl" / "__init__.py").write_text("raise ImportError('not here')\n")
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{checkout}"}

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=variables, check=True)

    run("-c", "import torchrl.objectives, torchrl.trainers.algorithms.configs")
    tests = [str(checkout / "test" / "objectives" / name) for name in pull.tests.values()]
    if tests:
        run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    for edit in pull.edits:
        if edit.path.endswith("test_sota.py"):
            command = edit.text.split('"""')[1].replace("\\\n", " ").split()[1:]
            run(str(checkout / command[0]), *command[1:])
            default_task = [part for part in command[1:] if not part.startswith("env.name")]
            run(str(checkout / command[0]), *default_task)  # has several actions
    for name in pull.files:
        if name.startswith("benchmarks/"):
            (tmp_path / "conftest.py").write_text(STOPWATCH)
            shutil.copy(checkout / name, tmp_path)
            run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not True-", Path(name).name)


STOPWATCH = """
import pytest


@pytest.fixture
def benchmark():  # instead of pytest-benchmark's
    def once(function, *arguments):
        losses = function(*arguments)
        # What is not returned is not computed, either, where it is compiled.
        assert any(name.startswith("loss_") for name in losses.keys())

    return once
"""
