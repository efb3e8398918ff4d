from __future__ import annotations

import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from minerva_torchrl.runs import load_config, open_checkpoint
from minerva_torchrl.runs.loop import TrainingLoop
from tests.runs.tiny import (
    SCRIPTS,
    arguments,
    column,
    content,
    dotted,
    run_script,
    train,
)

CONTROL = re.compile(r"[\r\x1b]")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, without a screen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    return tmp_path


# Training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", list(SCRIPTS))
def test_trains(algo: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = dotted(algo, total_frames=100, run_dir="out/run", seed=3)
    assert run_script(SCRIPTS[algo], *arguments(settings)) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert not CONTROL.search(output.err)
    assert "Traceback" not in output.err
    for line in (
        "100 frames   evaluation ",
        "frames 100/100 (100%)",
        f"{algo} gym:Pendulum-v1: 100 frames in ",
        "curve       out/run/curve.png",
        f"{SCRIPTS[algo]} resume=out/run total_frames=200",
    ):
        assert line in output.err
    assert load_config(Path("out/run")).seed == 3
    assert open_checkpoint("out/run").frames == 100
    assert {path.name for path in workplace.iterdir()} == {"out"}  # nothing of Hydra's


def test_a_folder_of_its_own(workplace: Path) -> None:
    settings = {**dotted("vmpo", total_frames=50), "env.name": "cartpole-balance"}
    assert run_script("vmpo_dmc.py", *arguments(settings)) == 0
    [run_dir] = (workplace / "runs").iterdir()
    assert re.fullmatch(r"vmpo_cartpole-balance_seed0_\d{8}-\d{6}", run_dir.name)


def test_presets_and_settings(workplace: Path) -> None:
    settings = dotted("mpo", total_frames=20, run_dir="run")
    del settings["optim.target_period"]
    assert run_script("mpo_dmc.py", "preset=tonic", *arguments(settings)) == 0
    config = load_config(workplace / "run")
    assert config.preset == "tonic"
    assert (config.optim.target_tau, config.optim.clip_actor) == (0.005, None)
    assert config.replay_buffer.batch_size == 8  # the command line has the last word


@pytest.mark.slow
def test_sweeps_with_a_pattern(workplace: Path) -> None:
    settings = arguments(dotted("vmpo", total_frames=50))
    pattern = "run_dir='x_${seed}'"
    assert run_script("vmpo_dmc.py", "--multirun", "seed=0,1", pattern, *settings) == 0
    assert {path.name for path in workplace.iterdir() if path.is_dir()} == {"x_0", "x_1"}
    assert [load_config(workplace / f"x_{seed}").seed for seed in (0, 1)] == [0, 1]


@pytest.mark.slow
def test_sweeps_with_folders_of_their_own(workplace: Path) -> None:
    settings = arguments(dotted("ppo", total_frames=50))
    assert run_script("ppo_dmc.py", "--multirun", "seed=0,1", *settings) == 0
    names = sorted(path.name for path in (workplace / "runs").iterdir())
    assert len(names) == 2
    assert "_seed0_" in names[0]
    assert "_seed1_" in names[1]


@pytest.mark.slow
def test_a_stop_ends_a_sweep(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_batch = TrainingLoop._after_batch

    def stop(loop: TrainingLoop) -> None:
        signal.raise_signal(signal.SIGTERM)
        after_batch(loop)

    monkeypatch.setattr(TrainingLoop, "_after_batch", stop)
    settings = arguments(dotted("vmpo"))
    pattern = "run_dir='x_${seed}'"
    assert run_script("vmpo_dmc.py", "--multirun", "seed=0,1", pattern, *settings) == 0
    assert [path.name for path in workplace.glob("x_*")] == ["x_0"]
    assert "Saved at 50 frames. Go on with:\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["my run", "seed=0,total_frames=50"])
def test_the_command_to_go_on_works_for_every_folder(
    name: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(workplace / name, "vmpo", total_frames=50)
    *_, argument = shlex.split(run.resume_command())
    assert run_script("vmpo_dmc.py", argument) == 0
    assert "is complete: it has 50 frames" in capsys.readouterr().err


def test_sweeps_leave_runs_and_nothing_else(workplace: Path) -> None:
    settings = arguments(dotted("vmpo", total_frames=50))
    assert run_script("vmpo_dmc.py", "--multirun", "seed=2", *settings) == 0
    assert {path.name for path in workplace.iterdir()} == {"runs"}


@pytest.mark.parametrize(
    "algo", ["mpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vmpo", "ppo"))]
)
def test_help(algo: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(SCRIPTS[algo], "--help") == 0
    output = capsys.readouterr().out
    for setting in ("total_frames: 100000", "frames_per_batch:", "preset: default, minerva-seed"):
        assert setting.partition(",")[0] in output
    assert content(workplace) == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["optim.lr=1e-3"], "error: there is no setting 'optim.lr'."),
        (["loss.gamma=high"], "error: loss.gamma must be a number, got 'high' (str)."),
        (["preset=unknown"], "error: preset must be one of default, minerva-seed, acme, "),
        (["env.name=cheeta-run"], "error: env.name: there is no environment 'cheeta-run'. Did you"),
        (["device=nonsense"], "error: device 'nonsense' can't be used here"),
        (["eval.episodes=0"], "error: eval.episodes must be positive, got 0."),
        (["seed=-1", "total_frames=0"], "error: seed must be between 0"),
    ],
)
def test_wrong_settings(
    wrong: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {argument.partition("=")[0] for argument in wrong}
    settings = {name: v for name, v in dotted("mpo", run_dir="x").items() if name not in names}
    assert run_script("mpo_dmc.py", *arguments(settings), *wrong) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == len(wrong)
    assert content(workplace) == {}


def test_a_policy_that_does_not_fit_the_task(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"env.name": "gym:CartPole-v1", "network.policy": "full_covariance", "run_dir": "x"}
    assert run_script("mpo_dmc.py", *arguments(dotted("mpo") | wrong)) == 2
    error = "error: loss: network.policy=full_covariance does not fit a task"
    assert capsys.readouterr().err.startswith(error)
    assert content(workplace) == {}


def test_an_interpolation_of_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("mpo_dmc.py", "run_dir='x_${sead}'") != 0
    errors = capsys.readouterr().err
    assert "sead" in errors
    assert "Traceback" not in errors
    assert content(workplace) == {}


def test_runs_that_are_no_longer_finite_end_with_status_1(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minerva_torchrl.algorithms.config.out_of_range", lambda *_, **__: ())
    settings = dotted("vmpo", run_dir="run", max_skipped=1, total_frames=1000)
    # Steps as large as these leave nothing finite.
    settings |= {"optim.lr_actor": 1e30, "optim.lr_critic": 1e30, "optim.clip": None}
    assert run_script("vmpo_dmc.py", *arguments(settings)) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert "error: " in errors
    assert "The last good checkpoint: run/checkpoints/last" in errors
    model = open_checkpoint("run").load("model")["loss"]
    assert all(tensor.isfinite().all() for tensor in model.values())


# Evaluating --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "run", "ppo").run_dir


def test_evaluates(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(trained)
    assert run_script("evaluate.py", str(trained), "--episodes", "2") == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0] == "ppo gym:Pendulum-v1 at 200 frames"
    assert len(lines) == 4
    mean = column(trained / "eval.csv", "return_mean")[-1]
    assert f"return {mean:.2f} ± " in lines[-1]  # the evaluation at the end of the run, once more
    assert content(trained) == before


def test_evaluates_the_best_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("evaluate.py", str(trained), "--episodes", "2", "--checkpoint", "best") == 0
    best = max(column(trained / "eval.csv", "return_mean"))
    assert f"return {best:.2f} ± " in capsys.readouterr().out


def test_evaluates_with_another_seed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("5", "5", "6"):
        assert run_script("evaluate.py", str(trained), "--episodes", "1", "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--episodes", "0"], "--episodes must be at least 1, got 0"),
        (["--video", "film.avi"], "--video must end in .mp4, got film.avi"),
        (["--checkpoint", "first"], "invalid choice"),
        (["--seed", "-1"], "seed must be"),
    ],
)
def test_wrong_arguments_of_the_evaluation(
    trained: Path, wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script("evaluate.py", str(trained), *wrong) in (1, 2)
    assert message in capsys.readouterr().err


def test_evaluates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("evaluate.py", str(tmp_path / "nothing")) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_evaluates_nothing_that_is_not_there_any_more(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text().replace("gym:Pendulum-v1", "gym:Gone-v1"))
    assert run_script("evaluate.py", str(folder)) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_help_of_the_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("evaluate.py", "--help") == 0
    assert "--checkpoint" in capsys.readouterr().out


# Exporting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["policy.pt2", "policy.onnx"])
def test_exports(
    trained: Path, file: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if file.endswith(".onnx"):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
    before = content(trained)
    assert run_script("export.py", str(trained), file, "--checkpoint", "best") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ppo gym:Pendulum-v1 at ")
    assert lines[1] == f"written to {file}"
    assert len(lines) == 3
    assert [path.name for path in workplace.iterdir()] == [file]
    assert content(trained) == before


def test_wrong_arguments_of_the_export(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("export.py", str(trained), "policy.pt") == 2
    assert "file must end in .pt2 or .onnx, got policy.pt" in capsys.readouterr().err
    assert run_script("export.py", "nothing", "policy.pt2") == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_minimal_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("mpo_minimal.py", "200") == 0
    assert "without exploration: return" in capsys.readouterr().out
