"""YAML that a stranger may have written: read without anything that could take long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from minerva_torchrl.runs.atomic import read_file

__all__ = ["read_settings_text"]

_LARGEST = 1 << 20  # bytes
_DEEPEST = 16


def read_settings_text(file: Path) -> str:
    """The text of a YAML file of plain settings.

    Args:
        file (Path): a regular file.

    Raises:
        ValueError: if it has aliases, which can stand for more data than fits into any memory, tags
            or deep nesting. The message says where.
    """
    text = read_file(file, limit=_LARGEST).decode()
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _problem("has an anchor or an alias", event)
        if getattr(event, "tag", None) is not None:
            raise _problem("has a tag", event)
        if depth > _DEEPEST:
            raise _problem("is nested too deeply", event)
    return text


def _problem(what: str, event: Any) -> ValueError:
    return ValueError(f"{what} in line {event.start_mark.line + 1}")
