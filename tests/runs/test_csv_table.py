from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minerva_torchrl.runs.csv_table import CsvTable, TableError, read_table

TABLE = b"frames,loss\n10,0.5\n20,0.25\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.csv"


def only_file(path: Path) -> bool:
    return list(path.parent.iterdir()) == [path]


# Tables: rows and columns -------------------------------------------------------------------------


def test_columns_grow(path: Path) -> None:
    table = CsvTable(path)
    assert path.read_text() == "frames\n"
    table.append({"frames": 10, "loss": 0.5})
    table.append({"return": 3, "frames": 20})
    table.append({"frames": 30, 'a "b", c': 2, "loss": None})
    assert table.columns == ("frames", "loss", "return", 'a "b", c')
    assert path.read_text().splitlines() == [
        'frames,loss,return,"a ""b"", c"',
        "10,0.5,,",
        "20,,3,",
        "30,,,2",
    ]
    assert table.rows() == [
        {"frames": 10, "loss": 0.5},
        {"frames": 20, "return": 3},
        {"frames": 30, 'a "b", c': 2},
    ]
    assert only_file(path)


def test_frames_come_first(path: Path) -> None:
    assert CsvTable(path, ["loss", "frames", "kl", "loss"]).columns == ("frames", "loss", "kl")
    assert path.read_text() == "frames,loss,kl\n"


def test_each_row_is_on_disk_at_once(path: Path) -> None:
    table = CsvTable(path, ["loss"])
    for frames in range(3):
        table.append({"frames": frames, "loss": 0.0})
        assert path.read_text().count("\n") == 2 + frames


def test_known_columns_are_appended_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = CsvTable(path, ["loss", "kl"])
    table.append({"frames": 1, "loss": 0.5, "kl": 1.0})
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("wrote the file anew"))
    table.append({"frames": 2, "kl": 1.0})
    table.append({"frames": 3})
    assert [row["frames"] for row in table.rows()] == [1, 2, 3]


@settings(deadline=None)  # disks can be busy
@given(st.lists(st.floats(), max_size=5), st.integers())
def test_numbers_survive(numbers: list[float], integer: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = CsvTable(Path(folder) / "train.csv", ["integer"])
        for frames, number in enumerate(numbers):
            table.append({"frames": frames, "number": number, "integer": integer})
        rows = CsvTable(table.path).rows()
    assert [row["integer"] for row in rows] == [integer] * len(numbers)
    for row, number in zip(rows, numbers, strict=True):
        assert type(row["frames"]) is type(row["integer"]) is int
        assert isinstance(row["number"], float)
        assert row["number"].hex() == number.hex()  # also the signs of zeros; NaN is 'nan'


def test_numbers_of_numpy(path: Path) -> None:
    table = CsvTable(path)
    row = {"a": np.float64(0.1), "b": np.float32(0.1), "c": np.int64(3), "d": True}
    table.append({"frames": np.int64(5), **row})
    assert path.read_text().splitlines()[1] == "5,0.1,0.10000000149011612,3,1"


def test_special_numbers(path: Path) -> None:
    table = CsvTable(path)
    table.append({"frames": 1, "a": math.nan, "b": -math.inf})
    assert path.read_text().splitlines()[1] == "1,nan,-inf"


# Tables: continued --------------------------------------------------------------------------------


def test_existing_table_is_continued(path: Path) -> None:
    path.write_bytes(TABLE)
    table = CsvTable(path, ["kl"])
    assert table.columns == ("frames", "loss", "kl")
    table.append({"frames": 30, "kl": 1.5})
    assert path.read_text().splitlines() == ["frames,loss,kl", "10,0.5,", "20,0.25,", "30,,1.5"]


def test_opening_leaves_a_complete_table_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(TABLE)
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("wrote the file anew"))
    CsvTable(path)
    assert path.read_bytes() == TABLE


@pytest.mark.parametrize(
    "rest",
    [b"3", b"30,0.12", b"30,\xc3", b'30,"', b"30\n", b"\n"],
    ids=["frames", "no line break", "half a character", "half a text", "few cells", "no cells"],
)
def test_incomplete_last_line_is_dropped(path: Path, rest: bytes) -> None:
    path.write_bytes(TABLE + rest)
    table = CsvTable(path)
    assert path.read_bytes() == TABLE
    table.append({"frames": 30, "loss": 0.125})
    assert path.read_bytes() == TABLE + b"30,0.125\n"


@pytest.mark.parametrize("size", [0, 6, 9, 11])
def test_incomplete_header(path: Path, size: int) -> None:
    path.write_bytes(TABLE[:size])
    CsvTable(path, ["loss"])
    assert path.read_bytes() == b"frames,loss\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "it is not text"),
        (b"\x00\x01\x02", ""),
        (b"step,loss\n1,2\n", "its first column is not 'frames'"),
        (b"hello", "its first column is not 'frames'"),
        (b"\n", "its first column is not 'frames'"),
        (b"frames,a,a\n", "two columns have the same name"),
        (b"frames,a\n1\n2,3\n", "line 2 does not fit the header"),
        (b"frames,a\n1,2\n1,2,3\n", "line 3 does not fit the header"),
        (b"frames,a\nx,2\n", "line 2 does not fit the header"),
        (b"frames,a\n1000000000000000000000000000000,2\n", "line 2 does not fit the header"),
        ("frames,a\n\u0661,2\n".encode(), "line 2 does not fit the header"),
        (b"frames,a\n5,1\n5,2\n", "line 3 does not have more frames than the one before"),
        (b"frames,a\n1,2\n3,high\n", "a in line 3 is 'high', not a number"),
        (b"frames,a\n1,1_000\n", "a in line 2 is '1_000', not a number"),
    ],
)
def test_other_files_are_refused(path: Path, data: bytes, reason: str) -> None:
    path.write_bytes(data)
    message = f"{re.escape(str(path))} is not a table of a run: .*{reason}"
    with pytest.raises(TableError, match=message):
        CsvTable(path)
    assert path.read_bytes() == data


def test_drop_after(path: Path) -> None:
    path.write_bytes(TABLE)
    table = CsvTable(path)
    table.drop_after(20)
    assert path.read_bytes() == TABLE
    table.drop_after(19)
    assert table.rows() == [{"frames": 10, "loss": 0.5}]
    table.append({"frames": 15, "loss": 1.0})
    assert path.read_bytes() == b"frames,loss\n10,0.5\n15,1.0\n"
    table.drop_after(0)
    assert path.read_bytes() == b"frames,loss\n"
    assert only_file(path)


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda path: CsvTable(path).append({"frames": 30, "kl": 1.0}),
        lambda path: CsvTable(path).drop_after(10),
        lambda path: CsvTable(path, ["kl"]),
    ],
    ids=["append", "drop_after", "open"],
)
def test_interrupted_rewriting_leaves_the_old_table(
    path: Path, rewrite: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path.write_bytes(TABLE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rewrite(path)
    assert path.read_bytes() == TABLE
    assert only_file(path)
    rewrite(path)
    assert path.read_bytes() != TABLE


def test_table_is_usable_after_an_interrupted_growth(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    table = CsvTable(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            table.append({"frames": 10, "loss": 0.5})
    assert table.columns == ("frames",)
    table.append({"frames": 10, "loss": 0.5})
    assert path.read_bytes() == b"frames,loss\n10,0.5\n"


def test_what_a_kill_left_behind_is_no_obstacle(path: Path) -> None:
    path.write_bytes(TABLE)
    left = path.parent / ".tmp-0123456789abcdef.csv"
    left.write_bytes(b"frames,lo")
    CsvTable(path).append({"frames": 30, "kl": 1.0})
    assert path.read_text().splitlines()[0] == "frames,loss,kl"
    assert left.read_bytes() == b"frames,lo"  # the folder of a run removes it


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"loss": 1.0}, ValueError, "frames of a row must be .* got None"),
        ({"frames": 1.5}, ValueError, "frames of a row must be .* got 1.5"),
        ({"frames": -1}, ValueError, "frames of a row must be .* got -1"),
        ({"frames": 1, "loss": torch.ones(())}, TypeError, "loss must be .* got Tensor"),
        ({"frames": 1, "note": "a"}, TypeError, "note must be a number or None, got str"),
        ({"frames": 1, "a\nb": 1.0}, ValueError, "name of a column must be one line"),
        ({"frames": 1, "": 1.0}, ValueError, "name of a column must be one line"),
    ],
)
def test_bad_rows(path: Path, row: dict, error: type[Exception], message: str) -> None:
    path.write_bytes(TABLE)
    with pytest.raises(error, match=message):
        CsvTable(path).append(row)
    assert path.read_bytes() == TABLE


# Tables: reading ----------------------------------------------------------------------------------


def test_reading_changes_nothing(path: Path) -> None:
    path.write_bytes(TABLE + b"30,0.1")
    table = read_table(path)
    assert table.columns == ["frames", "loss"]
    assert table.rows == [["10", "0.5"], ["20", "0.25"]]
    assert not table.intact
    assert table.numbers() == [{"frames": 10, "loss": 0.5}, {"frames": 20, "loss": 0.25}]
    assert path.read_bytes() == TABLE + b"30,0.1"


def test_a_last_line_without_its_end_is_read_if_wanted(path: Path) -> None:
    path.write_bytes(TABLE + b"30,0.1")
    table = read_table(path, keep_last_line=True)
    assert table.intact
    assert table.numbers()[-1] == {"frames": 30, "loss": 0.1}
    path.write_bytes(TABLE)
    assert read_table(path, keep_last_line=True) == read_table(path)
