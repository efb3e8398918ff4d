from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.runs import CheckpointError, ConfigError, load_config
from minerva_torchrl.runs import run as run_module
from minerva_torchrl.runs.assemble import Assembly, assemble
from minerva_torchrl.runs.folder import RunFolder, check_folder
from tests.runs.tiny import content, make_resumed, make_run, tiny_config, train

CONFIG = tiny_config("vmpo", total_frames=100)

HOLD = """
import sys
from pathlib import Path
from tests.runs.test_folder import CONFIG, RunFolder

with RunFolder(Path(sys.argv[1]), CONFIG, new=False, frames=-1):
    print("locked", flush=True)
    sys.stdin.read()
"""


def open_folder(path: Path) -> RunFolder:
    return RunFolder(path, CONFIG, new=False, frames=-1)


# The lock ----------------------------------------------------------------------------------------


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        before = content(tmp_path)
        for use in (open_folder, partial(check_folder, new=False)):
            with pytest.raises(
                ConfigError, match=f"run_dir {tmp_path} is in use by process {process.pid}"
            ):
                use(tmp_path)
        assert content(tmp_path) == before
    finally:
        process.kill()
        process.communicate()
    with open_folder(tmp_path), pytest.raises(ConfigError, match="is in use"):
        open_folder(tmp_path)
    with open_folder(tmp_path):  # free again
        pass


def test_a_lock_that_is_there_already_is_used(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    with open_folder(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    assert load_config(tmp_path).algo == "vmpo"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_not_followed(there: bool, tmp_path: Path) -> None:
    target, run_dir = tmp_path / "important", tmp_path / "run"
    if there:
        target.write_text("important")
    run_dir.mkdir()
    (run_dir / ".lock").symlink_to(target)
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.lock can't be used: it is a link, and must be"):
        make_run(CONFIG, run_dir).train()
    assert content(tmp_path) == before


# The summary -------------------------------------------------------------------------------------


def test_json_has_null_for_what_is_not_finite(tmp_path: Path) -> None:
    summary = {
        "frames": 5,
        "env": "x",
        "final": math.nan,
        "best": -math.inf,
        "speed": 1.5,
        "a": None,
    }
    with open_folder(tmp_path) as folder:
        folder.write_summary(summary)
    text = (tmp_path / "summary.json").read_text()
    assert text.startswith('{\n  "frames": 5,\n  "env": "x"')
    nothing = {"final": None, "best": None, "a": None}
    assert json.loads(text, parse_constant=pytest.fail) == {**summary, **nothing}


# Errors ------------------------------------------------------------------------------------------


def test_an_error_while_it_is_opened_closes_everything(tmp_path: Path) -> None:
    train(tmp_path, "vmpo", total_frames=50)
    evaluations = (tmp_path / "eval.csv").read_text()
    run = make_resumed(tmp_path, total_frames=100)
    (tmp_path / "eval.csv").write_text("step,loss\n")
    with pytest.raises(CheckpointError, match=r"eval.csv is not a table of a run"):
        run.train()
    assert run.assembly.collector.closed
    assert run.eval_env.is_closed
    (tmp_path / "eval.csv").write_text(evaluations)
    assert make_resumed(tmp_path, total_frames=100).train()["frames"] == 100


def test_an_error_while_a_run_is_made_closes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", "vmpo", total_frames=50)
    train(tmp_path / "other", "vmpo", total_frames=50, network__actor_sizes=[4])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "other" / "checkpoints").rename(tmp_path / "run" / "checkpoints")
    made: list[Assembly] = []

    def note(*args: Any) -> Assembly:
        made.append(assemble(*args))
        return made[0]

    monkeypatch.setattr(run_module, "assemble", note)
    with pytest.raises(CheckpointError, match="is from other networks"):
        make_resumed(tmp_path / "run", total_frames=100)
    assert made[0].collector.closed
