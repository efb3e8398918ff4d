from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.report import load_runs
from minerva_torchrl.runs import Run, VMPOConfig, parse_config
from tests.report.synthetic import straight, write_run


def reason(folder: Path, **kwargs: Any) -> str:
    """Why the only run below a folder can't be reported."""
    loaded = load_runs(folder, **kwargs)
    assert loaded.runs == ()
    (problem,) = loaded.problems
    return problem.reason


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is found -----------------------------------------------------------------------------------


def test_a_run(tmp_path: Path) -> None:
    points = [(0, 1.5), (5_000, 20.25), (10_000, 30.125)]
    folder = write_run(tmp_path / "run", "vmpo", points, task="gym:Hopper-v5", seed=4)
    before = content(tmp_path)
    (run,) = load_runs(folder).runs
    assert (run.task, run.algo, run.preset, run.seed) == ("gym:Hopper-v5", "vmpo", "default", 4)
    assert run.frames.tolist() == [0, 5_000, 10_000]
    assert run.returns.tolist() == [1.5, 20.25, 30.125]
    assert run.last_frame == 10_000
    assert run.finished
    assert run.settings["optim.lr_alpha"] == VMPOConfig().optim.lr_alpha
    assert run.speed == {
        "wall_seconds": 500.0,
        "frames_per_second": 20.0,
        "updates_per_second": 10.0,
    }
    assert content(tmp_path) == before


def test_runs_at_any_depth(tmp_path: Path) -> None:
    write_run(tmp_path / "b" / "c" / "d", seed=1)
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "a" / "inside", seed=2)
    loaded = load_runs(tmp_path)
    assert [run.folder.name for run in loaded.runs] == ["a", "inside", "d"]
    assert loaded.problems == ()


@pytest.mark.parametrize("name", ["checkpoints", "videos", "wandb", ".trash"])
def test_not_within_what_runs_write(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run")
    write_run(tmp_path / "run" / name / "deeper", seed=1)
    loaded = load_runs(tmp_path)
    assert [run.seed for run in loaded.runs] == [0]
    assert loaded.problems == ()


def test_each_folder_once_and_in_order(tmp_path: Path) -> None:
    for seed in (2, 0, 1):
        write_run(tmp_path / f"seed{seed}", seed=seed)
    loaded = load_runs([tmp_path / "seed2", tmp_path, str(tmp_path / "seed0")])
    assert [run.seed for run in loaded.runs] == [2, 0, 1]
    assert loaded.problems == ()


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="nowhere is not a folder"):
        load_runs(tmp_path / "nowhere")


# What is broken ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eval.csv", "summary.json"])
def test_no_settings(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert reason(tmp_path) == "it has no config.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.yaml is not the configuration of a run"),
        ("algo: [", "config.yaml is not the configuration of a run"),
        ("\x00\x01", "config.yaml is not the configuration of a run"),
        ("seed: 3\n", "config.yaml is not the configuration of a run"),
        ("algo: sac\n", "config.yaml has settings that can't be used: algo must be one of mpo, "),
        ("algo: mpo\nseed: x\noptim: {lr: 1}\n", "there is no setting 'optim.lr'"),
    ],
)
def test_garbled_settings(tmp_path: Path, text: str, message: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(text)
    given = reason(tmp_path)
    assert message in given
    assert "\n" not in given
    assert str(tmp_path) not in given


HEADER = "frames,return_mean,return_std\n"
NO_TABLE = "eval.csv is not a table of a run: "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "eval.csv has no evaluation"),
        (HEADER, "eval.csv has no evaluation"),
        (HEADER + "0,1,1\n100000,nan,1\n", "line 3 of eval.csv has no finite return_mean"),
        (HEADER + "0,inf,1\n100000,1,1\n", "line 2 of eval.csv has no finite return_mean"),
        (HEADER + "0,,1\n100000,1,1\n", "line 2 of eval.csv has no finite return_mean"),
        (HEADER + "0,1,1\n100000,high,1\n", NO_TABLE + "return_mean in line 3 is"),
        (HEADER + "0,1,1\n1e5,2,1\n", NO_TABLE + "line 3 does not fit"),
        (HEADER + "-5,1,1\n100000,2,1\n", NO_TABLE + "line 2 does not fit"),
        (HEADER + "0,1\n100000,2,1\n", NO_TABLE + "line 2 does not fit"),
        (HEADER + "0,1,1\n0,1,1\n100000,1,1\n", NO_TABLE + "line 3 does not have more frames"),
        ("frames,return\n0,1\n", "eval.csv has no column 'return_mean'"),
        ("frames,frames,return_mean\n0,0,1\n", NO_TABLE + "two columns have the same name"),
        (HEADER + '0,"1,1\n', NO_TABLE),
        (HEADER + "0,1,1\n100000,2\n", "eval.csv ends at 0 frames, but the run at 100,000"),
        (HEADER + "0,1,1\n50000,2,1\n", "eval.csv ends at 50,000 frames, but the run at 100,000"),
        (
            HEADER + "0,1,1\n100000,99,1\n",
            "summary.json has final_return = 100.0, but the last row of eval.csv 99.0",
        ),
    ],
)
def test_broken_evaluations(tmp_path: Path, text: str, message: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "eval.csv").write_text(text)
    assert reason(tmp_path).startswith(message)


def test_evaluations_that_are_no_text(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "eval.csv").write_bytes(b"\xff\xfe")
    assert reason(tmp_path) == NO_TABLE + "it is not text"


def test_no_evaluations(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "eval.csv").unlink()
    assert reason(tmp_path) == "it has no eval.csv"
    (tmp_path / "run" / "eval.csv").mkdir()
    assert reason(tmp_path).startswith("eval.csv can't be read: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "summary.json is not JSON"),
        ("[]", "summary.json does not have the frames of the run"),
        ('{"frames": "many"}', "summary.json does not have the frames of the run"),
        ('{"frames": 100000, "wall_seconds": "long"}', "summary.json has wall_seconds = 'long'"),
        ('{"frames": 100000, "wall_seconds": -1}', "summary.json has wall_seconds = -1"),
        ('{"frames": 100000, "seed": 5}', "summary.json has seed = 5, but config.yaml 0"),
        ('{"frames": 100000, "env": "x"}', "summary.json has env = 'x', but config.yaml 'walker-"),
        ('{"frames": 100000, "final_return": null}', "summary.json has final_return = None"),
        ('{"frames": 99999}', "unfinished: it has 99,999 of 100,000 frames"),
    ],
)
def test_broken_summaries(tmp_path: Path, text: str, message: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(text)
    assert reason(tmp_path).startswith(message)


def test_unknown_speeds_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", summary={"wall_seconds": None, "updates_per_second": 3})
    (run,) = load_runs(tmp_path).runs
    assert run.speed == {"frames_per_second": 200.0, "updates_per_second": 3}


def test_a_run_may_end_later_than_asked(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "ppo", straight(100_352, step=2_048), total_frames=100_000)
    (run,) = load_runs(tmp_path).runs
    assert run.finished
    assert run.last_frame == 100_352


def test_the_others_are_read(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    (write_run(tmp_path / "b", seed=1) / "eval.csv").unlink()
    write_run(tmp_path / "c", seed=2)
    loaded = load_runs(tmp_path)
    assert [run.seed for run in loaded.runs] == [0, 2]
    assert [problem.folder.name for problem in loaded.problems] == ["b"]


# What is unfinished ------------------------------------------------------------------------------


def test_unfinished(tmp_path: Path) -> None:
    write_run(tmp_path / "run", points=straight(30_000), total_frames=100_000, finished=False)
    assert reason(tmp_path) == "unfinished: it has no summary.json"
    (run,) = load_runs(tmp_path, include_unfinished=True).runs
    assert not run.finished
    assert run.last_frame == 30_000
    assert run.speed == {}


def test_resumed_with_more_frames(tmp_path: Path) -> None:
    write_run(tmp_path / "run", points=straight(30_000), total_frames=50_000)
    assert reason(tmp_path) == "unfinished: it has 30,000 of 50,000 frames"
    (run,) = load_runs(tmp_path, include_unfinished=True).runs
    assert not run.finished
    assert run.speed["wall_seconds"] == 500.0


def test_a_line_that_is_being_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", points=straight(30_000), finished=False)
    with (folder / "eval.csv").open("a") as file:
        file.write("40000,12")
    before = content(tmp_path)
    (run,) = load_runs(tmp_path, include_unfinished=True).runs
    assert run.last_frame == 30_000
    assert content(tmp_path) == before


def test_a_finished_run_keeps_its_last_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    text = (folder / "eval.csv").read_text()
    (folder / "eval.csv").write_text(text.rstrip("\n"))
    (run,) = load_runs(tmp_path).runs
    assert run.last_frame == 100_000


def test_unfinished_runs_without_evaluations(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    (folder / "eval.csv").write_text("frames,return_mean")
    assert reason(tmp_path, include_unfinished=True) == "eval.csv has no evaluation"


# Duplicates --------------------------------------------------------------------------------------


def test_duplicates(tmp_path: Path) -> None:
    write_run(tmp_path / "first", points=straight(top=50.0))
    write_run(tmp_path / "second", points=straight(top=60.0), eval__episodes=9, num_threads=2)
    write_run(tmp_path / "other", optim__lr_actor=2e-3)
    loaded = load_runs([tmp_path / "first", tmp_path / "second", tmp_path / "other"])
    assert [run.folder.name for run in loaded.runs] == ["first", "other"]
    (problem,) = loaded.problems
    assert problem.folder.name == "second"
    assert problem.reason == (
        f"it has the same task, algorithm, settings and seed as {tmp_path / 'first'}"
    )


def test_of_duplicates_the_finished_one_is_taken(tmp_path: Path) -> None:
    write_run(tmp_path / "a", points=straight(30_000), total_frames=100_000, finished=False)
    write_run(tmp_path / "b")
    loaded = load_runs(tmp_path, include_unfinished=True)
    assert [run.folder.name for run in loaded.runs] == ["b"]
    assert [problem.folder.name for problem in loaded.problems] == ["a"]


def test_a_broken_run_is_no_duplicate(tmp_path: Path) -> None:
    (write_run(tmp_path / "a") / "eval.csv").unlink()
    write_run(tmp_path / "b")
    loaded = load_runs(tmp_path)
    assert [run.folder.name for run in loaded.runs] == ["b"]


def test_a_longer_run_is_no_duplicate(tmp_path: Path) -> None:
    """It may be evaluated at other times."""
    write_run(tmp_path / "short", points=straight(50_000))
    write_run(tmp_path / "long", points=straight(100_000))
    write_run(tmp_path / "long2", points=straight(100_000))
    loaded = load_runs(tmp_path)
    assert [run.folder.name for run in loaded.runs] == ["long", "short"]
    assert [problem.folder.name for problem in loaded.problems] == ["long2"]


def test_the_helper_writes_what_a_run_writes(tmp_path: Path) -> None:
    """That is tested here because all other tests rely on it."""
    config = parse_config(
        "ppo",
        {
            "preset": "minerva-seed",
            "total_frames": 64,
            "env": {"name": "gym:Pendulum-v1", "max_episode_steps": 5},
            "collector": {"frames_per_batch": 64},
            "network": {"actor_sizes": [4], "critic_sizes": [4]},
            "optim": {"num_epochs": 1},
            "eval": {"episodes": 1},
        },
    )
    Run(config, tmp_path / "real", stream=io.StringIO()).train()
    (real,) = load_runs(tmp_path / "real").runs
    assert real.finished
    points = list(zip(real.frames.tolist(), real.returns.tolist(), strict=True))
    changed = {name.replace(".", "__"): value for name, value in real.settings.items()}
    for name in ("algo", "run_dir", "seed"):
        del changed[name]
    task = changed.pop("env__name")
    write_run(tmp_path / "made", "ppo", points, task=task, seed=real.seed, **changed)
    for name in ("config.yaml", "summary.json", "eval.csv"):
        texts = [(tmp_path / folder / name).read_text() for folder in ("real", "made")]
        if name == "config.yaml":
            assert texts[0].replace(str(tmp_path / "real"), str(tmp_path / "made")) == texts[1]
        elif name == "summary.json":
            first, second = map(json.loads, texts)
            assert list(first) == list(second)
            for key in ("algo", "env", "seed", "frames", "final_return", "best_return"):
                assert first[key] == second[key]
        else:
            rows = [[line.split(",")[:2] for line in text.splitlines()] for text in texts]
            assert rows[0] == rows[1]
