"""``python -m minerva_torchrl``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import minerva_torchrl
from minerva_torchrl.__main__ import main
from minerva_torchrl.envs import list_envs
from minerva_torchrl.runs import load_config, open_checkpoint
from tests.runs.tiny import SCRIPTS, arguments, content, dotted, run_script


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run in, as if the package was started there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(Path(minerva_torchrl.__file__).parent / "__main__.py")])
    yield tmp_path
    GlobalHydra.instance().clear()


def settings(algo: str, **changes: object) -> list[str]:
    return arguments(dotted(algo, **{"total_frames": 50, "run_dir": "run", **changes}))


@pytest.mark.slow
def test_from_a_wheel(workplace: Path) -> None:
    """Commands work where there is the package and nothing else of the checkout."""
    package = Path(minerva_torchrl.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, workplace / "site" / "minerva_torchrl", ignore=ignore)
    environment = {**os.environ, "PYTHONPATH": str(workplace / "site"), "OMP_NUM_THREADS": "1"}
    for command in (["train", "ppo", *settings("ppo")], ["evaluate", "run"]):
        done = subprocess.run(
            [sys.executable, "-m", "minerva_torchrl", *command],
            capture_output=True,
            text=True,
            cwd=workplace,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ppo gym:Pendulum-v1 at 50 frames")
    assert {path.name for path in workplace.iterdir()} == {"site", "run"}


def test_suggested_commands_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", *settings("ppo")]) == 0
    errors = capsys.readouterr().err
    suggested = dict(re.findall(r"(watch|go on) +python -m minerva_torchrl (.*)", errors))
    assert main(shlex.split(suggested["go on"])) == 0
    assert open_checkpoint("run").frames == 100
    watch = shlex.split(suggested["watch"])
    assert watch == ["evaluate", "run", "--video", "run/policy.mp4"]
    if find_spec("pygame") is None:  # which draws this task
        watch = watch[:2]
    assert main(watch) == 0
    assert capsys.readouterr().out.startswith("ppo gym:Pendulum-v1 at 100 frames")
    assert Path("run/policy.mp4").exists() == (len(watch) > 2)
    assert main(["report", "run", "--out", "report"]) == 0
    assert "report.html: 1 run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "algo", ["mpo", *(pytest.param(algo, marks=pytest.mark.slow) for algo in ("vmpo", "ppo"))]
)
def test_trains_as_the_script_does(algo: str, workplace: Path) -> None:
    assert main(["train", algo, "preset=minerva-seed", "--cfg", "job"]) == 0
    assert main(["train", algo, *settings(algo)]) == 0
    assert run_script(SCRIPTS[algo], *settings(algo, run_dir="script")) == 0
    ours, scripts = (open_checkpoint(name).load("model")["loss"] for name in ("run", "script"))
    assert all((ours[name] == scripts[name]).all() for name in scripts)
    assert {path.name for path in workplace.iterdir()} == {"run", "script"}  # nothing of Hydra's


def test_several_seeds(workplace: Path) -> None:
    pattern = "run_dir='x_${seed}'"
    assert main(["train", "vmpo", "--multirun", "seed=0,1", pattern, *settings("vmpo")[:-1]]) == 0
    assert {path.name for path in workplace.iterdir()} == {"x_0", "x_1"}
    assert [load_config(workplace / f"x_{seed}").seed for seed in (0, 1)] == [0, 1]


def test_a_preset_in_the_help(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mpo", "--help", "preset=tonic", "seed=7"]) == 0
    output = capsys.readouterr().out
    for line in (
        "Train MPO. Maximum a posteriori policy optimisation, off-policy, for continuous and",
        "python -m minerva_torchrl train mpo --multirun seed=0,1,2",
        r"seed: 7 +# Seed of everything: networks, environments, sampling\.",
        r"target_tau: 0\.005 +# Moving average of the target networks instead\.",
        r"num_action_samples: 20 +# Sampled actions per state",  # the loss says so
        r"clip_dual: null +# Largest joint gradient norm of the duals",  # the stepper
    ):
        assert re.search(line, output), line
    assert content(workplace) == {}


@pytest.mark.parametrize("algo", list(SCRIPTS))
def test_every_setting_has_a_meaning(algo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", algo, "--help"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\n    epsilon: .*# Bound of the E-step", output) or algo == "ppo"
    assert [line for line in output.splitlines() if re.match(r" +\w+: [^#]*$", line)] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 0, "python -m minerva_torchrl train ALGORITHM"),
        (["--help"], 0, "python -m minerva_torchrl envs"),
        (["trian"], 2, "error: there is no command 'trian'. There are train, evaluate, "),
        (["train"], 0, "  vmpo    V-MPO: On-policy maximum a posteriori policy optimisation"),
        (["train", "-h"], 0, "  ppo     PPO: Proximal policy optimisation"),
        (["train", "sac"], 2, "error: ALGORITHM must be one of mpo, vmpo, ppo, got 'sac'."),
        (["train", "mpo", "optim.lr=1"], 2, "error: there is no setting 'optim.lr'."),
        (["train", "mpo", "seed=-1"], 2, "error: seed must be between 0 and"),
        (["train", "mpo", "--help", "seed=x"], 2, "error: seed must be an integer, got 'x'"),
        (["train", "ppo", "resume=gone"], 1, "error: there is no run in gone"),
        (["evaluate", "--help"], 0, "usage: python -m minerva_torchrl evaluate"),
        (["evaluate", "gone"], 1, "error: "),
        (["report"], 2, "the following arguments are required: RUNS, --out"),
        (["envs", "--help"], 0, "usage: python -m minerva_torchrl envs"),
        (["envs", "no such task"], 2, "error: there is no task with 'no such task' in its name."),
    ],
)
def test_help_and_mistakes(
    arguments: list[str],
    code: int,
    message: str,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        found = main(arguments)
    except SystemExit as end:
        found = int(end.code or 0)
    output = capsys.readouterr()
    assert found == code
    assert message in (output.err if code else output.out)
    assert "Traceback" not in output.err
    assert content(workplace) == {}


def test_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs"]) == 0
    assert capsys.readouterr().out.splitlines() == list_envs()
    assert main(["envs", "Hopper-"]) == 0
    found = capsys.readouterr().out.split()
    assert {"hopper-hop", "gym:Hopper-v5"} <= {*found}
    assert all("hopper-" in name.lower() for name in found)
