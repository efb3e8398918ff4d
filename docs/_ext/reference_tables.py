"""Tables that are made from the code: arguments with their origins, and metrics.

``{arguments} minerva_torchrl.MPOLoss``
    every argument with its default, its meaning (from the docstring) and where the default comes
    from (``docs/origins.yaml``).
``{metrics} mpo``
    every metric of a loss and how to read it (``docs/metrics.yaml``).
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from docutils import nodes
from reference_origins import argument_rows
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).parents[1]
ORIGINS = DOCS / "origins.yaml"
METRICS = DOCS / "metrics.yaml"


def as_markdown(text: str) -> str:
    """Text of a docstring as Markdown in the cell of a table."""
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?([^`]*)`", lambda m: f"`{m.group(1).rsplit('.', 1)[-1]}`", text)
    text = re.sub(r"(?<![<(])(https?://\S*[^\s.,;)])", r"<\1>", text)
    return text.replace("``", "`").replace("|", "\\|")


class Arguments(SphinxDirective):
    """Arguments of a function or class."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A table in Markdown."""
        self.env.note_dependency(str(ORIGINS))
        origins = yaml.safe_load(ORIGINS.read_text())
        rows = argument_rows(self.arguments[0], origins)
        with_origin = any(row[3] for row in rows)
        head = ["| argument | default | meaning |", "|---|---|---|"]
        if with_origin:
            head = [head[0] + " origin of the default |", head[1] + "---|"]
        lines = []
        for name, default, text, origin in rows:
            shown = f"`{default}`" if default else ""
            line = f"| `{name}` | {shown} | {as_markdown(text)} |"
            lines.append(line + (f" {origin} |" if with_origin else ""))
        return _parsed(self, "\n".join([*head, *lines]))


class Metrics(SphinxDirective):
    """Metrics of a loss."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A table in Markdown."""
        self.env.note_dependency(str(METRICS))
        groups = yaml.safe_load(METRICS.read_text())[self.arguments[0]]
        lines = ["| metric | what it is | how to read it |", "|---|---|---|"]
        for names, (meaning, reading) in groups.items():
            shown = ", ".join(f"`{name.strip()}`" for name in names.split(","))
            lines.append(f"| {shown} | {meaning} | {reading} |")
        return _parsed(self, "\n".join(lines))


def _parsed(directive: SphinxDirective, text: str) -> list[nodes.Node]:
    holder = nodes.Element()
    directive.state.nested_parse([text], 0, holder)
    return holder.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("arguments", Arguments)
    app.add_directive("metrics", Metrics)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
