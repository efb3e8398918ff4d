"""Write the losses into a checkout of TorchRL, one branch and commit per pull request.

    make upstream-patch TORCHRL=path/to/checkout

Branches are stacked, each on the one before: ``minerva/1-retrace-functional`` begins at the
checkout's present commit. Sources get TorchRL's layout, licence header and line length; markers of
equations are left out. ``docs/upstream.md`` says what is in each.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from port import HEADER, ROOT, ported, ported_test, source_of, target_of
from series import SERIES, PullRequest, modules_of

FILES = Path(__file__).parent / "files"
# Imports in the order of usort, TorchRL's tool: by name, whatever the case, in one block.
IMPORTS = [
    "--config=lint.isort.order-by-type=false",
    "--config=lint.isort.combine-as-imports=true",
    '--config=lint.isort.known-third-party=["torchrl", "utils", "_*"]',
]


def sources(pull: PullRequest) -> dict[Path, str]:
    """New files of a pull request, relative to the checkout."""
    written = {target_of(name): ported(source_of(name).read_text()) for name in modules_of(pull)}
    private = Path("torchrl/objectives/_mpo/__init__.py")
    if any(path.is_relative_to(private.parent) for path in written):
        written[private] = f'{HEADER}"""Parts of the MPO losses."""\n'
    for ours, theirs in pull.helpers.items():
        text = (ROOT / "tests" / "objectives" / ours).read_text()
        written[Path("test/objectives") / theirs] = ported(text)
    for ours, theirs in pull.tests.items():
        text = (ROOT / "tests" / "objectives" / ours).read_text()
        written[Path("test/objectives") / theirs] = ported_test(text)
    for name in pull.files:
        text = (FILES / name).read_text()
        written[Path(name)] = f"{HEADER}{text}" if name.endswith(".py") else text
    left = [str(path) for path, text in written.items() if "minerva" in text]
    if left:
        raise ValueError(f"{pull.branch}: names of ours are left in {left}.")
    return written


def write(pull: PullRequest, checkout: Path) -> list[Path]:
    """Write a pull request; return its new files."""
    written = sources(pull)
    for path, text in written.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(text)
    for name in pull.files:
        shutil.copymode(FILES / name, checkout / name)
    for edit in pull.edits:
        edit.apply(checkout)
    python = [str(checkout / path) for path in written if path.suffix == ".py"]
    for command in (["check", "--select", "I", "--fix", *IMPORTS], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "-q", "--isolated", "--line-length", "88"]
        subprocess.run([*ruff, *python], check=True)
    return list(written)


def git(checkout: Path, *arguments: str) -> str:
    """Output of a command of git in the checkout."""
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(arguments: list[str] | None = None) -> None:
    """Write all branches."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a clean checkout of TorchRL")
    checkout = parser.parse_args(arguments).checkout
    if not (checkout / "torchrl" / "objectives").is_dir():
        parser.error(f"{checkout} is not a checkout of TorchRL: it has no torchrl/objectives.")
    if git(checkout, "status", "--porcelain").strip():
        parser.error(f"{checkout} has changes; commit or stash them first.")
    for pull in SERIES:
        git(checkout, "checkout", "-q", "-b", f"minerva/{pull.branch}")
        written = write(pull, checkout)
        git(checkout, "add", "-A")
        git(checkout, "commit", "-q", "-m", pull.title)
        print(f"minerva/{pull.branch}: {len(written)} new files")


if __name__ == "__main__":
    main()
