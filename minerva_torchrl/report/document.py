"""A report before it is Markdown or HTML: both are made from the same blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "Block",
    "Bullets",
    "Code",
    "Details",
    "Document",
    "Heading",
    "Listing",
    "Paragraph",
    "Picture",
    "Table",
    "Text",
]


@dataclass(frozen=True)
class Code:
    """A name or a value, as it would be typed."""

    text: str


Text = str | Code | tuple[str | Code, ...]
"""Words, in one line."""


@dataclass(frozen=True)
class Heading:
    """Title of what follows; level 2 is a section, 3 a part of one."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Some sentences."""

    text: Text


@dataclass(frozen=True)
class Bullets:
    """A list without order."""

    items: tuple[Text, ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells, as many in each as there are columns."""

    columns: tuple[Text, ...]
    rows: tuple[tuple[Text, ...], ...]
    numbers: tuple[int, ...] = ()
    """Columns that have numbers in them."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{row} must have {len(self.columns)} cells.")


@dataclass(frozen=True)
class Listing:
    """Lines to copy."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Picture:
    """One of the document's pictures."""

    name: str
    description: str


@dataclass(frozen=True)
class Details:
    """What only some will read."""

    summary: str
    blocks: tuple[Block, ...]


Block = Heading | Paragraph | Bullets | Table | Listing | Picture | Details


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    blocks: tuple[Block, ...]
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """PNG files by name."""
