r"""Equations and the lines of code that implement them.

A comment ``# eq: mpo-weights`` (or several names, with commas) stands above the code that
implements an equation. It covers the lines from there to the next marker, to an empty line, or to
the end of its block. The equations themselves, their prose and the notation are in
``docs/equations.yaml``.

Nothing here needs Sphinx, so that the tests can use it.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[2]
EQUATIONS = REPOSITORY / "docs" / "equations.yaml"
LAYER_1 = ("minerva_torchrl.objectives.functional", "minerva_torchrl.objectives.value.functional")

_LOOKS_LIKE_A_MARKER = re.compile(r"#+\s*eqs?\b\s*[:.]?", re.IGNORECASE)
_MARKER = re.compile(r"# eq: ([a-z][a-z0-9-]*(?:, [a-z][a-z0-9-]*)*)")


class MarkerError(ValueError):
    """A marker that can't be read."""


# The equations -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equation:
    """An equation as ``equations.yaml`` has it."""

    name: str
    title: str
    latex: str
    text: str = ""

    @property
    def anchor(self) -> str:
        """Its place on a page."""
        return f"eq-{self.name}"


@dataclass(frozen=True)
class Book:
    """All equations, and what their symbols mean."""

    equations: dict[str, Equation]
    notation: dict[str, str]
    """By symbol, in LaTeX, its meaning."""
    pages: dict[str, list[str]]
    """By page, the source files that it shows, relative to the repository."""


def load(path: Path = EQUATIONS) -> Book:
    """Read ``equations.yaml``.

    Args:
        path: the file.
    """
    data = yaml.safe_load(path.read_text())
    equations = {
        name: Equation(name, entry["title"], entry["latex"].strip(), entry.get("text", "").strip())
        for name, entry in data["equations"].items()
    }
    return Book(equations, data["notation"], data["pages"])


# Symbols -----------------------------------------------------------------------------------------

# Commands that arrange what is around them.
_STRUCTURE = frozenset(
    re.findall(
        r"\w+",
        """
    frac tfrac dfrac sqrt left right big Big bigg Bigg bigl bigr Bigl Bigr quad qquad text begin
    end aligned cases cdot cdots ldots dots le ge leq geq ne neq to mapsto infty sum prod log
    exp min max in notin mid propto leftarrow rightarrow approx sim equiv otherwise lVert rVert
    lvert rvert lfloor rfloor lceil rceil nolimits limits top partial displaystyle textstyle
    substack mathclose mathopen mathbin cup cap wedge vee circ times odot pm langle rangle colon
    ast forall
""",
    )
)
_ACCENTS = ("tilde", "hat", "bar", "overline", "underline", "widetilde", "widehat")
_TOKEN = re.compile(
    r"\\(?P<style>mathrm|mathcal|mathbb|operatorname|mathit|mathbf)\s*(?:\{(?P<named>[^{}]*)\}|(?P<single>[A-Za-z]))"
    r"|\\text\{[^{}]*\}"
    r"|\\(?:begin|end)\{[^{}]*\}"
    rf"|\\(?P<accent>{'|'.join(_ACCENTS)})\s*(?:\{{(?P<accented>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}|(?P<accented_command>\\[A-Za-z]+|[A-Za-z]))"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|\\."
    r"|(?P<letter>[A-Za-z])"
    r"|(?P<prime>')"
)


def symbols(latex: str) -> list[str]:
    r"""Symbols of a formula, as the notation table writes them, in order.

    Subscripts are symbols of their own, ``w_i`` has two; a prime is one as well. What is accented
    or set in a style is one symbol: ``\tilde D``, ``\mathrm{KL}``.

    Args:
        latex: the formula.
    """
    found: dict[str, None] = {}
    for match in _TOKEN.finditer(latex):
        groups = match.groupdict()
        if groups["style"]:
            inside = groups["named"] if groups["named"] is not None else groups["single"]
            found[f"\\{groups['style']}{{{inside.strip()}}}"] = None
        elif groups["accent"]:
            inside = groups["accented"] or groups["accented_command"]
            found[f"\\{groups['accent']}{{{inside.strip()}}}"] = None
        elif groups["command"]:
            if groups["command"] not in _STRUCTURE:
                found[f"\\{groups['command']}"] = None
        elif groups["letter"]:
            found[groups["letter"]] = None
        elif groups["prime"]:
            found["'"] = None
    return list(found)


# The code ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Lines of a function: those that a marker covers, or those between markers."""

    first: int
    """Number of the first line."""
    lines: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Equations, none for lines without a marker."""


@dataclass(frozen=True)
class Passage:
    """A function with markers, from its ``def`` to its end, without its docstring."""

    qualname: str
    summary: str
    segments: tuple[Segment, ...]

    @property
    def names(self) -> list[str]:
        """Equations in the order of the code."""
        return list(dict.fromkeys(name for segment in self.segments for name in segment.names))


@dataclass
class _Function:
    node: ast.FunctionDef
    qualname: str
    markers: dict[int, tuple[str, ...]] = field(default_factory=dict)


def read_markers(source: str, path: str = "<string>") -> dict[int, tuple[str, ...]]:
    """Names of equations by the line of their marker.

    Args:
        source: Python.
        path: where it is from, for messages.

    Raises:
        MarkerError: if a comment looks like a marker, but isn't one.
    """
    markers: dict[int, tuple[str, ...]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not _LOOKS_LIKE_A_MARKER.match(token.string):
            continue
        line = token.start[0]
        match = _MARKER.fullmatch(token.string)
        if match is None:
            raise MarkerError(
                f"{path}:{line}: a marker is '# eq: name' or '# eq: name, other', "
                f"got {token.string!r}."
            )
        if token.line[: token.start[1]].strip():
            raise MarkerError(f"{path}:{line}: a marker stands on a line of its own.")
        markers[line] = tuple(match.group(1).split(", "))
    return markers


def passages(source: str, path: str = "<string>") -> list[Passage]:
    """Functions with markers, in the order of the code.

    Args:
        source: Python.
        path: where it is from, for messages.

    Raises:
        MarkerError: if a marker is malformed, outside of functions, or covers nothing.
    """
    found = list(_functions(ast.parse(source)))
    for line, names in read_markers(source, path).items():
        around = [f for f in found if f.node.lineno < line <= (f.node.end_lineno or 0)]
        if not around:
            raise MarkerError(f"{path}:{line}: a marker belongs inside of a function.")
        # Functions inside of functions are shown with the outer one.
        around[0].markers[line] = names
    lines = source.splitlines()
    return [_passage(function, lines, path) for function in found if function.markers]


def _functions(tree: ast.Module) -> Iterator[_Function]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield _Function(node, node.name)
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    yield _Function(child, f"{node.name}.{child.name}")


def _passage(function: _Function, lines: list[str], path: str) -> Passage:
    node, indent = function.node, function.node.col_offset
    body = node.body
    docstring = ast.get_docstring(node)
    shown: list[tuple[int, tuple[str, ...], str]] = []  # line, equations, text
    body_start = body[0].lineno
    skipped = (
        range(body_start, (body[0].end_lineno or 0) + 1) if docstring is not None else range(0)
    )
    names: tuple[str, ...] = ()
    depth = 0
    for number in range(node.lineno, (node.end_lineno or 0) + 1):
        if number in skipped:
            continue
        text = lines[number - 1]
        own = len(text) - len(text.lstrip())
        if number in function.markers:
            names, depth = function.markers[number], own
            following = lines[number] if number < len(lines) else ""
            if not following.strip() or number + 1 in function.markers:
                raise MarkerError(f"{path}:{number}: nothing follows the marker.")
            continue
        closes = text.strip() in (")", "]", "}") or text.strip().startswith((") ", "):", "),"))
        if not text.strip() or (own < depth and not closes):
            names = ()
        shown.append((number, names, text[indent:]))
    segments: list[Segment] = []
    for number, covered, text in shown:
        last = segments[-1] if segments else None
        joined = last is not None and last.names == covered
        if last is not None and joined and number - 1 not in function.markers:
            segments[-1] = Segment(last.first, (*last.lines, text), covered)
        else:
            segments.append(Segment(number, (text,), covered))
    segments = [_trimmed(s) for s in segments if any(line.strip() for line in s.lines)]
    summary = (docstring or "").strip().split("\n\n")[0].replace("\n", " ")
    return Passage(function.qualname, summary, tuple(segments))


def _trimmed(segment: Segment) -> Segment:
    """Without empty lines at its ends."""
    first, lines = segment.first, list(segment.lines)
    while not lines[0].strip():
        first, lines = first + 1, lines[1:]
    while not lines[-1].strip():
        lines.pop()
    return Segment(first, tuple(lines), segment.names)


# The rules ---------------------------------------------------------------------------------------


def problems(book: Book, sources: Iterable[tuple[str, str]], public: Iterable[str]) -> list[str]:
    """What breaks the rules, in words; nothing if all is well.

    Args:
        book: the equations.
        sources: path and text of each source file that has markers.
        public: names of functions that must have a marker.
    """
    found: list[str] = []
    used: set[str] = set()
    marked: set[str] = set()
    by_path: dict[str, set[str]] = {}
    for path, text in sources:
        try:
            parts = passages(text, path)
        except MarkerError as error:
            found.append(str(error))
            continue
        for passage in parts:
            marked.add(passage.qualname)
            for name in passage.names:
                if name not in book.equations:
                    found.append(f"{path}: {passage.qualname} names an unknown equation {name!r}.")
            used.update(passage.names)
            by_path.setdefault(path, set()).update(passage.names)
    found += [
        f"the equation {name!r} has no marker." for name in book.equations if name not in used
    ]
    found += [
        f"the public function {name!r} has no marker." for name in public if name not in marked
    ]
    for equation in book.equations.values():
        unknown = [s for s in symbols(equation.latex) if s not in book.notation]
        if unknown:
            found.append(
                f"symbols of {equation.name!r} without an entry in the notation: {unknown}."
            )
    on_pages = {path for paths in book.pages.values() for path in paths}
    found += [f"{path} has markers, but is on no page." for path in by_path if path not in on_pages]
    used_symbols = {s for e in book.equations.values() for s in symbols(e.latex)}
    found += [f"no equation has the symbol {s!r}." for s in book.notation if s not in used_symbols]
    return found


def package_sources() -> list[tuple[str, str]]:
    """Path and text of every file of the package that has a marker."""
    files = sorted((REPOSITORY / "minerva_torchrl").rglob("*.py"))
    texts = ((path.relative_to(REPOSITORY).as_posix(), path.read_text()) for path in files)
    return [(path, text) for path, text in texts if "# eq" in text]


def public_functions() -> list[str]:
    """Names of the functions of layer 1."""
    names = []
    for place in LAYER_1:
        module = importlib.import_module(place)
        names += [n for n in module.__all__ if not isinstance(getattr(module, n), type)]
    return names
