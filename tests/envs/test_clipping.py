from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Unbounded
from torchrl.envs import DMControlEnv, GymEnv, TransformedEnv

from minerva_torchrl.envs import ClipAction

ROOT = Path(__file__).parents[2]


def test_each_dimension_has_its_own_bounds() -> None:
    spec = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 3.0]))
    clipped = ClipAction(spec).inv(TensorDict({"action": torch.tensor([-9.0, 9.0])}))
    assert clipped["action"].tolist() == [-1.0, 3.0]


def test_needs_bounds() -> None:
    with pytest.raises(ValueError, match="needs actions with bounds"):
        ClipAction(Unbounded((2,)))


@pytest.mark.parametrize("make", [lambda: DMControlEnv("cheetah", "run"), None])
def test_the_environment_sees_it_clipped(make: object) -> None:
    """And the data has it raw."""
    base = make() if callable(make) else GymEnv("Pendulum-v1")
    env = TransformedEnv(base, ClipAction(base.action_spec))
    rewards = []
    for size in (1.0, 50.0):
        env.set_seed(0)
        action = size * env.action_spec.space.high.clone()
        data = env.step(env.reset().set("action", action))
        assert torch.equal(data["action"], action)
        rewards.append(data["next", "reward"])
    assert torch.equal(*rewards)


SNIPPETS = (
    "examples/mpo_minimal.py",
    "docs/tutorials/mpo_pipeline.py",
    "docs/tutorials/retrace_loss.py",
)


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_clip_any_task(name: str) -> None:
    """The line that clips works with six actions, too."""
    [line] = [
        node
        for node in ast.parse((ROOT / name).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "clip"
    ]
    spec = Bounded(-torch.ones(6), torch.arange(1.0, 7.0))
    names = {"ClipAction": ClipAction, "spec": spec, "action_spec": spec}
    exec(compile(ast.Module([line], []), name, "exec"), names)
    assert names["clip"].high.shape == (6,)
