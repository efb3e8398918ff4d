"""Write the losses into a checkout of TorchRL, one branch and commit per pull request.

    make upstream-patch TORCHRL=path/to/checkout

Branches are stacked, each on the one before: ``minerva/1-retrace-functional`` begins at the
checkout's present commit. Sources get TorchRL's layout, licence header and line length; markers of
equations are left out. ``docs/upstream.md`` says what is in each.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADER = """\
# Copyright (c) Meta Platforms, Inc. and affiliates.
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
"""
OURS = "minerva_torchrl/objectives/"
THEIRS = "torchrl/objectives/"

# Our modules, by their name below `objectives`, and where they go below TorchRL's `objectives`.
PLACES = {
    "value.functional": "value.off_policy_functional",
    "value.retrace": "value.retrace",
    "functional": "mpo_functional",
    "functional.e_step": "mpo_functional.e_step",
    "functional.m_step": "mpo_functional.m_step",
    "functional.value_distributions": "mpo_functional.value_distributions",
    "mpo": "mpo",
    "vmpo": "vmpo",
    **{
        name: f"_mpo.{name}"
        for name in (
            *("_base", "_data", "_off_policy", "_on_policy", "checks", "duals", "e_steps"),
            *("goals", "reductions", "specs", "swapping"),
            *("policies", "policies.categorical", "policies.composite", "policies.family"),
            *("policies.gaussian", "policies.of_actor"),
            *("critics", "critics.distributions", "critics.ensembles", "critics.states"),
            *("critics.supports", "critics.values"),
        )
    },
}
# Names that our packages export, with the module of TorchRL that has them.
EXPORTS = {
    "MPOLoss": "torchrl.objectives.mpo",
    "VMPOLoss": "torchrl.objectives.vmpo",
    "Retrace": "torchrl.objectives.value.retrace",
    "DualVariable": "torchrl.objectives._mpo.duals",
    "Temperature": "torchrl.objectives._mpo.duals",
    "Constraint": "torchrl.objectives._mpo.duals",
    "Objective": "torchrl.objectives._mpo.goals",
    "CostLimit": "torchrl.objectives._mpo.goals",
}
# What is said of parts that stay here.
SENTENCES = {
    "minerva_torchrl.modules.popart.PopArtVMPOLoss": "PopArtVMPOLoss",
    " of minerva_torchrl.modules": "",
}
# Helpers of our tests, and the names that they get beside TorchRL's.
TEST_MODULES = {
    "tests.objectives.value.retrace_problem": "_retrace_common",
    "tests.objectives.base": "_mpo_common",
    "tests.objectives.mpo_problem": "_mpo_problem",
    "tests.objectives.vmpo_problem": "_vmpo_problem",
    "tests.objectives.discrete_problem": "_mpo_discrete_problem",
}


@dataclass(frozen=True)
class PullRequest:
    """One of the series."""

    branch: str
    title: str
    modules: tuple[str, ...]
    """Our modules, as in ``PLACES``."""
    tests: dict[str, str]
    """Our test files, below ``tests/objectives``, and their names in TorchRL's."""
    exports: tuple[str, ...] = ()
    """Lines for ``torchrl/objectives/__init__.py``."""
    reference: tuple[str, str] | None = None
    """A page of TorchRL's reference, and the lines that it gets."""
    helpers: dict[str, str] = field(default_factory=dict)
    """Modules that the tests import, like ``tests``."""


SERIES = [
    PullRequest(
        "1-retrace-functional",
        "[Feature] Retrace and other off-policy corrected returns as functions",
        ("value.functional",),
        {"value/test_value_functional.py": "test_off_policy_functional.py"},
    ),
    PullRequest(
        "2-retrace",
        "[Feature] Retrace value estimator",
        ("value.retrace", "checks", "specs"),
        {
            "value/test_retrace.py": "test_retrace.py",
            "value/test_retrace_estimator.py": "test_retrace_estimator.py",
        },
        exports=("from .value.retrace import Retrace",),
        reference=("objectives_value.rst", "    Retrace\n"),
        helpers={"value/retrace_problem.py": "_retrace_common.py"},
    ),
    PullRequest(
        "3-mpo-functional",
        "[Feature] Dual variables and the functions of MPO",
        (
            *("functional", "functional.e_step", "functional.m_step"),
            *("functional.value_distributions", "reductions", "duals"),
        ),
        {
            "test_functional.py": "test_mpo_e_step.py",
            "test_functional_m_step.py": "test_mpo_m_step.py",
            "test_temperature_constraint.py": "test_mpo_duals.py",
        },
    ),
    PullRequest(
        "4-mpo",
        "[Feature] MPOLoss",
        (
            *("mpo", "_base", "_data", "_off_policy", "e_steps", "goals", "swapping"),
            *("policies", "policies.categorical", "policies.composite", "policies.family"),
            *("policies.gaussian", "policies.of_actor", "critics", "critics.distributions"),
            *("critics.ensembles", "critics.states", "critics.supports", "critics.values"),
        ),
        {"test_mpo.py": "test_mpo.py", "test_mpo_maths.py": "test_mpo_maths.py"},
        exports=("from .mpo import MPOLoss",),
        reference=("objectives_actorcritic.rst", "    MPOLoss\n"),
        helpers={"base.py": "_mpo_common.py", "mpo_problem.py": "_mpo_problem.py"},
    ),
    PullRequest(
        "6-vmpo",
        "[Feature] VMPOLoss",
        ("vmpo", "_on_policy"),
        {"test_vmpo.py": "test_vmpo.py", "test_vmpo_maths.py": "test_vmpo_maths.py"},
        exports=("from .vmpo import VMPOLoss",),
        reference=("objectives_policy.rst", "    VMPOLoss\n"),
        helpers={"vmpo_problem.py": "_vmpo_problem.py"},
    ),
]


def source_of(module: str) -> Path:
    """The file of one of our modules."""
    path = ROOT / OURS / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def target_of(module: str) -> Path:
    """Where it goes, below the checkout."""
    path = Path(THEIRS) / PLACES[module].replace(".", "/")
    return (
        path / "__init__.py" if source_of(module).name == "__init__.py" else path.with_suffix(".py")
    )


def ported(text: str) -> str:
    """Source with TorchRL's names, without markers, with its licence header."""
    text = re.sub(r"^ *# eq: .*\n", "", text, flags=re.MULTILINE)
    text = _exports_apart(text)
    text = re.sub(
        r"from minerva_torchrl\.objectives import functional as F",
        "from torchrl.objectives import mpo_functional as F",
        text,
    )
    text = re.sub(
        r"from minerva_torchrl\.objectives\.value import functional as V",
        "from torchrl.objectives.value import off_policy_functional as V",
        text,
    )
    for ours in sorted(PLACES, key=len, reverse=True):
        theirs = f"torchrl.objectives.{PLACES[ours]}"
        text = re.sub(rf"minerva_torchrl\.objectives\.{re.escape(ours)}(?!\w)", theirs, text)
    for ours, theirs in SENTENCES.items():
        text = text.replace(ours, theirs)
    for ours, theirs in TEST_MODULES.items():
        text = re.sub(rf"{re.escape(ours)}\b", theirs, text)
    for name, place in EXPORTS.items():
        text = re.sub(rf"~?minerva_torchrl\.(?:objectives\.)?{name}\b", f"~{place}.{name}", text)
    return f"{HEADER}{text}"


def _exports_apart(text: str) -> str:
    """``from minerva_torchrl[.objectives] import A, B`` as an import from each one's module."""

    def apart(match: re.Match[str]) -> str:
        indent, names = match.group(1), re.findall(r"\w+", match.group(2))
        if not set(names) <= EXPORTS.keys():
            return match.group(0)
        return "\n".join(f"{indent}from {EXPORTS[name]} import {name}" for name in names)

    pattern = r"^((?: *>>> )?)from minerva_torchrl(?:\.objectives)? import (\([^)]*\)|[\w, ]+)$"
    return re.sub(pattern, apart, text, flags=re.MULTILINE)


def write(pull: PullRequest, checkout: Path) -> list[Path]:
    """The files of a pull request, relative to the checkout."""
    written = {target_of(module): ported(source_of(module).read_text()) for module in pull.modules}
    private = Path(THEIRS) / "_mpo" / "__init__.py"
    if any(path.is_relative_to(private.parent) for path in written):
        written.setdefault(private, f'{HEADER}"""Parts of the MPO losses."""\n')
    for ours, theirs in {**pull.helpers, **pull.tests}.items():
        text = (ROOT / "tests" / "objectives" / ours).read_text()
        written[Path("test/objectives") / theirs] = ported(text)
    for path, text in written.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(text)
    if pull.exports:
        front = checkout / THEIRS / "__init__.py"
        front.write_text(
            front.read_text() + "".join(f"{line}  # noqa: E402\n" for line in pull.exports)
        )
    if pull.reference is not None:
        page = checkout / "docs" / "source" / "reference" / pull.reference[0]
        if page.exists():
            page.write_text(page.read_text().rstrip("\n") + "\n" + pull.reference[1])
    left = [path for path, text in written.items() if "minerva" in text]
    if left:
        raise ValueError(f"{pull.branch}: names of ours are left in {list(map(str, left))}.")
    sources = [str(checkout / path) for path in written]
    command = [sys.executable, "-m", "ruff", "format", "-q", "--isolated", "--line-length", "88"]
    subprocess.run([*command, *sources], check=True)
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
    if not (checkout / THEIRS).is_dir():
        parser.error(f"{checkout} is not a checkout of TorchRL: it has no {THEIRS}.")
    if git(checkout, "status", "--porcelain").strip():
        parser.error(f"{checkout} has changes; commit or stash them first.")
    for pull in SERIES:
        git(checkout, "checkout", "-q", "-b", f"minerva/{pull.branch}")
        written = write(pull, checkout)
        git(checkout, "add", "-A")
        git(checkout, "commit", "-q", "-m", pull.title)
        print(f"minerva/{pull.branch}: {len(written)} files")


if __name__ == "__main__":
    main()
