"""What the README tells users to write runs, and what it links to exists."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
