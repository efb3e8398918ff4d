"""Run the tests of losses and trainers with other versions, and say what was tried.

    make test-matrix
    make test-matrix ARGS="--only 'tensordict 0.15'"

A cell is another Python, with the versions of ``constraints.txt``, or another version of a package
in front of those that are installed. It is not tried where there is no such Python or package, or
where PyTorch is to be had with CUDA only, which is gigabytes (``--cuda`` tries it). Which builds
there are is read from pip's indices; nothing is downloaded to find out.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".matrix"
TESTS = ("tests/objectives", "tests/trainers")


@dataclass(frozen=True)
class Cell:
    """Something to try."""

    name: str
    python: str | None = None
    """Version of another Python."""
    package: str | None = None
    """Requirement to put in front of what is installed, without what it requires in turn."""


CELLS = (
    *(Cell(f"Python {version}", python=version) for version in ("3.10", "3.11", "3.12", "3.13")),
    Cell("tensordict 0.15", package="tensordict==0.15.*"),
    Cell("torchrl 0.15", package="torchrl==0.15.*"),
    Cell("numpy 1.26", package="numpy==1.26.*"),
    Cell("gymnasium 1.1", package="gymnasium==1.1.*"),
    Cell("torch 2.14", package="torch==2.14.*"),
    Cell("torch 2.15", package="torch==2.15.*"),
)


class NotTriedError(Exception):
    """Says why."""


def find_python(version: str) -> str:
    """An interpreter of that version."""
    found = shutil.which(f"python{version}")
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for path in (*([found] if found else []), *map(str, pyenv)):
        command = [path, "-c", "import platform; print(platform.python_version())"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.startswith(f"{version}."):
            return path
    raise NotTriedError(f"there is no Python {version} here")


def pip(python: str, *arguments: str) -> str:
    """Output of pip; raises with its last line."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        errors = re.findall(r"^ERROR: (.*)$", result.stderr, re.MULTILINE)
        # The first error names every version that there is.
        raise NotTriedError((errors or ["pip failed"])[-1])
    return result.stdout


def builds(python: str, package: str) -> list[str]:
    """Versions of a package that pip finds for an interpreter, newest first."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "index", "versions", package]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    listed = re.search(r"^Available versions: (.*)$", result.stdout, re.MULTILINE)
    if not listed:
        raise NotTriedError(f"pip finds no {package} here")
    return listed[1].split(", ")


def check_builds(found: Sequence[str], wanted: str, system: str) -> None:
    """Raise if a version of PyTorch is not there, or comes with CUDA. ``wanted`` may have a ``*``.

    On Linux a build without CUDA says so, as in ``2.13.0+cpu``.
    """
    matching = [build for build in found if fnmatch.fnmatch(build.partition("+")[0], wanted)]
    if not matching:
        raise NotTriedError(f"there is no torch {wanted} here")
    if system == "linux" and not any(build.endswith("+cpu") for build in matching):
        raise NotTriedError(f"only CUDA builds here (of torch {wanted})")


def constrained(package: str) -> str:
    """The version of a package in ``constraints.txt``."""
    text = (ROOT / "constraints.txt").read_text()
    [version] = re.findall(rf"^{package}==([\w.]+)", text, re.MULTILINE)
    return str(version)


def environment(cell: Cell, cuda: bool) -> tuple[str, dict[str, str]]:
    """The interpreter that has what a cell asks for, and variables for it."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    if cell.python is not None:
        if platform.python_version().startswith(f"{cell.python}."):
            return sys.executable, variables
        python = find_python(cell.python)
        home = FOLDER / f"python-{cell.python}"
        inside = str(home / "bin" / "python")
        if not (home / ".installed").exists():
            if not cuda:
                check_builds(builds(python, "torch"), constrained("torch"), sys.platform)
            subprocess.run([python, "-m", "venv", "--clear", home], check=True)
            pip(inside, "-c", "constraints.txt", "-e", ".[dev]")
            (home / ".installed").touch()
        return inside, variables
    assert cell.package is not None
    name, _, version = cell.package.partition("==")
    if name == "torch" and not cuda:
        check_builds(builds(sys.executable, "torch"), version, sys.platform)
    overlay = FOLDER / cell.name.replace(" ", "-")
    if not overlay.exists():
        pip(sys.executable, "--no-deps", "--target", str(overlay), cell.package)
    return sys.executable, variables | {"PYTHONPATH": f"{overlay}{os.pathsep}{ROOT}"}


def try_cell(cell: Cell, cuda: bool, arguments: Sequence[str]) -> tuple[str, bool]:
    """What came of it, and whether that is fine."""
    try:
        python, variables = environment(cell, cuda)
    except NotTriedError as reason:
        return f"not tried: {reason}", True
    script = "import torch, torchrl, tensordict as t; print(torch.__version__, t.__version__)"
    versions = subprocess.run(
        [python, "-c", script], env=variables, capture_output=True, text=True, cwd=ROOT
    )
    if versions.returncode:
        return f"does not import: {versions.stderr.strip().splitlines()[-1]}", False
    torch, tensordict = versions.stdout.split()[-2:]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *arguments]
    result = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    log = FOLDER / f"{cell.name.replace(' ', '-')}.log"
    log.write_text(result.stdout)
    counts = (result.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    return f"torch {torch}, tensordict {tensordict}: {counts}", result.returncode == 0


def main() -> int:
    """Try all cells; the exit code is 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [cell.name for cell in CELLS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CELL")
    parser.add_argument("--cuda", action="store_true", help="also where PyTorch comes with CUDA")
    args, rest = parser.parse_known_args()
    FOLDER.mkdir(exist_ok=True)
    fine = True
    for cell in CELLS:
        if cell.name in args.only:
            text, passed = try_cell(cell, args.cuda, rest)
            fine &= passed
            sys.stdout.write(f"{cell.name:<16} {text}\n")
            sys.stdout.flush()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
