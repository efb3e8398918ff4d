"""``eval.csv`` and ``metrics.csv``: tables that grow while a run trains."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from minerva_torchrl.runs.atomic import check_kind, open_file, read_file, replace_file

__all__ = ["CsvTable", "TableError", "TableText", "read_table"]

_FRAMES = "frames"
_LARGEST = 1 << 30  # bytes
_DIGITS = 18  # of a number of frames: what fits into 64 bits


class TableError(ValueError):
    """A file is not a table of a run. ``reason`` says why, without the name of the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not a table of a run: {reason}.")
        self.reason = reason


@dataclass(frozen=True)
class TableText:
    """What is written in a table."""

    columns: list[str]
    """Names of the columns, ``frames`` first; none if the file is empty."""
    rows: list[list[str]]
    """Cells of the complete rows."""
    intact: bool
    """Whether that is all the file has: no row that was only partly written."""

    def numbers(self) -> list[dict[str, float]]:
        """The numbers in each row, by name of column. Empty cells are left out."""
        return [
            {name: _to_number(cell) for name, cell in zip(self.columns, row, strict=True) if cell}
            for row in self.rows
        ]


def read_table(path: Path, *, keep_last_line: bool = False) -> TableText:
    """Read a table, which another process may be writing to.

    Args:
        path (Path): the file.

    Keyword Args:
        keep_last_line (bool): take the last line even if there is no line break after it. By
            default it is left out, because it may have been written only in part.

    Raises:
        TableError: if it is not a table of numbers with ``frames`` as its first column, which
            increases.
    """
    data = read_file(path, limit=_LARGEST)
    if keep_last_line and data and not data.endswith(b"\n"):
        data += b"\n"
    if not data:
        return TableText([], [], False)
    # What follows the last line break may be cut anywhere, also within a character.
    complete, line_break, rest = data.rpartition(b"\n")
    if not line_break:
        complete, rest = data, b""
    try:
        header, *rows = csv.reader(complete.decode().split("\n"), strict=True)
    except UnicodeDecodeError:
        raise TableError(path, "it is not text") from None
    except csv.Error as error:
        raise TableError(path, str(error)) from None
    if header[:1] != [_FRAMES]:
        raise TableError(path, f"its first column is not {_FRAMES!r}")
    if len(set(header)) < len(header):
        raise TableError(path, "two columns have the same name")
    if not line_break:  # only a part of the header
        return TableText([], [], False)
    intact = not rest
    if rows and len(rows[-1]) < len(header):
        rows.pop()
        intact = False
    before = -1
    for number, row in enumerate(rows, start=2):
        fits = len(row) == len(header) and len(row[0]) <= _DIGITS
        if not fits or not (row[0].isascii() and row[0].isdecimal()):
            raise TableError(path, f"line {number} does not fit the header")
        if int(row[0]) <= before:
            raise TableError(path, f"line {number} does not have more frames than the one before")
        before = int(row[0])
        for name, cell in zip(header, row, strict=True):
            try:
                _to_number(cell or "0")
            except ValueError:
                problem = f"{name} in line {number} is {cell[:40]!r}, not a number"
                raise TableError(path, problem) from None
    return TableText(header, rows, intact)


class CsvTable:
    r"""A CSV file with a row per moment of a run, and a column per quantity.

    Rows are appended as they come. The file is written anew only if a row has a quantity that no
    row had before, and then it is replaced in one step: whatever happens, a complete table is on
    disk. An existing file is continued. If its last line is incomplete, because the process that
    wrote it was killed, that line is dropped. One process at a time may have a table open.

    Args:
        path (str or Path): the file.
        columns (sequence of str): columns to begin with. ``frames`` is always there and always
            the first. Defaults to it alone.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "train.csv"
        >>> table = CsvTable(path)
        >>> table.append({"frames": 1000, "loss": 0.5})
        >>> table.append({"frames": 2000, "loss": 0.25, "episode_return": 120.0})
        >>> path.read_text().splitlines()
        ['frames,loss,episode_return', '1000,0.5,', '2000,0.25,120.0']
        >>> table = CsvTable(path)
        >>> table.drop_after(1000)
        >>> table.rows()
        [{'frames': 1000, 'loss': 0.5}]
    """

    def __init__(self, path: str | Path, columns: Sequence[str] = (_FRAMES,)) -> None:
        self.path = Path(path)
        text = read_table(self.path) if check_kind(self.path) else TableText([], [], False)
        self._columns, self._count = text.columns, len(text.rows)
        new = self._new_columns((_FRAMES, *columns))
        # A file with another name elsewhere (a hard link) is not ours to append to: a copy is.
        if new or not text.intact or self.path.stat().st_nlink > 1:
            self._write(self._columns + new, text.rows)

    def __len__(self) -> int:
        return self._count

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    def append(self, row: Mapping[str, float | None]) -> None:
        """Add a row at the end.

        Args:
            row (mapping): values by name of column, with ``frames`` among them. New names become
                new columns, and missing values (or ``None``) empty cells.
        """
        frames: object = row.get(_FRAMES)
        if not isinstance(frames, Integral) or int(frames) < 0:
            raise ValueError(f"{_FRAMES} of a row must be an integer of at least 0, got {frames}.")
        cells = {name: _to_cell(name, value) for name, value in row.items()}
        new = self._new_columns(row)
        if new:
            self._write(self._columns + new, read_table(self.path).rows)
        line = _to_lines([[cells.get(name, "") for name in self._columns]])
        with open_file(self.path, "ab") as file:
            size = os.fstat(file.fileno()).st_size
            if os.write(file.fileno(), line) < len(line):
                os.ftruncate(file.fileno(), size)  # half a line would spoil the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._count += 1

    def drop_after(self, frames: int, *, rows: int | None = None) -> None:
        """Remove the rows with more than so many frames.

        Args:
            frames (int): the frames.

        Keyword Args:
            rows (int, optional): keep no more than so many, the first ones.
        """
        present = read_table(self.path).rows
        kept = [row for row in present[:rows] if int(row[0]) <= frames]
        if len(kept) < len(present):
            self._write(self._columns, kept)

    def flush(self) -> None:
        """Make sure that all rows survive a power cut."""
        with open_file(self.path) as file:
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, float]]:
        """The numbers in each row, by name of column. Empty cells are left out."""
        return read_table(self.path).numbers()

    def _new_columns(self, names: Iterable[str]) -> list[str]:
        new = [name for name in dict.fromkeys(names) if name not in self._columns]
        for name in new:
            if not name or not name.isprintable():
                raise ValueError(f"the name of a column must be one line of text, got {name!r}.")
        return new

    def _write(self, columns: list[str], rows: list[list[str]]) -> None:
        padded = [row + [""] * (len(columns) - len(row)) for row in rows]
        with replace_file(self.path) as file:
            file.write(_to_lines([columns, *padded]))
        self._columns, self._count = columns, len(rows)


def _to_lines(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _to_cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))  # not repr(value), which for NumPy's is 'np.float64(0.5)'
    raise TypeError(f"{name} must be a number or None, got {type(value).__name__}.")


def _to_number(cell: str) -> int | float:
    if not cell.isascii() or "_" in cell:  # which Python would take
        raise ValueError
    try:
        return int(cell)
    except ValueError:
        return float(cell)
