"""Files that are replaced in one step: there is the old file, or the complete new one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["replace_file", "replace_path", "write_json"]


@contextmanager
def replace_path(path: str | Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of another when it is complete.

    If anything goes wrong before that, the old file stays as it is.

    Args:
        path (str or Path): the file to create or replace.

    Yields:
        a path in the same folder, with the same ending.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}")  # next to it: a move within one file system
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replace_file(path: str | Path) -> Iterator[BinaryIO]:
    """The same as :func:`replace_path`, with a file that is open for bytes.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replace_file(path) as file:
        ...     _ = file.write(b"first")
        >>> with replace_file(path) as file:
        ...     _ = file.write(b"sec")
        ...     raise RuntimeError
        Traceback (most recent call last):
        ...
        RuntimeError
        >>> path.read_text()
        'first'
    """
    with replace_path(path) as temporary, temporary.open("wb") as file:
        yield file


def write_json(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write a JSON file in one step.

    JSON has no NaN and no infinity. They become ``null``.

    Args:
        path (str or Path): the file.
        mapping (mapping): mappings with texts as keys, lists or tuples, texts, numbers, bools and
            ``None``, nested as wanted.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "summary.json"
        >>> write_json(path, {"frames": 20_000, "returns": (612.5, float("nan"))})
        >>> json.loads(path.read_text())
        {'frames': 20000, 'returns': [612.5, None]}
        >>> write_json(path, {"settings": {"device": object()}})
        Traceback (most recent call last):
        ...
        TypeError: settings.device cannot be written as JSON: it is of type object.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping must be a mapping, got {type(mapping).__name__}.")
    text = json.dumps(_to_json(mapping, ""), indent=2, allow_nan=False) + "\n"
    with replace_file(path) as file:
        file.write(text.encode())


def _to_json(value: object, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys of JSON must be texts, got {key!r} in {where or 'it'}.")
        return {
            key: _to_json(item, f"{where}.{key}".removeprefix(".")) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where} cannot be written as JSON: it is of type {type(value).__name__}.")
