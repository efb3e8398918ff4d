"""What the README tells users to write runs, and what it links to exists."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from minerva_torchrl.report import load_references, load_runs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_example() -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len([line for line in example.splitlines() if line.strip()]) <= 26
    results: dict[str, object] = {}
    exec(example.replace('"walker-walk"', '"cartpole-balance"'), results)
    assert results["losses"]["loss_actor"].isfinite()


def test_links() -> None:
    targets = re.findall(r"\]\(((?!https?:)[^)#]+)", README)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_results() -> None:
    """The table's numbers are means over the seeds that are recorded, after 100,000 steps."""
    references = load_references(ROOT / "results" / "references.yaml")
    (suite,) = references.suites
    runs = [run for run in load_runs(ROOT / "results" / suite.folder).runs if run.algo == "mpo"]
    returns = {
        task: np.mean([run.returns[-1] for run in runs if run.task == task]) for task in suite.tasks
    }
    assert f"| **{np.mean(list(returns.values())):.0f}** |" in README
    rows = dict(re.findall(r"^\| ([a-z_]+-[a-z_]+) \| (\d+) \|", README, re.MULTILINE))
    assert len(rows) >= 6
    assert {task: int(value) for task, value in rows.items()} == {
        task: round(returns[task]) for task in rows
    }


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
