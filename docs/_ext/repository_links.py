"""Links from pages to files of the repository.

A page may be read in the repository, too, where ``[mpo.py](../minerva_torchrl/objectives/mpo.py)``
is a link to the file. On the site files are downloads, and a folder is only named.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

REPOSITORY = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")


def linked(text: str, docname: str) -> str:
    """The text of a page with its links to files outside of ``docs/`` as the site wants them.

    Args:
        text: Markdown.
        docname: name of the page, relative to ``docs/``.
    """
    folder = (REPOSITORY / "docs" / docname).parent

    def replaced(match: re.Match[str]) -> str:
        title, up, path, _ = match.groups()
        target = (folder / up / path).resolve()
        if not target.exists():
            raise ValueError(f"{docname} links to {up}{path}, which does not exist.")
        if target.is_relative_to(REPOSITORY / "docs"):
            return match.group(0)
        return title if target.is_dir() else f"{{download}}`{title.strip('`')} <{up}{path}>`"

    return _LINK.sub(replaced, text)


def _source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    content[0] = linked(content[0], docname)


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("source-read", _source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
