from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minerva_torchrl.runs.files import replace_file, replace_path, write_json


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "summary.json"


def only_file(path: Path) -> bool:
    return list(path.parent.iterdir()) == [path]


# JSON ---------------------------------------------------------------------------------------------


def test_json(path: Path) -> None:
    mapping = {"a": 1, "b": {"c": [1.5, None, True, "x"], "d": (np.float32(0.5), np.int64(2))}}
    write_json(path, mapping)
    text = path.read_text()
    assert text.startswith('{\n  "a": 1,\n  "b": {\n    "c"')
    assert text.endswith("}\n")
    assert json.loads(text) == {"a": 1, "b": {"c": [1.5, None, True, "x"], "d": [0.5, 2]}}
    assert only_file(path)


def test_json_has_null_for_what_is_not_finite(path: Path) -> None:
    write_json(path, {"a": math.nan, "b": [math.inf, {"c": -np.float64("inf")}]})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, {"c": None}]}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"a": {"b": [1, torch.ones(2)]}}, r"^a.b\[1\] cannot be .* of type Tensor"),
        ({"a": Path()}, r"^a cannot be written as JSON: it is of type \w*Path"),
        ({"a": {1: 2}}, "keys of JSON must be texts, got 1 in a"),
        ([1, 2], "mapping must be a mapping, got list"),
    ],
)
def test_json_refuses(path: Path, mapping: Any, message: str) -> None:
    write_json(path, {"old": 1})
    with pytest.raises(TypeError, match=message):
        write_json(path, mapping)
    assert json.loads(path.read_text()) == {"old": 1}
    assert only_file(path)


# Replacing files ----------------------------------------------------------------------------------


def test_old_file_stays_until_the_new_one_is_complete(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths)))
    path.write_text("old")
    with replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
        assert events == []
    assert path.read_text() == "new"
    assert events == ["fsync", "replace"]
    assert only_file(path)


def test_a_path_has_the_same_folder_and_ending(path: Path) -> None:
    with replace_path(path) as temporary:
        assert (temporary.parent, temporary.suffix) == (path.parent, path.suffix)
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert only_file(path)


def test_nothing_is_left_if_no_file_was_written(path: Path) -> None:
    with pytest.raises(FileNotFoundError), replace_path(path):
        pass
    assert not list(path.parent.iterdir())
