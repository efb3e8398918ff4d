"""Files that are replaced in one step: there is the old file, or the complete new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["replace_file", "replace_path"]


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
