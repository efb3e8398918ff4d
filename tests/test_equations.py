"""Equations, their markers in the source, and the notation fit together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))
try:
    import equations as E
finally:
    sys.path.pop(0)

SOURCE = '''"""A module."""


def double(x):
    """Twice the number."""
    # eq: twice
    y = 2 * x
    return y


class Holder:
    def method(self, x):
        if x:
            # eq: half, third
            y = x / 2
        z = 1

        return y + z
'''
EQUATIONS = {
    name: E.Equation(name, name, latex)
    for name, latex in {"twice": "y = 2 x", "half": r"\eta_i", "third": r"\mathrm{KL}"}.items()
}
NOTATION = dict.fromkeys(["x", "y", "i", r"\eta", r"\mathrm{KL}"], "")
BOOK = E.Book(EQUATIONS, NOTATION, {"page": ["a.py"]})


def problems(source: str = SOURCE, book: E.Book = BOOK, public: tuple[str, ...] = ("double",)):
    return E.problems(book, [("a.py", source)], public)


# The package -------------------------------------------------------------------------------------


def test_package() -> None:
    assert E.problems(E.load(), E.package_sources(), E.public_functions()) == []


def test_layers_have_markers() -> None:
    marked = {path for path, _ in E.package_sources()}
    parts = (
        "functional/",
        "value/functional",
        "duals",
        "policies/",
        "critics/",
        "mpo",
        "vmpo",
        "ppo",
    )
    for part in parts:
        assert any(f"objectives/{part}" in path for path in marked), part


def test_every_page_exists() -> None:
    pages = E.REPOSITORY / "docs" / "equations"
    for page in E.load().pages:
        assert f"{{annotated}} {page}" in (pages / f"{page}.md").read_text()


# The checker, with bad inputs --------------------------------------------------------------------


def test_nothing_wrong() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    "marker",
    ["#eq: twice", "# eq twice", "# eq: Twice", "# eq: twice;half", "# eq:", "# EQ: twice"],
)
def test_malformed_marker(marker: str) -> None:
    [problem] = [p for p in problems(SOURCE.replace("# eq: twice", marker)) if "a marker is" in p]
    assert problem.startswith("a.py:6:")
    assert marker in problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("    y = 2 * x", "    y = 2 * x  # eq: twice"),
            "a.py:7: a marker stands on a line of its own",
        ),
        (('"""A module."""', '"""A module."""\n# eq: twice'), "a.py:2: a marker belongs inside"),
        (("# eq: twice", "# eq: twice\n"), "a.py:6: nothing follows"),
        (("# eq: twice", "# eq: twice\n    # eq: half"), "a.py:6: nothing follows"),
    ],
)
def test_misplaced_marker(change: tuple[str, str], message: str) -> None:
    assert any(p.startswith(message) for p in problems(SOURCE.replace(*change)))


def test_unknown_name() -> None:
    found = problems(SOURCE.replace("# eq: twice", "# eq: thrice"))
    assert "a.py: double names an unknown equation 'thrice'." in found


def test_equation_without_marker() -> None:
    assert "the equation 'twice' has no marker." in problems(
        SOURCE.replace("    # eq: twice\n", "")
    )


def test_public_function_without_marker() -> None:
    [problem] = problems(public=("double", "other"))
    assert problem == "the public function 'other' has no marker."


def test_symbol_without_notation() -> None:
    notation = {s: m for s, m in NOTATION.items() if s != r"\eta"}
    [problem] = problems(book=E.Book(EQUATIONS, notation, BOOK.pages))
    assert "symbols of 'half'" in problem
    assert "eta" in problem


def test_notation_that_nothing_uses() -> None:
    book = E.Book(EQUATIONS, NOTATION | {r"\beta": ""}, BOOK.pages)
    assert problems(book=book) == ["no equation has the symbol '\\\\beta'."]


def test_file_on_no_page() -> None:
    [problem] = problems(book=E.Book(EQUATIONS, NOTATION, {"page": []}))
    assert problem == "a.py has markers, but is on no page."


# Symbols and passages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"w_i = \frac{\exp(Q_i / \eta)}{2}", ["w", "i", "Q", r"\eta"]),
        (r"\pi'(a) \text{ for all of them}", [r"\pi", "'", "a"]),
        (r"\mathrm{KL}(w \,\|\, u)", [r"\mathrm{KL}", "w", "u"]),
        (
            r"\tilde D, \hat{A}, \overline{\mathrm{KL}}",
            [r"\tilde{D}", r"\hat{A}", r"\overline{\mathrm{KL}}"],
        ),
        (r"\mathcal N(0, 1)", [r"\mathcal{N}"]),
        (r"\begin{aligned} x \\ y \end{aligned}", ["x", "y"]),
    ],
)
def test_symbols(latex: str, expected: list[str]) -> None:
    assert E.symbols(latex) == expected


def test_passages() -> None:
    double, method = E.passages(SOURCE)
    assert (double.qualname, double.summary) == ("double", "Twice the number.")
    assert [(s.first, s.lines, s.names) for s in double.segments] == [
        (4, ("def double(x):",), ()),
        (7, ("    y = 2 * x", "    return y"), ("twice",)),
    ]
    assert method.qualname == "Holder.method"
    assert [(s.first, s.lines, s.names) for s in method.segments] == [
        (12, ("def method(self, x):", "    if x:"), ()),
        (15, ("        y = x / 2",), ("half", "third")),
        (16, ("    z = 1", "", "    return y + z"), ()),
    ]
