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
        origins: by the dotted name below the package, origins of its arguments.
    """
    obj = resolve(path)
    texts = {}
    for kind in reversed(obj.__mro__) if isinstance(obj, type) else [obj]:  # what it inherits, too
        described = docstrings.arguments(inspect.getdoc(kind) or "")
        texts |= {name: argument.text for name, argument in described.items()}
    texts = texts or docstrings.fields(obj)
    of_object = origins.get(path.removeprefix("minerva_torchrl."), {})
    return [
        (name, docstrings.default(parameter), texts[name], of_object.get(name, ""))
        for name, parameter in docstrings.parameters(obj).items()
    ]
