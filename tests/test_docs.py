"""What the documentation tells users to write does what it says."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from minerva_torchrl import MPOLoss
from minerva_torchrl.__main__ import main
from minerva_torchrl.runs import load_policy
from tests.objectives.base import make_actor, make_critic, make_transitions, with_updater

DOCS = Path(__file__).parents[1] / "docs"


def snippets(page: str, section: str) -> list[str]:
    """Code in a section of a page, in order."""
    text = (DOCS / page).read_text()
    [body] = re.findall(rf"^## {section}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```\w+\n(.*?)^```", body, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_parts_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, command, script = snippets(
        "training.md", "Your own networks, environments and callbacks"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    Path("mine.py").write_text(module)
    try:
        _, _, program, *arguments = shlex.split(command.replace("\\\n", ""))
        assert program == "minerva_torchrl"
        # One epoch instead of ten, to be quick.
        assert main([*arguments, "optim.num_epochs=1"]) == 0
        assert load_policy("runs/point", trust=True).checkpoint.frames == 4096
        results: dict[str, Any] = {}
        exec(script, results)
        assert results["policy"].config.env.name == "point"
        assert results["policy"].predict([0.5, 0.0]).shape == (1,)
    finally:
        sys.modules.pop("mine", None)
        GlobalHydra.instance().clear()


def test_critic_of_ones_own() -> None:
    [source] = snippets("extending.md", "A critic")
    parts: dict[str, Any] = {}
    exec(source, parts)
    critic = parts["LogCoshCritic"]()
    outputs = torch.tensor([[[3.0], [0.5], [1e4]]])  # [E, B, 1]
    loss = critic.loss(outputs, torch.tensor([[1.0], [0.5], [0.0]]))
    expected = torch.tensor([[math.log(math.cosh(2.0)), 0.0, 1e4 - math.log(2)]])
    torch.testing.assert_close(loss, expected)
    module = with_updater(MPOLoss(make_actor(), make_critic(), critic=critic))
    assert module(make_transitions(8))["loss_qvalue"].isfinite()
