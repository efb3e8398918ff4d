"""The tool that tries other versions does not begin what it can't finish."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests import matrix

FOUND = ("2.15.0", "2.14.0", "2.13.0+cpu", "2.13.0")


def test_only_builds_without_cuda_are_tried() -> None:
    matrix.check_builds(FOUND, "2.13.0", "linux")
    matrix.check_builds(FOUND, "2.14.*", "darwin")
    with pytest.raises(matrix.NotTriedError, match="only CUDA builds here"):
        matrix.check_builds(FOUND, "2.14.*", "linux")
    with pytest.raises(matrix.NotTriedError, match=r"no torch 2\.16\.\* here"):
        matrix.check_builds(FOUND, "2.16.*", "darwin")


def test_nothing_is_installed_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        listed = f"torch (2.15.0)\nAvailable versions: {', '.join(FOUND)}\n"
        return subprocess.CompletedProcess(command, 0, listed, "")

    monkeypatch.setattr(matrix.subprocess, "run", run)
    monkeypatch.setattr(matrix.sys, "platform", "linux")
    cell = matrix.Cell("torch 2.15", package="torch==2.15.*")
    text, fine = matrix.try_cell(cell, False, ())
    assert (text, fine) == ("not tried: only CUDA builds here (of torch 2.15.*)", True)
    assert [command[-3:-1] for command in commands] == [["index", "versions"]]
