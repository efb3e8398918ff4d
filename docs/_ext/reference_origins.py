"""Arguments of an object as rows of a table, without Sphinx, so that the tests can use it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import docstrings


def resolve(path: str) -> Any:
    """An object by its dotted name.

    Args:
        path: such as ``minerva_torchrl.MPOLoss``.
    """
    place, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(place), name)


def argument_rows(path: str, origins: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Name, default, meaning and origin of each argument.

    Args:
        path: dotted name of a function or class.
        origins: by the last part of a dotted name, origins of its arguments.
    """
    obj = resolve(path)
    described = docstrings.arguments(inspect.getdoc(obj) or "")
    of_object = origins.get(path.rsplit(".", 1)[1], {})
    rows = []
    for name, parameter in docstrings.parameters(obj).items():
        text = described[name].text if name in described else ""
        rows.append((name, docstrings.default(parameter), text, of_object.get(name, "")))
    return rows
