"""`make results-smoke` judges what the examples report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minerva_torchrl.runs import parse_config
from minerva_torchrl.runs.settings import explicit_overrides
from tests.runs.tiny import nested

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import learning

# Stands for an example: reports the seed times ten as its last evaluation.
SCRIPT = """
import json, pathlib, sys
settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
if settings["seed"] == "9":
    sys.exit("the simulator is gone")
run_dir = pathlib.Path(settings["run_dir"])
run_dir.mkdir()
final_return = 10 * int(settings["seed"])
(run_dir / "summary.json").write_text(json.dumps({"final_return": final_return, "best": 1000}))
"""


@pytest.fixture(autouse=True)
def _examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for algo in ("mpo", "ppo"):
        (tmp_path / f"{algo}_dmc.py").write_text(SCRIPT)
    monkeypatch.setattr(learning, "EXAMPLES", tmp_path)
    cases = (learning.Case("mpo", "task", 10, 20.0), learning.Case("ppo", "task", 10, 30.0))
    monkeypatch.setattr(learning, "CASES", cases)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["learning.py", *arguments])
    return learning.main()


@pytest.mark.parametrize(
    ("seed", "code", "verdicts"),
    [(3, 0, ["pass", "pass"]), (2, 1, ["pass", "FALLS SHORT"]), (1, 1, ["FALLS SHORT"] * 2)],
)
def test_verdicts(
    seed: int,
    code: int,
    verdicts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "--seed", str(seed)) == code
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "training mpo task, ppo task ..."
    assert [line.split("   ")[-1] for line in lines] == verdicts
    assert all(f"final evaluation {10 * seed:>7.1f}" in line for line in lines)


def test_one_of_them_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--only", "ppo", "--seed", "3", "--out", str(tmp_path / "out"))
    assert run(monkeypatch, *arguments) == 0
    assert (tmp_path / "out" / "ppo-3" / "summary.json").exists()
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)
    assert "it has runs already: " in capsys.readouterr().err


def test_a_run_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^mpo task failed:.*the simulator is gone"):
        run(monkeypatch, "--seed", "9", "--jobs", "1")


def test_the_real_cases_are_settings_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert {case.algo for case in learning.CASES} == {"mpo", "vmpo", "ppo"}
    for case in learning.CASES:
        assert (learning.EXAMPLES / f"{case.algo}_dmc.py").is_file()
        settings = nested(explicit_overrides(case.arguments(0, Path("x"))))
        assert parse_config(case.algo, settings).total_frames == case.frames
