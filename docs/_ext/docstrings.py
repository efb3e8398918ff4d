"""Reading docstrings in Google's style: sections, and the arguments that they describe."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_SECTIONS = ("Args", "Keyword Args", "Returns", "Raises", "Yields", "Examples", "Example", "Note")
_HEADER = re.compile(rf"^({'|'.join(_SECTIONS)}):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^(\*{0,2}\w+)(?:\s*\(((?:[^()]|\([^()]*\))*)\))?:\s*(.*)$")


@dataclass(frozen=True)
class Argument:
    """An argument as a docstring describes it."""

    name: str
    type: str
    text: str


def sections(docstring: str) -> dict[str, str]:
    """Text of each section by its title, that before the first one as the empty title.

    Args:
        docstring: cleaned, as ``inspect.getdoc`` returns it.
    """
    found = {"": ""}
    title = ""
    for line in docstring.splitlines():
        header = _HEADER.match(line)
        if header:
            title = header.group(1)
            found.setdefault(title, "")
        elif title and line.strip() and not line.startswith(" "):
            title = ""  # a paragraph behind a section
            found[title] += line + "\n"
        else:
            found[title] += line + "\n"
    return found


def arguments(docstring: str) -> dict[str, Argument]:
    """Arguments of a docstring by name.

    Args:
        docstring: cleaned.
    """
    found: dict[str, Argument] = {}
    parts = sections(docstring)
    for title in ("Args", "Keyword Args"):
        text = inspect.cleandoc(parts.get(title, ""))
        name = kind = ""
        lines: list[str] = []
        for line in [*text.splitlines(), "end:"]:
            entry = _ENTRY.match(line) if not line.startswith(" ") else None
            if entry is None:
                lines.append(line.strip())
                continue
            if name:
                found[name] = Argument(name, kind, " ".join(lines).strip())
            name, kind, rest = entry.group(1).lstrip("*"), entry.group(2) or "", entry.group(3)
            lines = [rest]
    return found


def fields(obj: type) -> dict[str, str]:
    """Docstrings below the fields of a class, by name.

    Args:
        obj: a dataclass or a named tuple.
    """
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(obj))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node, following in pairwise(definition.body):
        match node, following:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found[name] = " ".join(text.split())
    return found


def parameters(obj: Any) -> dict[str, inspect.Parameter]:
    """Parameters that a caller gives, by name.

    Args:
        obj: a function or a class.
    """
    # A metaclass may have a signature of its own, which is not that of the class.
    signature = inspect.signature(obj.__init__ if isinstance(obj, type) else obj)
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls") and not name.startswith("_")
    }


def default(parameter: inspect.Parameter) -> str:
    """The default as it is written, empty for none.

    Args:
        parameter: of a signature.
    """
    if parameter.default is inspect.Parameter.empty:
        return ""
    value = parameter.default
    if isinstance(value, type):
        return value.__name__
    return repr(value)
