from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torchrl.modules import OneHotCategorical, TanhNormal

from minerva_torchrl.runs import TrainedPolicy, load_policy
from minerva_torchrl.runs.policy import DeployedPolicy
from tests.runs.policies import (
    MakeEnv,
    evaluated_returns,
    flatten,
    gaussian,
    make_actor,
    play_bare,
    random_rows,
    stack,
)
from tests.runs.tiny import train

HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime")
ENDINGS = [".pt2", pytest.param(".onnx", marks=needs_onnx)]

Act = Callable[[np.ndarray], np.ndarray]


def load_file(file: Path) -> Act:
    """What others do with the file."""
    if file.suffix == ".pt2":
        module = torch.export.load(file).module()
        return lambda observations: module(torch.from_numpy(observations)).numpy()
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(file)
    return lambda observations: session.run(["action"], {"observation": observations})[0]


def export(policy: TrainedPolicy | DeployedPolicy, folder: Path, ending: str) -> Act:
    policy.export(folder / f"policy{ending}")
    return load_file(folder / f"policy{ending}")


@pytest.fixture(scope="module", params=["mpo", "vmpo-discrete", "ppo", "suite"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_policy(train(tmp_path_factory.mktemp("runs") / "run", request.param).run_dir)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_repeats_the_evaluation(policy: TrainedPolicy, ending: str, tmp_path: Path) -> None:
    act = export(policy, tmp_path, ending)
    returns = play_bare(policy, lambda observations: act(stack([flatten(o) for o in observations])))
    assert returns == pytest.approx(evaluated_returns(policy), rel=1e-6)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["gaussian", "tanh", "shaped", "discrete"])
def test_a_file_does_what_the_policy_does(
    recorder: MakeEnv, kind: str, ending: str, tmp_path: Path
) -> None:
    actions = {
        "shaped": spaces.Box(-0.3, 0.1, (2, 2), np.float64),
        "discrete": spaces.Discrete(3, start=10),
    }
    env = recorder(actions=actions.get(kind, spaces.Box(-0.3, 0.1, (2,))), observation_norm=True)
    env.rollout(20)
    if kind == "discrete":
        actor = make_actor(nn.Linear(2, 3), OneHotCategorical)
    elif kind == "tanh":
        bounds = {"low": -0.3, "high": 0.1, "tanh_loc": True}
        actor, _ = gaussian(env, TanhNormal, distribution_kwargs=bounds)
    else:
        actor, _ = gaussian(env)
    policy = DeployedPolicy(actor, env)
    act = export(policy, tmp_path, ending)
    for count in (1, 2, 7, 1000):  # any size of a batch, also one that makes activations change
        rows = random_rows(count, 2)
        result, expected = act(rows), policy.predict(rows)
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert [file.name for file in tmp_path.iterdir()] == [f"policy{ending}"]


def test_a_file_needs_nothing_of_this_package(recorder: MakeEnv, tmp_path: Path) -> None:
    env = recorder()
    policy = DeployedPolicy(gaussian(env)[0], env)
    policy.export(str(tmp_path / "new" / "folder" / "policy.pt2"))
    code = """
import sys, torch
program = torch.export.load("new/folder/policy.pt2")
print(program.module()(torch.ones(1, 2)).tolist())
print({name.partition(".")[0] for name in sys.modules} & {"minerva_torchrl", "tensordict"})
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout.splitlines()
    np.testing.assert_allclose(
        json.loads(output[0]), policy.predict(np.ones((1, 2))), rtol=1e-5, atol=1e-6
    )
    assert output[1] == "set()"


@needs_onnx
def test_export_is_quiet(
    recorder: MakeEnv,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    env = recorder()
    DeployedPolicy(gaussian(env)[0], env).export(tmp_path / "policy.onnx")
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_other_endings(recorder: MakeEnv, tmp_path: Path) -> None:
    env = recorder()
    policy = DeployedPolicy(gaussian(env)[0], env)
    with pytest.raises(ValueError, match=r"path must end in .pt2 or .onnx, got '.*policy.pt'"):
        policy.export(tmp_path / "policy.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_missing_packages(
    recorder: MakeEnv,
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    env = recorder()
    with pytest.raises(ImportError, match=r'pip install "minerva_torchrl\[export\]"'):
        DeployedPolicy(gaussian(env)[0], env).export(tmp_path / "policy.onnx")
