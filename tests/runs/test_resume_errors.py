from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minerva_torchrl.runs import CheckpointStore
from tests.runs.tiny import content, fix_hash, run_script, train, train_and_kill


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that can be resumed."""
    folder = tmp_path_factory.mktemp("originals")
    train_and_kill(folder / "mpo", "mpo", at=120)
    train_and_kill(folder / "vmpo", "vmpo", at=150)
    train(folder / "small", "vmpo", total_frames=50, network__actor_sizes=[4])
    train(folder / "alone", "vmpo", total_frames=50, env__num_envs=1)
    return {name: folder / name for name in ("mpo", "vmpo", "small", "alone")}


@pytest.fixture
def run_dir(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["vmpo"], tmp_path / "run", symlinks=True)


def last(run_dir: Path) -> Path:
    return (run_dir / "checkpoints" / "last").resolve()


def assert_refused(
    capsys: pytest.CaptureFixture[str],
    message: str,
    *arguments: str,
    script: str = "vmpo_dmc.py",
    status: int = 1,
) -> None:
    """One line that says what is wrong, and a status: 1 for a folder, 2 for the command line."""
    capsys.readouterr()
    assert run_script(script, *arguments) == status
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1, output.err
    assert output.err.startswith("error: ")
    assert message in output.err


# Folders that are no runs ------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, "no such folder", f"resume={tmp_path / 'nothing'}")
    assert content(tmp_path) == {}


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, "it has no config.yaml", f"resume={tmp_path}")
    assert content(tmp_path) == {}


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert_refused(capsys, "file", f"resume={tmp_path / 'file'}")
    assert (tmp_path / "file").read_text() == "x"


def test_a_foreign_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("learning_rate: 0.1\n")
    (tmp_path / "model.pt").write_bytes(b"weights")
    before = content(tmp_path)
    assert_refused(capsys, "is not the configuration of a run", f"resume={tmp_path}")
    assert content(tmp_path) == before


def test_a_run_of_another_algorithm(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run_dir)
    message = "is a run of vmpo, not of mpo"
    assert_refused(capsys, message, f"resume={run_dir}", script="mpo_dmc.py", status=2)
    assert content(run_dir) == before


def test_a_setting_that_may_not_change(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run_dir)
    message = "loss.epsilon can't change when a run is resumed"
    changes = ("loss.epsilon=0.2", "num_threads=1")
    assert_refused(capsys, message, f"resume={run_dir}", *changes, status=2)
    message = "preset can't change"
    assert_refused(capsys, message, f"resume={run_dir}", "preset=minerva-seed", status=2)
    assert content(run_dir) == before


# Damage ------------------------------------------------------------------------------------------


def truncate(run_dir: Path) -> None:
    os.truncate(last(run_dir) / "training.pt", 100)


def flip_a_byte(run_dir: Path) -> None:
    file = last(run_dir) / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose_a_part(run_dir: Path) -> None:
    (last(run_dir) / "environment.pt").unlink()


def lose_the_manifest(run_dir: Path) -> None:
    (last(run_dir) / "manifest.json").unlink()


def cut_the_manifest(run_dir: Path) -> None:
    os.truncate(last(run_dir) / "manifest.json", 50)


def lose_the_checkpoint(run_dir: Path) -> None:
    shutil.rmtree(last(run_dir))


def lose_all_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")


def cut_the_settings(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("algo: vmpo\nseed: [")


def garble_a_setting(run_dir: Path) -> None:
    file = run_dir / "config.yaml"
    text, count = re.subn(r"gamma: 0\.\d+", "gamma: 9.9", file.read_text())
    assert count == 1
    file.write_text(text)


def garble_the_evaluations(run_dir: Path) -> None:
    (run_dir / "eval.csv").write_bytes(b"\x00\xff\nnot,a,table\n1\n")


def garble_the_metrics(run_dir: Path) -> None:
    (run_dir / "metrics.csv").write_text("frames,loss\nx,y,z\n5\n")


def keep_the_model_only(run_dir: Path) -> None:
    manifest = json.loads((last(run_dir) / "manifest.json").read_text())
    manifest["parts"] = {"model": manifest["parts"]["model"]}
    (last(run_dir) / "manifest.json").write_text(json.dumps(manifest))


def empty_a_part(run_dir: Path) -> None:
    torch.save({}, last(run_dir) / "training.pt")
    fix_hash(last(run_dir), "training")


def lose_the_metadata(run_dir: Path) -> None:
    manifest = json.loads((last(run_dir) / "manifest.json").read_text())
    manifest["metadata"] = {}
    (last(run_dir) / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "has 100 bytes instead of"),
        (flip_a_byte, "is corrupt"),
        (lose_a_part, "environment.pt: is missing"),
        (lose_the_manifest, "has no manifest.json"),
        (cut_the_manifest, "is not JSON"),
        (lose_the_checkpoint, "which does not exist"),
        (lose_all_checkpoints, "there is no checkpoint in it"),
        (cut_the_settings, "is not the configuration of a run"),
        (garble_a_setting, "has settings that can't be used: loss.gamma must be between 0 and 1"),
        (garble_the_evaluations, "is not a table of a run"),
        (garble_the_metrics, "is not a table of a run"),
        (keep_the_model_only, "not a checkpoint to resume from: it has no environment, training"),
        (empty_a_part, "training"),
        (lose_the_metadata, "is not a checkpoint of a run of vmpo, but of None"),
    ],
)
def test_damaged_runs_are_refused_and_left_alone(
    damage: Callable[[Path], None],
    message: str,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(run_dir)
    before = content(run_dir)
    before.pop(".lock")
    assert_refused(capsys, message, f"resume={run_dir}")
    after = content(run_dir)
    after.pop(".lock")
    assert after == before


@pytest.mark.parametrize("name", ["mpo", "small", "alone"])
def test_checkpoints_of_other_runs_are_refused(
    name: str, originals: dict[str, Path], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    shutil.copytree(originals[name] / "checkpoints", run_dir / "checkpoints", symlinks=True)
    before = content(run_dir)
    messages = {"mpo": "is not a checkpoint of a run of vmpo", "small": "is from other networks"}
    assert_refused(capsys, messages.get(name, "checkpoints"), f"resume={run_dir}")
    assert content(run_dir) == before


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (open, (str(self.file), "w"))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("part", ["model", "training"])
def test_files_that_would_run_code_are_refused(
    part: str, raw: bool, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    file = last(run_dir) / f"{part}.pt"
    if raw:
        file.write_bytes(pickle.dumps(Exploit(trace)))
    else:
        torch.save({"loss": Exploit(trace)}, file)
    fix_hash(last(run_dir), part)
    before = content(run_dir)
    assert_refused(capsys, f"{part}.pt: ", f"resume={run_dir}")
    assert not trace.exists()
    assert content(run_dir) == before
    if part == "model":
        capsys.readouterr()
        assert run_script("evaluate.py", str(run_dir), "--episodes", "1") == 1
        assert capsys.readouterr().err.startswith("error: ")
        assert not trace.exists()


def test_a_checkpoint_in_place_of_its_link(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What copying with `scp -r` makes of it.
    folder, link = last(run_dir), run_dir / "checkpoints" / "last"
    link.unlink()
    folder.rename(link)
    assert run_script("vmpo_dmc.py", f"resume={run_dir}") == 0
    assert "200 frames in" in capsys.readouterr().err
    assert CheckpointStore(run_dir / "checkpoints").find("last").name == "frames-000000200"


def test_resumes_from_the_command_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("vmpo_dmc.py", f"resume={run_dir}", "total_frames=250") == 0
    output = capsys.readouterr().err
    assert "vmpo gym:Pendulum-v1: 250 frames in" in output
    assert f"resume={run_dir} total_frames=500" in output
    assert run_script("vmpo_dmc.py", f"resume={run_dir}") == 0
    assert f"{run_dir} is complete: it has 250 frames." in capsys.readouterr().err
