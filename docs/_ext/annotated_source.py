"""Pages with equations on the left and the code that implements them on the right.

``{annotated} e-step``
    the source files of a page of ``equations.yaml``, with its notation.
``{equation} mpo-weights, mpo-temperature-loss``
    equations in running text, each with a link to its code.
``{equation-index}``
    all equations, with links to every place in the code.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import equations as E
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

Places = dict[str, list[tuple[str, str, int]]]


@lru_cache(maxsize=1)
def read_all() -> tuple[E.Book, dict[str, list[E.Passage]], Places]:
    """The equations, the passages of every file, and the places of every equation.

    A place is a page, a function, and the equation's number on that page.
    """
    book = E.load()
    passages = {
        path: E.passages((E.REPOSITORY / path).read_text(), path)
        for paths in book.pages.values()
        for path in paths
    }
    return book, passages, _places(book, passages)


def _places(book: E.Book, passages: dict[str, list[E.Passage]]) -> Places:
    found: Places = {}
    for page, paths in book.pages.items():
        for path in paths:
            for passage in passages[path]:
                for name in passage.names:
                    of_name = found.setdefault(name, [])
                    number = sum(other == page for other, _, _ in of_name)
                    of_name.append((page, passage.qualname, number))
    return found


def anchor(name: str, number: int = 0) -> str:
    """The place of an equation on a page where it may stand more than once."""
    return f"eq-{name}" if number == 0 else f"eq-{name}-{number + 1}"


def markdown(summary: str) -> str:
    """The first line of a docstring as Markdown."""
    text = re.sub(r":math:`([^`]*)`", r"$\1$", summary)
    text = re.sub(r":\w+:`~?([^`]*)`", lambda m: f"`{m.group(1).rsplit('.', 1)[-1]}`", text)
    return text.replace("``", "`")


class _Base(SphinxDirective):
    def parsed(self, text: str) -> list[nodes.Node]:
        """Nodes of some Markdown."""
        holder = nodes.Element()
        self.state.nested_parse([text], 0, holder)
        return holder.children

    def formula(self, latex: str) -> nodes.math_block:
        block = nodes.math_block(latex, latex, nowrap=False, number=None)
        block["docname"] = self.env.docname
        return block

    def link(self, text: str, page: str, target: str, *classes: str) -> nodes.reference:
        uri = (
            f"#{target}"
            if page == self.env.docname
            else f"{_relative(self.env.docname, page)}#{target}"
        )
        return nodes.reference("", text, refuri=uri, internal=True, classes=list(classes))

    def notation(self, names: list[str], book: E.Book) -> nodes.Node:
        """The table of what the symbols of some equations mean."""
        used = {s for name in names for s in E.symbols(book.equations[name].latex)}
        rows = [f"| {_shown(s)} | {book.notation[s]} |" for s in book.notation if s in used]
        table = "\n".join(["| symbol | meaning |", "|---|---|", *rows])
        details = nodes.container(classes=["notation"])
        details += self.parsed(table)
        return details


def _shown(symbol: str) -> str:
    return "$'$ (prime)" if symbol == "'" else f"${symbol}$"


def _relative(here: str, page: str) -> str:
    """Address of a page as seen from another, which the HTML writer takes as it is."""
    up = "../" * here.count("/")
    return f"{up}{page}.html"


class Annotated(_Base):
    """The source files of a page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """One row per segment of code."""
        page = self.arguments[0]
        book, passages, all_places = read_all()
        seen: dict[str, int] = {}
        result: list[nodes.Node] = []
        names: list[str] = []
        self.env.note_dependency(str(E.EQUATIONS))
        for path in book.pages[page]:
            self.env.note_dependency(str(E.REPOSITORY / path))
            module = path.removesuffix(".py").replace("/", ".")
            file = nodes.section(ids=[nodes.make_id(f"file-{Path(path).stem}-{len(result)}")])
            file += nodes.title("", "", nodes.literal("", path.removeprefix("minerva_torchrl/")))
            for passage in passages[path]:
                names += passage.names
                section = nodes.section(ids=[nodes.make_id(f"{module}.{passage.qualname}")])
                section += nodes.title("", "", nodes.literal("", passage.qualname))
                section += self._rows(book, passage, path, module, seen, all_places)
                file += section
            result.append(file)
        head = nodes.section(ids=["notation"])
        head += nodes.title("", "Notation")
        head += self.notation(names, book)
        return [*result, head]

    def _rows(
        self,
        book: E.Book,
        passage: E.Passage,
        path: str,
        module: str,
        seen: dict[str, int],
        all_places: Places,
    ) -> list[nodes.Node]:
        rows: list[nodes.Node] = []
        explained: set[str] = set()
        for index, segment in enumerate(passage.segments):
            code_id = nodes.make_id(f"code-{module}.{passage.qualname}") + f"-{index}"
            left, first = nodes.container(classes=["eq-text"]), ""
            if index == 0 and passage.summary:
                summary = nodes.container(classes=["eq-summary"])
                summary += self.parsed(markdown(passage.summary))
                left += summary
            for name in segment.names:
                if name in explained or name not in book.equations:
                    continue
                explained.add(name)
                number = seen.get(name, 0)
                seen[name] = number + 1
                first = first or anchor(name, number)
                left += self._equation(book, name, number, code_id, all_places)
            right = nodes.container(classes=["eq-code"], ids=[code_id])
            right += self._source_link(passage, segment, path, module, first)
            right += self._code(segment)
            marked = "eq-row" if segment.names else "eq-row eq-plain"
            rows.append(nodes.container("", left, right, classes=marked.split()))
        return rows

    def _equation(
        self,
        book: E.Book,
        name: str,
        number: int,
        code_id: str,
        all_places: Places,
    ) -> nodes.Node:
        equation = book.equations[name]
        box = nodes.container(classes=["eq-box"], ids=[anchor(name, number)])
        title = nodes.paragraph("", "", classes=["eq-title"])
        title += nodes.strong("", equation.title)
        title += nodes.Text(" ")
        title += self.link("code", self.env.docname, code_id, "eq-jump")
        box += title
        box += self.formula(equation.latex)
        if number == 0 and equation.text:
            box += self.parsed(equation.text)
        elsewhere = [place for place in all_places[name] if place[1:] and place[0] != _page(self)]
        if number == 0 and elsewhere:
            also = nodes.paragraph("", "Also in ", classes=["eq-also"])
            shown = list(dict.fromkeys(elsewhere))
            for i, (page, function, other) in enumerate(shown):
                also += nodes.Text(", " if i else "")
                also += self.link(function, f"equations/{page}", anchor(name, other))
            box += also
        return box

    def _source_link(
        self, passage: E.Passage, segment: E.Segment, path: str, module: str, first: str
    ) -> nodes.Node:
        line = nodes.paragraph("", "", classes=["eq-where"])
        last = segment.first + len(segment.lines) - 1
        place = f"{Path(path).name}:{segment.first}" + (f"–{last}" if last > segment.first else "")
        line += nodes.Text(place)
        if first:
            line += nodes.Text(" ")
            line += self.link("equation", self.env.docname, first, "eq-jump")
        return line

    def _code(self, segment: E.Segment) -> nodes.literal_block:
        text = "\n".join(segment.lines)
        block = nodes.literal_block(text, text, language="python", linenos=True, force=True)
        block["highlight_args"] = {"linenostart": segment.first}
        return block


def _page(directive: SphinxDirective) -> str:
    return directive.env.docname.rsplit("/", 1)[-1]


class ShownEquations(_Base):
    """Equations in running text."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Each with its title, its prose, and a link to its code."""
        book, _, where = read_all()
        self.env.note_dependency(str(E.EQUATIONS))
        result: list[nodes.Node] = []
        for name in re.split(r"[,\s]+", self.arguments[0].strip()):
            if name not in book.equations:
                raise self.error(f"there is no equation {name!r} in docs/equations.yaml.")
            equation = book.equations[name]
            page, function, number = where[name][0]
            box = nodes.container(classes=["eq-box", "eq-inline"])
            title = nodes.paragraph("", "", classes=["eq-title"])
            title += nodes.strong("", equation.title)
            title += nodes.Text(" ")
            title += self.link(function, f"equations/{page}", anchor(name, number), "eq-jump")
            box += title
            box += self.formula(equation.latex)
            if equation.text:
                box += self.parsed(equation.text)
            result.append(box)
        return result


class EquationIndex(_Base):
    """All equations, by page."""

    def run(self) -> list[nodes.Node]:
        """One row per equation, at its first place."""
        book, _, where = read_all()
        self.env.note_dependency(str(E.EQUATIONS))
        result: list[nodes.Node] = []
        for page in book.pages:
            rows = nodes.container(classes=["eq-index"])
            for name, of_name in where.items():
                if of_name[0][0] != page:
                    continue
                row = nodes.container(classes=["eq-index-row"])
                title = nodes.paragraph("", "", classes=["eq-title"])
                title += self.link(book.equations[name].title, f"equations/{page}", anchor(name))
                row += title
                row += self.formula(book.equations[name].latex)
                links = nodes.paragraph("", "", classes=["eq-also"])
                for i, (other, function, number) in enumerate(dict.fromkeys(of_name)):
                    links += nodes.Text(", " if i else "")
                    links += self.link(function, f"equations/{other}", anchor(name, number))
                row += links
                rows += row
            section = nodes.section(ids=[f"index-{page}"])
            section += nodes.title("", "", self._page_title(page))
            section += rows
            result.append(section)
        return result

    def _page_title(self, page: str) -> nodes.Node:
        text = Path(self.env.doc2path(f"equations/{page}")).read_text()
        title = re.findall(r"^# (.+)$", text, re.MULTILINE)[0]
        return addnodes.pending_xref(
            "",
            nodes.inline("", title),
            refdomain="std",
            reftype="doc",
            reftarget=f"/equations/{page}",
            refexplicit=True,
            refwarn=True,
            refdoc=self.env.docname,
        )


class Notation(_Base):
    """What all symbols mean."""

    def run(self) -> list[nodes.Node]:
        """The whole table."""
        book = E.load()
        self.env.note_dependency(str(E.EQUATIONS))
        return [self.notation(list(book.equations), book)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("annotated", Annotated)
    app.add_directive("equation", ShownEquations)
    app.add_directive("equation-index", EquationIndex)
    app.add_directive("equation-notation", Notation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
