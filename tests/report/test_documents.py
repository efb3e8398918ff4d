"""Markdown and HTML from the same blocks."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest

from minerva_torchrl.report.document import (
    Bullets,
    Code,
    Details,
    Document,
    Heading,
    Listing,
    Paragraph,
    Picture,
    Table,
    Text,
)
from minerva_torchrl.report.markdown import to_markdown
from minerva_torchrl.report.webpage import to_html

PNG = b"\x89PNG\r\n\x1a\n not really"
ALL = Document(
    "A & B",
    (
        Heading(2, "First <part>"),
        Paragraph(("see ", Code("a_b"), " now")),
        Bullets(("one", ("two ", Code("x|y")))),
        Table(("Name", "Value"), (("a|b", "1"), (Code("c|d"), "2")), numbers=(1,)),
        Listing("x = '<1>'\ny", "bash"),
        Picture("p.png", 'a "picture"'),
        Details("More", (Paragraph("inside"), Table(("T",), (("u",),)))),
    ),
    {"p.png": PNG},
)
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what is in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_markdown() -> None:
    assert to_markdown(ALL, "pictures") == (
        "# A \\& B\n\n"
        "## First \\<part\\>\n\n"
        "see `a_b` now\n\n"
        "- one\n- two `x|y`\n\n"
        "| Name | Value |\n|---|---:|\n| a\\|b | 1 |\n| `c\\|d` | 2 |\n\n"
        "```bash\nx = '<1>'\ny\n```\n\n"
        '![a "picture"](pictures/p.png)\n\n'
        "**More**\n\ninside\n\n| T |\n|---|\n| u |\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim.lr_actor=1e-3", "optim.lr_actor=1e-3"),
        ("_a_ *b* `c`", r"\_a\_ \*b\* \`c\`"),
        ("<b>|</b>", r"\<b\>\|\</b\>"),
        ("[a](http) ~x~ $y$ \\", r"\[a\](http) \~x\~ \$y\$ \\"),
        ("two\nlines", "two lines"),
        (Code("a`b"), "``a`b``"),
        (Code("`a`"), "`` `a` ``"),
        (Code("two\nlines"), "`two lines`"),
    ],
)
def test_markdown_escapes(text: Text, expected: str) -> None:
    assert to_markdown(Document("t", (Paragraph(text),))) == f"# t\n\n{expected}\n"


def test_markdown_fences_are_long_enough() -> None:
    assert "````\n```\n````" in to_markdown(Document("t", (Listing("```"),)))


def test_html() -> None:
    page = to_html(ALL)
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>\n")
    for piece in (
        "<title>A &amp; B</title>",
        '<h2 id="first-part">First &lt;part&gt;</h2>',
        '<a href="#first-part">First &lt;part&gt;</a>',
        "<p>see <code>a_b</code> now</p>",
        "<li>two <code>x|y</code></li>",
        '<th class="number">Value</th>',
        "<td><code>c|d</code></td>",
        "<pre><code>x = &#x27;&lt;1&gt;&#x27;\ny</code></pre>",
        "<details>\n<summary>More</summary>\n<p>inside</p>",
    ):
        assert piece in page
    assert parsed.cells == ["Name", "Value", "a|b", "1", "c|d", "2", "T", "u"]
    (image,) = parsed.attributes("img")
    assert image["alt"] == 'a "picture"'
    kind, data = str(image["src"]).split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data, validate=True) == PNG


def test_html_needs_nothing_else() -> None:
    page = to_html(ALL)
    parsed = Page(page)
    assert not re.search(r"https?://|url\(|@import", page)
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base"}
    policies = [m["content"] for m in parsed.attributes("meta") if "http-equiv" in m]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_html_for_small_screens_and_dark_rooms() -> None:
    page = to_html(ALL)
    metas = {m["name"]: m["content"] for m in Page(page).attributes("meta") if "name" in m}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark"
    assert "@media (prefers-color-scheme: dark)" in page
    # Tables can be moved sideways instead of making the page wider.
    assert page.count('<div class="scroll">\n<table>') == page.count("<table>") == 2


def test_long_cells_may_be_broken() -> None:
    table = Table(("a", "b"), (("x" * 30, "y" * 60),))
    classes = [c.get("class") for c in Page(to_html(Document("t", (table,)))).attributes("td")]
    assert classes == [None, "long"]


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", 'a" onload="x', "a & b | c"])
def test_nothing_in_a_text_is_html(text: str) -> None:
    blocks = (
        *(Heading(2, text), Heading(3, text), Paragraph((text, Code(text))), Bullets((text,))),
        *(Table((text,), ((text,),)), Listing(text), Picture("p.png", text), Details(text, ())),
    )
    parsed = Page(to_html(Document(text, blocks, {"p.png": PNG})))
    assert "script" not in dict(parsed.tags)
    assert parsed.words.count(text) == 13 - 1  # all but the picture's description
    assert parsed.attributes("img")[0]["alt"] == text


def test_tables_have_as_many_cells_as_columns() -> None:
    with pytest.raises(ValueError, match="must have 2 cells"):
        Table(("a", "b"), (("c",),))
