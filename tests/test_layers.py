"""Who imports whom: the layers that CONTRIBUTING.md describes are those of the code."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import minerva_torchrl

ROOT = Path(minerva_torchrl.__file__).parent
GUIDE = ROOT.parent / "CONTRIBUTING.md"
NAME = ROOT.name


def imports(file: Path, *, lazy: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Modules that a file imports when it is imported itself, with the names taken from them."""
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if lazy else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module), [alias.name for alias in node.names]


def package_of(file: Path) -> str:
    """The part of the package that a file belongs to: ``objectives``, ``text``, ..."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def own_files() -> list[Path]:
    return sorted(file for file in ROOT.rglob("*.py") if file.parent != ROOT or file.stem[0] != "_")


def graph() -> dict[str, set[str]]:
    """Each part with the other parts that it imports."""
    found: dict[str, set[str]] = {package_of(file): set() for file in own_files()}
    for file in own_files():
        for module, names in imports(file):
            if module == NAME:
                module = f"{NAME}.{names[0]}"
            if module.startswith(f"{NAME}."):
                found[package_of(file)].add(module.split(".")[1])
    return {part: others - {part} for part, others in found.items()}


def test_guide_has_the_graph_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", GUIDE.read_text(), re.MULTILINE)
    described = {part: set(re.findall(r"`(\w+)`", imported)) for part, imported in rows}
    assert described == graph()


def test_no_circle() -> None:
    assert set(TopologicalSorter(graph()).static_order()) == set(graph())


def test_losses_could_move_to_torchrl() -> None:
    """They import nothing but torch, tensordict and TorchRL, not even when they are used."""
    allowed = {"torch", "tensordict", "torchrl", "typing_extensions", *sys.stdlib_module_names}
    for file in sorted((ROOT / "objectives").rglob("*.py")):
        lazy = file != ROOT / "objectives" / "__init__.py"  # which knows where PopArt has moved to
        for module, _ in imports(file, lazy=lazy):
            own = module.startswith(f"{NAME}.objectives")
            if file.name == "__init__.py" and module == f"{NAME}.modules.popart":
                continue
            assert own or module.split(".")[0] in allowed, (file, module)


def test_nothing_private_is_imported_from_another_part() -> None:
    for file in own_files():
        for module, names in imports(file, lazy=True):
            if not module.startswith(f"{NAME}.") or module.split(".")[1] == package_of(file):
                continue
            private = [name for name in (*module.split("."), *names) if name.startswith("_")]
            assert not private, (file, module, private)
