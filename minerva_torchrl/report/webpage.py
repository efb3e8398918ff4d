"""Documents as a single HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import re

from minerva_torchrl.report.document import (
    Block,
    Bullets,
    Code,
    Document,
    Heading,
    Listing,
    Paragraph,
    Picture,
    Table,
    Text,
)

__all__ = ["to_html"]

# Nothing may be loaded from anywhere.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_LONG = 42  # characters in a cell

_STYLE = """
:root {
  color-scheme: light dark;
  --text: #24292f; --faint: #5c6670; --line: #d9dde2; --page: #ffffff; --panel: #f5f6f8;
  --link: #1f5fa8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #dfe3e8; --faint: #9aa4af; --line: #363c44; --page: #16191d; --panel: #1f2329;
    --link: #7fb2ea;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 4rem;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  color: var(--text); background: var(--page);
}
h1 { margin: 0.5rem 0 1rem; font-size: 1.8rem; line-height: 1.2; }
h2 {
  margin: 2.8rem 0 0.8rem; padding-bottom: 0.3rem; font-size: 1.35rem; line-height: 1.25;
  border-bottom: 1px solid var(--line);
}
h3 { margin: 2rem 0 0.6rem; font-size: 1.08rem; line-height: 1.3; overflow-wrap: anywhere; }
p, ul { margin: 0.7rem 0; max-width: 46rem; }
li { margin: 0.25rem 0; overflow-wrap: anywhere; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; font-size: 0.92rem; }
.scroll { margin: 0.9rem 0; overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.8rem 0.35rem 0; text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
td { border-top: 1px solid var(--line); white-space: nowrap; }
td.long { min-width: 15rem; white-space: normal; }
.number { padding-left: 0.5rem; text-align: right; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font-size: 0.88em; overflow-wrap: anywhere; }
pre {
  margin: 0.7rem 0; padding: 0.7rem 0.9rem; overflow-x: auto;
  font-size: 0.82rem; line-height: 1.5; background: var(--panel); border-radius: 6px;
}
pre code { font-size: inherit; overflow-wrap: normal; }
img {
  display: block; width: 100%; max-width: 42rem; height: auto; margin: 0.9rem 0;
  padding: 0.4rem; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
}
details { margin: 0.9rem 0; }
summary { cursor: pointer; color: var(--link); }
@media print { nav { display: none; } pre { white-space: pre-wrap; } }
"""


def to_html(document: Document) -> str:
    """Write a document as a page of HTML, with its style and its pictures inside.

    It loads nothing and runs no script, fits a small screen, and is dark where that is wanted.

    Args:
        document (Document): the document.

    Examples:
        >>> from minerva_torchrl.report.document import Document, Paragraph
        >>> page = to_html(Document("Results", (Paragraph(("1 < 2, see ", Code("a|b"))),)))
        >>> "<p>1 &lt; 2, see <code>a|b</code></p>" in page
        True
    """
    title = _escape(document.title)
    sections = [b.text for b in document.blocks if isinstance(b, Heading) and b.level == 2]
    links = [f'<a href="#{_anchor(text)}">{_escape(text)}</a>' for text in sections]
    body = [f"<h1>{title}</h1>"]
    if links:
        body.append("<nav>\n" + "\n".join(links) + "\n</nav>")
    body += [_block(block, document) for block in document.blocks]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            *head,
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        ]
    )


def _block(block: Block, document: Document) -> str:
    if isinstance(block, Heading):
        anchor = f' id="{_anchor(block.text)}"' if block.level == 2 else ""
        return f"<h{block.level}{anchor}>{_escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_words(block.text)}</p>"
    if isinstance(block, Bullets):
        items = [f"<li>{_words(item)}</li>" for item in block.items]
        return "\n".join(["<ul>", *items, "</ul>"])
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Listing):
        return f"<pre><code>{_escape(block.text)}</code></pre>"
    if isinstance(block, Picture):
        data = base64.b64encode(document.pictures[block.name]).decode()
        return f'<img alt="{_escape(block.description)}" src="data:image/png;base64,{data}">'
    inner = [_block(inner, document) for inner in block.blocks]
    return "\n".join(
        ["<details>", f"<summary>{_escape(block.summary)}</summary>", *inner, "</details>"]
    )


def _table(table: Table) -> str:
    rows = ["<tr>" + "".join(_cells(row, "td", table.numbers)) + "</tr>" for row in table.rows]
    return "\n".join(
        [
            '<div class="scroll">',
            "<table>",
            "<thead>",
            "<tr>" + "".join(_cells(table.columns, "th", table.numbers)) + "</tr>",
            "</thead>",
            "<tbody>",
            *rows,
            "</tbody>",
            "</table>",
            "</div>",
        ]
    )


def _cells(cells: tuple[Text, ...], tag: str, numbers: tuple[int, ...]) -> list[str]:
    written = []
    for index, cell in enumerate(cells):
        kind = ' class="number"' if index in numbers else _class_of_words(cell)
        written.append(f"<{tag}{kind}>{_words(cell)}</{tag}>")
    return written


def _class_of_words(cell: Text) -> str:
    """Short texts are kept in one line; a table that is too wide for a screen can be moved."""
    parts = cell if isinstance(cell, tuple) else (cell,)
    length = sum(len(part.text if isinstance(part, Code) else part) for part in parts)
    return ' class="long"' if length > _LONG else ""


def _words(text: Text) -> str:
    parts = text if isinstance(text, tuple) else (text,)
    return "".join(
        f"<code>{_escape(part.text)}</code>" if isinstance(part, Code) else _escape(part)
        for part in parts
    )


def _escape(text: str) -> str:
    return html.escape(text)


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
