"""Code that the folder of a run names is imported by nobody who did not ask for it."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from minerva_torchrl.__main__ import main
from minerva_torchrl.report import load_runs, make_report
from minerva_torchrl.runs import CheckpointError, Run, load_config, load_policy, open_checkpoint
from minerva_torchrl.runs.settings import resumed_config
from tests.runs.tiny import arguments, content, dotted, tiny_config, train

MODULE = """
from pathlib import Path
import gymnasium
from tests.runs.own import *

Path(__file__).with_name("mark").touch()
gymnasium.register("Marked-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=20)
"""
NAMED: dict[str, Any] = {
    "env.factory": "marking:Task",
    "env.name": "gym:marking:Marked-v0",
    "env.wrappers": ["marking:Double"],
    "network.factory": "marking:make_networks",
    "callbacks": ["marking:Batches"],
}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file that is there once the module of another was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    (tmp_path / "marking.py").write_text(MODULE)
    yield tmp_path / "mark"
    sys.modules.pop("marking", None)
    gymnasium.registry.pop("Marked-v0", None)
    GlobalHydra.instance().clear()


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "run", "ppo", total_frames=50).run_dir


def name_in_folder(plain_run: Path, setting: str, **more: Any) -> Path:
    """A copy of a run whose settings name code."""
    folder = shutil.copytree(plain_run, Path("run"), symlinks=True)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    section, _, name = setting.rpartition(".")
    (settings[section] if section else settings)[name] = NAMED[setting]
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, **more}))
    summary = json.loads((folder / "summary.json").read_text())
    summary["env"] = settings["env"]["name"]
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def command(*words: str) -> int:
    GlobalHydra.instance().clear()
    try:
        return main(list(words))
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("setting", list(NAMED))
def test_nothing_is_imported(
    setting: str, plain_run: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = name_in_folder(plain_run, setting, trust=True)  # which is not for the folder to say
    before = content(folder)
    value = NAMED[setting] if isinstance(NAMED[setting], str) else f"[{NAMED[setting][0]}]"
    line = f"run/config.yaml names code, which is not imported without your word: {setting}={value}"
    assert command("train", "ppo", "resume=run", "total_frames=100") == 1
    output = capsys.readouterr().err
    assert output.startswith(f"error: {line}. If you trust it, add trust=true to resume=...")
    assert len(output.splitlines()) == 1
    config = resumed_config(folder, {"total_frames": 100})
    with pytest.raises(CheckpointError, match="names code"):
        Run(config, folder, checkpoint=open_checkpoint(folder), stream=io.StringIO())
    if setting != "callbacks":  # which acting does without
        assert command("evaluate", "run") == 1
        assert line in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="names code"):
            load_policy(folder)
    else:
        load_policy(folder)
    make_report(load_runs(folder.parent, include_unfinished=True), Path("report"))
    assert command("report", "run", "--out", "other") == 0
    after = content(folder)
    assert before == after
    assert not mark.exists()


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=pytest.mark.slow) if name != "env.name" else name for name in NAMED],
)
def test_trust_and_names_that_are_given_again(setting: str, mark: Path) -> None:
    settings = {**dotted("ppo", total_frames=50, run_dir="run"), setting: NAMED[setting]}
    again = arguments({setting: NAMED[setting]})[0].replace("'", "")
    settings = [argument.replace("'", "") for argument in arguments(settings)]
    assert command("train", "ppo", *settings) == 0
    assert mark.exists()
    assert not load_config(Path("run")).trust
    assert command("train", "ppo", "resume=run", "total_frames=100", again) == 0
    assert open_checkpoint("run").frames == 100
    assert command("train", "ppo", "resume=run", "total_frames=150", "trust=true") == 0
    assert open_checkpoint("run").frames == 150
    assert yaml.safe_load(Path("run/config.yaml").read_text())["trust"] is False
    assert command("evaluate", "run", "--trust") == 0
    assert load_policy("run", trust=True).checkpoint.frames == 150


def test_other_names_than_those_in_the_folder(
    plain_run: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_in_folder(plain_run, "env.factory")
    assert command("train", "ppo", "resume=run", "env.factory=tests.runs.own:Task") == 2
    assert "env.factory can't change when a run is resumed" in capsys.readouterr().err
    assert command("train", "ppo", "resume=run", "network.factory=marking:make_networks") == 2
    assert "network.factory can't change when a run is resumed" in capsys.readouterr().err
    assert not mark.exists()


def test_one_name_does_not_stand_for_another(
    plain_run: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_in_folder(plain_run, "env.factory", callbacks=["marking:Batches"])
    assert command("train", "ppo", "resume=run", "env.factory=marking:Task") == 1
    assert "without your word: callbacks=[marking:Batches]. If" in capsys.readouterr().err
    assert not mark.exists()


def test_the_command_to_go_on_has_what_it_needs(
    mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = {"network.factory": "marking:make_networks"}
    settings = dotted("ppo", total_frames=50, run_dir="run") | code
    assert command("train", "ppo", *arguments(settings)) == 0
    output = capsys.readouterr().err
    assert "resume=run trust=true total_frames=100" in output
    assert "evaluate run --video run/policy.mp4 --trust" in output


def test_plain_runs_need_no_trust(plain_run: Path) -> None:
    config = tiny_config("ppo", total_frames=50)
    assert Run(config, plain_run, checkpoint=open_checkpoint(plain_run)).is_complete
    assert load_policy(plain_run).checkpoint.frames == 50
