"""Lines that are added to files which TorchRL has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """Text beside another, which must occur once."""

    path: str
    anchor: str
    text: str
    before: bool = False

    def apply(self, checkout: Path) -> None:
        """Write it. Of the installed package, which is not a whole checkout, some files lack."""
        file = checkout / self.path
        if not file.exists() and not self.path.startswith("torchrl/"):
            return
        content = file.read_text()
        if content.count(self.anchor) != 1:
            times = content.count(self.anchor)
            raise ValueError(f"{self.path}: {self.anchor!r} should occur once, not {times} times.")
        parts = (self.text, self.anchor) if self.before else (self.anchor, self.text)
        file.write_text(content.replace(self.anchor, "".join(parts)))


def exported(module: str, name: str, successor: str, next_name: str) -> tuple[Edit, ...]:
    """A class in ``torchrl.objectives``: its import before another's, and its name."""
    file = "torchrl/objectives/__init__.py"
    return (
        Edit(
            file,
            f"from torchrl.objectives.{successor} import ",
            f"from torchrl.objectives.{module} import {name}\n",
            before=True,
        ),
        Edit(file, f'    "{next_name}",\n', f'    "{name}",\n', before=True),
    )


def smoke_test(name: str, arguments: str) -> tuple[Edit, ...]:
    """A script in TorchRL's lists of scripts: of the smoke tests, of releases, and for readers."""
    command = "".join(f" \\\n  {argument}" for argument in arguments.split())
    entry = f'    "{name}": """python sota-implementations/{name}/{name}.py{command}\n""",\n'
    title = {"mpo": "MPO", "vmpo": "V-MPO"}[name]
    return (
        Edit(
            ".github/unittest/linux_sota/scripts/test_sota.py",
            '    "tqc": """python',
            entry,
            before=True,
        ),
        Edit(
            "sota-check/submitit-release-check.sh",
            "    run_sac.sh\n",
            f"    run_{name}.sh\n",
            before=True,
        ),
        Edit(
            "sota-implementations/README.md",
            "- [PPO](../sota-implementations/ppo/)\n",
            f"- [{title}]({name}/{name}.py)\n",
            before=True,
        ),
    )
