"""Our sources with TorchRL's names, layout and licence header."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = "minerva_torchrl.objectives"
THEIRS = "torchrl.objectives"
HEADER = """\
# Copyright (c) Meta Platforms, Inc. and affiliates.
#
# This source code is licensed under the MIT license found in the
# LICENSE file in the root directory of this source tree.
"""
# Where modules go below TorchRL's `objectives`. All others are private at first, in `_mpo`.
PUBLIC = {
    "value.functional": "value.off_policy_functional",
    "value.retrace": "value.retrace",
    "functional": "mpo_functional",
    "mpo": "mpo",
    "vmpo": "vmpo",
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
# What is said of parts that stay here, and how a type is imported for type checkers alone.
SENTENCES = {
    "from typing_extensions import Self": "from typing import Self",
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


def place(module: str) -> str:
    """Name in TorchRL, below ``torchrl.objectives``, of one of our modules."""
    package, _, name = module.partition(".")
    if module in PUBLIC:
        return PUBLIC[module]
    return f"{PUBLIC[package]}.{name}" if package in PUBLIC else f"_mpo.{module}"


def source_of(module: str) -> Path:
    """The file of one of our modules."""
    path = ROOT / OURS.replace(".", "/") / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def target_of(module: str) -> Path:
    """Where it goes, below the checkout."""
    path = Path(THEIRS.replace(".", "/")) / place(module).replace(".", "/")
    package = source_of(module).name == "__init__.py"
    return path / "__init__.py" if package else path.with_suffix(".py")


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Our modules that one of them imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
            package = (node.module or "").removeprefix(OURS).removeprefix(".")
            candidates = [f"{package}.{alias.name}".strip(".") for alias in node.names]
            found |= {name for name in candidates if source_of(name).exists()}
            found |= {package} - {"", "value"}
    return frozenset(found)


def needed_by(roots: tuple[str, ...]) -> set[str]:
    """Modules, and whatever they import."""
    found: set[str] = set()
    waiting = set(roots)
    while waiting:
        module = waiting.pop()
        found.add(module)
        parent = module.rpartition(".")[0]
        needed = imports_of(module) | ({parent} - {"", "value"})
        waiting |= needed - found
    return found


@functools.cache
def all_modules() -> list[str]:
    """Names of all our modules, below ``objectives``, the longest first."""
    folder = ROOT / OURS.replace(".", "/")
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    names = {".".join(path.parts).removesuffix("__init__").removesuffix(".") for path in files}
    return sorted(names - {"", "value"}, key=len, reverse=True)


def ported(text: str) -> str:
    """Source with TorchRL's names, without markers, with its licence header."""
    text = re.sub(r"^ *# eq: .*\n", "", text, flags=re.MULTILINE)
    text = _exports_apart(text)
    for package, name, alias in (("", "functional", "F"), (".value", "functional", "V")):
        ours = f"from {OURS}{package} import {name} as {alias}"
        there = place(f"{package}.{name}".strip("."))
        where, _, there = f"{THEIRS}.{there}".rpartition(".")
        text = text.replace(ours, f"from {where} import {there} as {alias}")
    for module in all_modules():
        pattern = rf"{re.escape(OURS)}\.{re.escape(module)}(?!\w)"
        text = re.sub(pattern, f"{THEIRS}.{place(module)}", text)
    for ours, theirs in SENTENCES.items():
        text = text.replace(ours, theirs)
    for ours, theirs in TEST_MODULES.items():
        package, _, name = ours.rpartition(".")
        text = text.replace(f"from {package} import {name}\n", f"import {theirs} as {name}\n")
        text = re.sub(rf"{re.escape(ours)}\b", theirs, text)
    for name, module in EXPORTS.items():
        text = re.sub(rf"~?minerva_torchrl\.(?:objectives\.)?{name}\b", f"~{module}.{name}", text)
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


def ported_test(text: str) -> str:
    """A test, which can also be run as a script, as TorchRL's are."""
    text = ported(text)
    if "\nimport pytest\n" not in text:
        text = re.sub(r"^(import torch\n)", r"import pytest\n\1", text, count=1, flags=re.MULTILINE)
    return f'{text}\n\nif __name__ == "__main__":\n    pytest.main([__file__])\n'
