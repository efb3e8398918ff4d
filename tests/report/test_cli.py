"""The command line of reports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from minerva_torchrl.report import load_runs, make_report
from minerva_torchrl.report.__main__ import main
from tests.report.synthetic import straight, write_run, write_seeds
from tests.report.test_report import files, words_of


def test_as_a_program(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", [100.0, 200.0])
    (write_run(tmp_path / "runs" / "broken", seed=9) / "eval.csv").unlink()
    command = [sys.executable, "-m", "minerva_torchrl.report", "runs", "--out", "deep/report"]
    result = subprocess.run(
        [*command, "--budgets", "20_000", "30000"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert result.stderr == "skipped runs/broken: it has no eval.csv\n"
    assert result.stdout == "deep/report/report.html: 2 runs\n"
    assert result.returncode == 0
    text = (tmp_path / "deep" / "report" / "report.md").read_text()
    assert "| 20,000 | MPO | 2 | 30.0 ± 14.1 |" in text
    assert "| 30,000 | MPO | 2 | 45.0 ± 21.2 |" in text
    assert (tmp_path / "deep" / "report" / "plots" / "walker-walk.png").exists()


@pytest.mark.usefixtures("no_drawing")
def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_seeds(tmp_path / "runs", [100.0])
    write_run(tmp_path / "runs" / "b", points=straight(40_000), seed=5, finished=False)
    (tmp_path / "references.yaml").write_text(
        "[{task: walker-walk, algo: mpo, label: tonic, value: 90, frames: 100_000}]"
    )
    code = main(
        [
            *(str(tmp_path / "runs"), "--out", str(tmp_path / "report"), "--include-unfinished"),
            *("--references", str(tmp_path / "references.yaml"), "--machine", "a fast one"),
        ]
    )
    assert code == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'report' / 'report.html'}: 2 runs\n"
    assert output.err == ""
    words = words_of(tmp_path / "report")
    for piece in (
        "Next to published results",
        "MPO, unfinished",
        "Machine: a fast one",
        "1 run unfinished",
    ):
        assert piece in words


@pytest.mark.usefixtures("no_drawing")
def test_name(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", [100.0])
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "docs"), "--name", "results"]) == 0
    names = {path.name for path in (tmp_path / "docs").iterdir()}
    assert names == {"plots", "results.html", "results.md"}
    with pytest.raises(ValueError, match=r"name must be that of a file, .* got 'a/b'"):
        make_report(load_runs(tmp_path / "runs"), tmp_path / "docs", name="a/b")


def test_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), "--out", str(tmp_path / "report")]) == 1
    error = capsys.readouterr().err
    assert error == (
        f"error: there is no run in {tmp_path / 'empty'}: no folder has config.yaml, eval.csv or "
        "summary.json.\n"
    )
    (write_run(tmp_path / "runs" / "a") / "eval.csv").unlink()
    write_run(tmp_path / "runs" / "b", finished=False)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("error: there is nothing to report in ")
    assert "a: it has no eval.csv; " in output.err
    assert "b: unfinished: it has no summary.json.\n" in output.err
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: RUNS, --out"),
        (["runs"], "the following arguments are required: --out"),
        (["nowhere", "--out", "x"], "argument RUNS: nowhere is not a folder"),
        (["runs", "--out", "file"], "argument --out: file is a file, not a folder"),
        (["runs", "--out", "file/deeper"], "argument --out: file is a file, not a folder"),
        (
            ["runs", "--out", "x", "--name", "a/b"],
            "argument --name: must be a name",
        ),
        (["runs", "--out", "x", "--name", ""], "argument --name: must be a name"),
        (["runs", "--out", "x", "--budgets", "many"], "such as 100_000, got 'many'"),
        (["runs", "--out", "x", "--budgets", "0"], "argument --budgets: must be a positive number"),
        (["runs", "--out", "x", "--references", "none.yaml"], "none.yaml: can't be read: No such"),
        (
            ["runs", "--out", "x", "--references", "bad.yaml"],
            "argument --references: bad.yaml: references[0]: label, value is missing.",
        ),
        (["runs", "--out", "x", "--budget", "5"], "unrecognized arguments: --budget 5"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_seeds(tmp_path / "runs", [100.0])
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.yaml").write_text("[{task: walker-walk}]")
    before = files(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert files(tmp_path) == before


@pytest.mark.usefixtures("no_drawing")
def test_a_folder_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_seeds(tmp_path / "runs", [100.0])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "report")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().err == (
        "error: the report can't be written: [Errno 13] Permission denied: 'report'\n"
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "example:\n  python -m minerva_torchrl.report runs/ --out report/" in text
    for option in ("--budgets", "--references", "--machine", "--include-unfinished"):
        assert option in text


def test_runs_are_read_without_simulators(tmp_path: Path) -> None:
    """Nor is Matplotlib needed before something is drawn."""
    write_seeds(tmp_path / "runs", [100.0, 200.0])
    code = """
        import sys
        for name in ("dm_control", "mujoco", "gymnasium", "matplotlib"):
            sys.modules[name] = None  # an import of it fails
        import minerva_torchrl.runs
        from minerva_torchrl.report import group_runs, load_runs
        (group,) = group_runs(load_runs("runs").runs)
        print(group.label, group.seeds)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert result.stderr == ""
    assert result.stdout == "MPO [0, 1]\n"
