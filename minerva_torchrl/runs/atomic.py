"""The files of a run folder: how they are opened, and how they are replaced in one step.

A folder may come from somebody else, or lie where others can write. So nothing but a regular file
is opened, no link is followed, and temporary files have names that nobody can foresee.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "TEMPORARY",
    "check_kind",
    "flush_folder",
    "open_file",
    "read_file",
    "remove_temporary_files",
    "replace_file",
    "replace_path",
]

TEMPORARY = ".tmp-"
"""How names of unfinished files begin."""

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}
_FLAGS = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_APPEND, "r+b": os.O_RDWR | os.O_CREAT}


def check_kind(path: Path, kind: int = stat.S_IFREG) -> bool:
    """Whether there is a file; an ``OSError`` if there is something else under its name.

    Args:
        path (Path): the file. A link is not followed, whatever it leads to.
        kind (int): what it must be, ``stat.S_IFDIR`` for a folder. Defaults to a regular file.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> check_kind(folder / "eval.csv")
        False
        >>> check_kind(folder)
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] it is a folder, and must be a file: ...
    """
    try:
        found = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    _check_mode(path, found, kind)
    return True


def open_file(path: str | Path, mode: str = "rb") -> BinaryIO:
    """Open a regular file, and nothing else: no link, folder, pipe or device.

    Args:
        path (str or Path): the file.
        mode (str): ``"rb"`` (default), ``"ab"`` for a file that exists, or ``"r+b"``, which makes
            the file if it is not there. What is written to must have no other name (hard link).
    """
    path = Path(path)
    check_kind(path)  # opening some devices does something already
    flags = _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        found = os.fstat(descriptor)
        _check_mode(path, found.st_mode, stat.S_IFREG)
        if mode != "rb" and found.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has another name elsewhere (a hard link)", str(path))
        file: BinaryIO = os.fdopen(descriptor, mode)  # type: ignore[assignment]
        return file
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: str | Path, *, limit: int) -> bytes:
    """The content of a regular file.

    Args:
        path (str or Path): the file.

    Keyword Args:
        limit (int): bytes that it may have at most.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            problem = f"it has {size:,} bytes, and more than {limit:,} are not read"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read(limit)


@contextmanager
def replace_path(path: str | Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of another when it is complete.

    If anything goes wrong before that, the old file stays as it is.

    Args:
        path (str or Path): the file to create or replace.

    Yields:
        an empty file in the same folder, with the same ending.
    """
    path = Path(path)
    # Next to it: a move within one file system.
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}{path.suffix}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
        with open_file(temporary) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise OSError(errno.ENODATA, "nothing was written", str(path))
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_folder(path.parent)
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
    with replace_path(path) as temporary, open_file(temporary, "r+b") as file:
        yield file


def remove_temporary_files(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder.

    Args:
        folder (Path): the folder, which need not be there.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # a folder, for example, which is not ours
            path.unlink()


def flush_folder(folder: Path) -> None:
    """Make sure that names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_mode(path: Path, mode: int, kind: int) -> None:
    found = stat.S_IFMT(mode)
    if found != kind:
        problem = f"it is {_KINDS.get(found, 'a device')}, and must be {_KINDS[kind]}"
        raise OSError(errno.EINVAL, problem, str(path))
