"""Documents as Markdown, in GitHub's dialect."""

from __future__ import annotations

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

__all__ = ["to_markdown"]


def to_markdown(document: Document, pictures: str = "plots") -> str:
    r"""Write a document as Markdown.

    Args:
        document (Document): the document.
        pictures (str): folder of its pictures, seen from the file. Defaults to ``"plots"``.

    Examples:
        >>> from minerva_torchrl.report.document import Document, Paragraph
        >>> to_markdown(Document("Results", (Paragraph(("1 < 2, see ", Code("a|b"))),)))
        '# Results\n\n1 \\< 2, see `a|b`\n'
    """
    blocks = [_block(block, pictures) for block in document.blocks]
    return "\n\n".join([f"# {_words(document.title)}", *blocks]) + "\n"


def _block(block: Block, pictures: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_words(block.text)}"
    if isinstance(block, Paragraph):
        return _words(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_words(item)}" for item in block.items)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Listing):
        fence = _fence(block.text, 3)
        return f"{fence}{block.language}\n{block.text}\n{fence}"
    if isinstance(block, Picture):
        return f"![{_words(block.description)}]({pictures}/{block.name})"
    inner = [_block(inner, pictures) for inner in block.blocks]
    return "\n\n".join([f"**{_words(block.summary)}**", *inner])


def _table(table: Table) -> str:
    rules = ["---:" if column in table.numbers else "---" for column in range(len(table.columns))]
    rows = [_row(row) for row in (table.columns, *table.rows)]
    return "\n".join([rows[0], f"|{'|'.join(rules)}|", *rows[1:]])


def _row(cells: tuple[Text, ...]) -> str:
    # A bar ends a cell even in code, unless there is a backslash before it.
    texts = [re.sub(r"(?<!\\)\|", r"\\|", _words(cell)) for cell in cells]
    return f"| {' | '.join(texts)} |"


def _words(text: Text) -> str:
    parts = text if isinstance(text, tuple) else (text,)
    return "".join(_code(part) if isinstance(part, Code) else _plain(part) for part in parts)


def _plain(text: str) -> str:
    """Text in one line, in which no character has a meaning of its own."""
    one_line = re.sub(r"\s+", " ", text)
    escaped = re.sub(r"([\\`*\[\]<>|~$#&])", r"\\\1", one_line)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\_", escaped)  # none within words


def _code(code: Code) -> str:
    text = re.sub(r"\s", " ", code.text)
    fence = _fence(text, 1)
    padding = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) or not text else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than there are in a row in the text."""
    runs = [len(run) for run in re.findall("`+", text)]
    return "`" * max([least, *(length + 1 for length in runs)])
