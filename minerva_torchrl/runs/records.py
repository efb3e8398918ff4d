"""What a run writes down: tables that grow, and JSON files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["CsvTable", "replace_file", "write_json"]

_FRAMES = "frames"


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
        self._columns: list[str] = []
        rows: list[list[str]] = []
        intact = False
        if self.path.exists():
            self._columns, rows, intact = self._read()
        new = self._new_columns((_FRAMES, *columns))
        if new or not intact:
            self._write(self._columns + new, rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    def append(self, row: Mapping[str, float | int | str | None]) -> None:
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
            _, rows, _ = self._read()
            self._write(self._columns + new, rows)
        with self.path.open("ab") as file:
            file.write(_to_lines([[cells.get(name, "") for name in self._columns]]))

    def drop_after(self, frames: int) -> None:
        """Remove the rows with more than so many frames."""
        _, rows, _ = self._read()
        kept = [row for row in rows if int(row[0]) <= frames]
        if len(kept) < len(rows):
            self._write(self._columns, kept)

    def rows(self) -> list[dict[str, float]]:
        """The numbers in each row, by name of column. Empty cells and texts are left out."""
        columns, rows, _ = self._read()
        parsed = []
        for row in rows:
            numbers = {name: _to_number(cell) for name, cell in zip(columns, row, strict=True)}
            parsed.append({name: value for name, value in numbers.items() if value is not None})
        return parsed

    def _new_columns(self, names: Iterable[str]) -> list[str]:
        new = [name for name in dict.fromkeys(names) if name not in self._columns]
        for name in new:
            if not name or not name.isprintable():
                raise ValueError(f"the name of a column must be one line of text, got {name!r}.")
        return new

    def _read(self) -> tuple[list[str], list[list[str]], bool]:
        """The header, the complete rows, and whether that is all there is."""
        data = self.path.read_bytes()
        if not data:
            return [], [], False
        # What follows the last line break may be cut anywhere, also within a character.
        complete, line_break, rest = data.rpartition(b"\n")
        if not line_break:
            complete, rest = data, b""
        try:
            lines = list(csv.reader(complete.decode().split("\n"), strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise self._not_a_table(str(error)) from error
        header, *rows = lines
        if header[:1] != [_FRAMES]:
            raise self._not_a_table(f"its first column is not {_FRAMES!r}")
        if len(set(header)) < len(header):
            raise self._not_a_table("two columns have the same name")
        if not line_break:  # only a part of the header
            return [], [], False
        intact = not rest
        if rows and len(rows[-1]) < len(header):
            rows.pop()
            intact = False
        for number, row in enumerate(rows, start=2):
            if len(row) != len(header) or not row[0].isdecimal():
                raise self._not_a_table(f"line {number} does not fit the header")
        return header, rows, intact

    def _not_a_table(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} is not a table of a run: {reason}.")

    def _write(self, columns: list[str], rows: list[list[str]]) -> None:
        padded = [row + [""] * (len(columns) - len(row)) for row in rows]
        with replace_file(self.path) as file:
            file.write(_to_lines([columns, *padded]))
        self._columns = columns


def write_json(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write a JSON file in one step: there is the old file, or the complete new one.

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


@contextmanager
def replace_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the place of another when it is complete.

    If anything goes wrong before that, the old file stays as it is.

    Args:
        path (str or Path): the file to create or replace.

    Yields:
        the new file, which is open for bytes.

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
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")  # next to it: a move within one file system
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _to_lines(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _to_cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        if not value.isprintable():
            raise ValueError(f"{name} must be one line of text, got {value!r}.")
        return value
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))  # not repr(value), which for NumPy's is 'np.float64(0.5)'
    raise TypeError(f"{name} must be a number, a text or None, got {type(value).__name__}.")


def _to_number(cell: str) -> int | float | None:
    for number in (int, float):
        try:
            return number(cell)
        except ValueError:
            pass
    return None


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
