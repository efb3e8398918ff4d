"""The script that makes the runs of results/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import results

NAME = "gym/mpo-Hopper-v5-1"
RUNS = next(runs for runs in results.ALL if runs.folder == "gym")
FILES = {"config.yaml": "seed: 1\n", "summary.json": "{}\n"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty results/, and runs that are over at once; they evaluate to what is in ``score``."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "MADE", tmp_path / "results" / "made.txt")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "made.txt").write_text("")

    def train(command: list[Any], **_: Any) -> SimpleNamespace:
        (run_dir,) = (a.partition("=")[2] for a in command if str(a).startswith("run_dir="))
        Path(run_dir).mkdir(parents=True)
        files = {**FILES, "eval.csv": (tmp_path / "score").read_text()}
        for name, text in files.items():
            (Path(run_dir) / name).write_text(text)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", train)
    return tmp_path


def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    monkeypatch.setattr(sys, "argv", ["results.py", "--list", "--only", "gym", *args])
    assert results.main() == 0
    return capsys.readouterr().out


def test_runs_are_made_and_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is the same stays as it was; another run takes the place of the former."""
    kept, made = root / "results" / NAME, root / "results" / "made.txt"

    def make(score: str, folder: str) -> str:
        (root / "score").write_text(score)
        return results.make(RUNS, NAME, "gym:Hopper-v5", 1, root / folder)

    assert NAME in listed(monkeypatch, capsys)
    assert make("1000", "first") == f"{NAME}: done"
    assert NAME not in listed(monkeypatch, capsys)
    assert NAME not in listed(monkeypatch, capsys, "--again")
    made.write_text("")  # the defaults have changed
    assert listed(monkeypatch, capsys, "--again") == f"{NAME}\n"

    (kept / "summary.json").write_text("of the first")
    assert make("1000", "second") == f"{NAME}: done, the same"
    assert (kept / "summary.json").read_text() == "of the first"
    assert make("900", "third") == f"{NAME}: done, another"
    assert (kept / "summary.json").read_text() == FILES["summary.json"]
    assert (kept / "eval.csv").read_text() == "900"
    assert made.read_text().splitlines() == [f"{NAME}: done, the same", f"{NAME}: done, another"]
    assert listed(monkeypatch, capsys, "--again") == ""


def test_a_run_that_fails_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3))
    line = results.make(RUNS, NAME, "gym:Hopper-v5", 1, root / "runs")
    assert line.startswith(f"{NAME}: exit code 3, see ")
    assert not (root / "results" / NAME).exists()
    assert (root / "results" / "made.txt").read_text() == ""


def test_what_was_made_is_there() -> None:
    names = {name for runs in results.ALL for name, _, _ in runs.names()}
    for line in results.MADE.read_text().splitlines():
        name, _, verdict = line.partition(": ")
        assert name in names
        assert verdict in ("done", "done, the same", "done, another")
        assert (results.RESULTS / name / "summary.json").is_file()
