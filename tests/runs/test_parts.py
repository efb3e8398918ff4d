"""Networks, environments and callbacks of the user's."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torchrl.modules import ValueOperator

from minerva_torchrl.envs.batched import copy_seeds
from minerva_torchrl.runs import (
    CheckpointError,
    ConfigError,
    Run,
    evaluate,
    load_config,
    load_policy,
    open_checkpoint,
    parse_config,
)
from minerva_torchrl.runs.settings import resumed_config
from tests.runs import own
from tests.runs.tiny import (
    Killed,
    QuickRun,
    arguments,
    assert_same_runs,
    before_records,
    column,
    dotted,
    nested,
    read_csv,
    run_script,
    tiny_config,
)

OBJECTS: dict[str, Any] = {"make_env": own.Task, "networks": own.make_networks}
NAMES = {"env.factory": "tests.runs.own:Task", "network.factory": "tests.runs.own:make_networks"}


def make_own(folder: Path, kind: str = "ppo", parts: Any = None, **changes: Any) -> Run:
    config = tiny_config(kind, env__name="own task", **changes)
    return QuickRun(config, folder, stream=io.StringIO(), **(OBJECTS if parts is None else parts))


def go_on(folder: Path, *, total_frames: int = 200, **arguments: Any) -> Run:
    config = resumed_config(folder, {"total_frames": total_frames})
    checkpoint = open_checkpoint(folder)
    stream = io.StringIO()
    return QuickRun(config, folder, checkpoint=checkpoint, stream=stream, **arguments)


# In Python ---------------------------------------------------------------------------------------


def test_a_run_uses_them_everywhere(tmp_path: Path) -> None:
    run = make_own(tmp_path, env__kwargs={"gravity": 3.0})
    for env in (run.assembly.env, run.eval_env):
        assert [copy.env.gravity for copy in env.base_env._simulators] == [3.0, 3.0]
    shapes = {tuple(p.shape) for p in run.assembly.actor.parameters()}
    assert shapes == {(2, 2), (2,)}  # linear
    before = [p.clone() for p in run.assembly.loss.parameters()]
    assert run.train()["env"] == "own task"
    assert not any(map(torch.equal, before, run.assembly.loss.parameters()))


def test_the_policy_of_such_a_run(tmp_path: Path) -> None:
    make_own(tmp_path, env__kwargs={"gravity": 3.0}).train()
    policy = load_policy(tmp_path, **OBJECTS)
    env = policy.make_env(episodes=2)
    result = evaluate(env, policy.actor, seed=policy.evaluation_seed)
    assert result.row()["return_mean"] == column(tmp_path / "eval.csv", "return_mean")[-1]
    for seed, expected in zip(copy_seeds(policy.evaluation_seed, 2), result.returns, strict=True):
        task, score = own.Task(gravity=3.0), 0.0
        observation, _ = task.reset(seed=seed)
        for _ in range(15):
            observation, reward, terminated, *_ = task.step(policy.predict(observation))
            score += reward
            if terminated:
                break
        assert score == pytest.approx(expected.item(), rel=1e-5)


def test_a_pair_of_modules(tmp_path: Path) -> None:
    def pair() -> Any:
        env = make_own(tmp_path / "other").assembly.env
        return own.make_policy(env), ValueOperator(torch.nn.Linear(2, 1))

    given = pair()
    make_own(tmp_path / "run", parts={"networks": given, "make_env": own.Task}).train()
    assert load_config(tmp_path / "run").network.factory == "<builtins:tuple>"
    again = pair()
    policy = load_policy(tmp_path / "run", networks=again, make_env=own.Task)
    observation = np.ones((3, 2))
    trained = [p.clone() for p in given[0].parameters()]
    assert all(map(torch.equal, again[0].parameters(), trained))
    assert policy.predict(observation).shape == (3, 1)


def test_objects_without_a_name(tmp_path: Path) -> None:
    parts = {**OBJECTS, "make_env": partial(own.Task, gravity=2.0)}
    make_own(tmp_path, parts=parts, total_frames=50).train()
    assert load_config(tmp_path).env.factory == "<functools:partial>"
    with pytest.raises(CheckpointError, match=r"config.yaml names code, .*<functools:partial>"):
        load_policy(tmp_path)
    message = r"env.factory=<functools:partial> is an object .* Python: pass make_env=... again"
    with pytest.raises(ConfigError, match=message):
        load_policy(tmp_path, trust=True)
    assert load_policy(tmp_path, **parts).config.env.name == "own task"


def test_without_a_title_the_factory_is_one() -> None:
    config = parse_config("ppo", nested({"env.factory": "a.b:make"}))
    assert config.env.name == "a.b:make"
    other = parse_config("ppo", nested({"env.factory": "a.b:make", "env.name": "point"}))
    assert other.env.name == "point"


def test_callbacks_by_name_and_as_objects(tmp_path: Path) -> None:
    config = tiny_config("ppo", callbacks=["tests.runs.own:Batches"])
    QuickRun(config, tmp_path, stream=io.StringIO()).train()
    assert [float(row["batches"]) for row in read_csv(tmp_path / "metrics.csv")] == [1, 2, 3, 4]
    mine = own.Batches()
    assert go_on(tmp_path, callbacks=[mine]).callbacks == (mine,)
    assert mine.count == 4
    assert load_policy(tmp_path).checkpoint.frames == 200  # acting needs no callbacks


# Exact resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpo", "vmpo", "ppo"])
def test_goes_on_as_if_nothing_had_happened(kind: str, tmp_path: Path) -> None:
    make_own(tmp_path / "whole", kind).train()
    run = make_own(tmp_path / "parts", kind)
    assert not run.exact  # so that episodes end at checkpoints

    def kill() -> None:
        if run.frames >= 160:
            raise Killed

    before_records(run, kill)
    with pytest.raises(Killed):
        run.train()
    resumed = go_on(tmp_path / "parts", **OBJECTS)
    assert resumed.frames == 100
    resumed.train()
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"env.kwargs": {"g": 5.0}}, True),
        ({"env.wrappers": ["tests.runs.own:Shift"]}, False),
        ({"env.wrappers": ["tests.runs.own:Double"]}, False),
    ],
)
def test_tasks_with_changes(changes: dict[str, Any], exact: bool, tmp_path: Path) -> None:
    changes = {name.replace(".", "__"): value for name, value in changes.items()}
    changes["optim__anneal_lr"] = False
    for name, frames in (("whole", 200), ("parts", 100)):
        config = tiny_config("ppo", **changes, total_frames=frames)
        run = QuickRun(config, tmp_path / name, stream=io.StringIO())
        assert run.exact is exact
        run.train()
    go_on(tmp_path / "parts", trust=True).train()
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


# The command line --------------------------------------------------------------------------------


def test_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        **dotted("ppo", env__name="own task", run_dir="run"),
        **NAMES,
        "env.kwargs.gravity": 3.0,
        "env.wrappers": "[tests.runs.own:Double,tests.runs.own:half_reward]",
        "callbacks": "[tests.runs.own:Batches]",
    }
    assert run_script("ppo_dmc.py", *arguments(settings)) == 0
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["env"]["kwargs"] == {"gravity": 3.0}
    assert written["callbacks"] == ["tests.runs.own:Batches"]
    assert "batches" in read_csv(tmp_path / "run" / "metrics.csv")[0]
    assert run_script("evaluate.py", "run", "--episodes", "2", "--trust") == 0
    assert load_policy("run", trust=True).predict(np.zeros(2)).shape == (1,)


def test_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_parts_here.py").write_text("from tests.runs.own import *\n")
    settings = dotted("mpo", total_frames=40, run_dir="run", env__factory="my_parts_here:Task")
    assert run_script("mpo_dmc.py", *arguments(settings)) == 0
    assert "mpo gym:Pendulum-v1: 40 frames" in capsys.readouterr().err


def test_help_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script("ppo_dmc.py", "env.kwargs.gravity=5", "--help") == 0
    output = capsys.readouterr().out
    for line in ("factory: null", 'kwargs: {"gravity": 5}', "wrappers: []", "callbacks: []"):
        assert line in output
    assert "trust: false" in output


OWN = "tests.runs.own"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env.factory": "nowhere"}, "env.factory must be written as module:name, got 'nowhere'"),
        ({"env.factory": "no_where:Task"}, "env.factory: no_where can't be imported (ModuleNot"),
        ({"env.factory": f"{OWN}:Tusk"}, f"env.factory: there is no Tusk in {OWN}. Did you mean"),
        ({"env.factory": f"{OWN}:NOT_CALLABLE"}, "NOT_CALLABLE must be callable, and is int"),
        (
            {"env.factory": f"{OWN}:returns_nothing"},
            f"env.factory={OWN}:returns_nothing: what makes an environment must return one of "
            "Gymnasium or TorchRL, got NoneType",
        ),
        (
            {"env.factory": f"{OWN}:Task", "env.kwargs.g": 1},
            f"env.factory={OWN}:Task can't be called with what env.kwargs has: got an unexpected "
            "keyword argument 'g'",
        ),
        ({"env.kwargs.gg": 1}, "env.kwargs: "),
        ({"env.kwargs.seed": 1}, "env.kwargs.seed can't reach gym:Pendulum-v1"),
        ({"env.name": "cartpole-balance", "env.kwargs.gravity": 1}, "env.kwargs: "),
        ({"env.name": "gym:no_module_so:A-v0"}, "env.name: there is no module 'no_module_so'"),
        ({"env.wrappers": f"[{OWN}:Dubble]"}, "env.wrappers: there is no Dubble in"),
        (
            {"env.wrappers": f"[{OWN}:returns_nothing]"},
            "env.wrappers: returns_nothing must return a Gymnasium environment, got NoneType",
        ),
        (
            {"env.wrappers": f"[{OWN}:takes_nothing]"},
            "env.wrappers: takes_nothing must take an environment, or return a transform",
        ),
        (
            {"env.wrappers": f"[{OWN}:Shift,{OWN}:Double]"},
            "env.wrappers: Double is for a Gymnasium environment, and must come before transforms",
        ),
        (
            {"env.name": "cartpole-balance", "env.wrappers": f"[{OWN}:Double]"},
            "env.wrappers: cartpole-balance is a task of DM Control",
        ),
        (
            {"network.factory": f"{OWN}:takes_nothing"},
            f"network.factory={OWN}:takes_nothing must take the environment and the settings: too",
        ),
        (
            {"network.factory": f"{OWN}:returns_nothing"},
            "must give a policy (a ProbabilisticActor of TorchRL) and a critic (a "
            "TensorDictModule) or a list of critics, got NoneType",
        ),
        ({"network.factory": f"{OWN}:policy_without_spec"}, "needs spec=env.action_spec_unbatched"),
        (
            {"network.factory": f"{OWN}:policy_of_another_family"},
            f"loss with the networks of network.factory={OWN}:policy_of_another_family: ",
        ),
        ({"callbacks": f"[{OWN}:Task]"}, f"callbacks: {OWN}:Task must give a Callback, got Task"),
        (
            {"callbacks": f"[{OWN}:NeedsArguments]"},
            f"callbacks: {OWN}:NeedsArguments must need no arguments: missing a required argument",
        ),
        ({"callbacks": "x"}, "callbacks must be a list, each item a text, got 'x' (str)"),
        ({"env.kwargs": 3}, "env.kwargs must be a section of numbers, texts, "),
    ],
)
def test_mistakes_are_told_in_one_line(
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_script("vmpo_dmc.py", *arguments({**dotted("vmpo"), **settings})) == 2
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 1
    assert output.startswith("error: ")
    assert message in output
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_python(tmp_path: Path) -> None:
    for parts, message in (
        ({"networks": torch.nn.Linear(2, 2)}, "networks must be a function of environment and"),
        ({"networks": (1, 2)}, "networks must give a policy .* got int, int"),
        ({"make_env": 3}, "make_env must be callable, got int"),
        ({"make_env": lambda: 3}, "make_env: what makes an environment must return .* got int"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_own(tmp_path, parts={"make_env": own.Task, **parts})


# Environments ------------------------------------------------------------------------------------


def test_environments_of_torchrl(tmp_path: Path) -> None:
    parts = {**OBJECTS, "make_env": own.TorchRLTask}
    make_own(tmp_path / "whole", parts=parts, optim__anneal_lr=False).train()
    short = {"total_frames": 100, "optim__anneal_lr": False}
    make_own(tmp_path / "parts", parts=parts, **short).train()
    go_on(tmp_path / "parts", total_frames=200, **parts).train()
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")
    policy = load_policy(tmp_path / "parts", **parts)
    action = policy.predict({"x": np.ones((4, 1)), "v": np.zeros((4, 1))})
    assert action.shape == (4, 1)


def test_pictures(tmp_path: Path) -> None:
    make_own(tmp_path, total_frames=50).train()
    env = load_policy(tmp_path, **OBJECTS).make_env(video=True)
    env.reset()
    assert env.base_env.render().shape == (16, 16, 3)


def test_a_transform_that_a_bare_policy_lacks(tmp_path: Path) -> None:
    changes = {"env__wrappers": [f"{OWN}:Shift"], "total_frames": 50}
    make_own(tmp_path, **changes).train()
    policy = load_policy(tmp_path, **OBJECTS, trust=True)
    with pytest.raises(ValueError, match=r"Shift changes observations or actions, .* make_env\(\)"):
        policy.predict(np.zeros(2))
    result = evaluate(policy.make_env(episodes=2), policy.actor, seed=policy.evaluation_seed)
    assert result.row()["return_mean"] == column(tmp_path / "eval.csv", "return_mean")[-1]


@pytest.mark.slow
def test_in_processes(tmp_path: Path) -> None:
    run = make_own(tmp_path, env__num_envs=2, env__num_workers=2, env__wrappers=[f"{OWN}:Double"])
    assert run.train()["frames"] == 200
