from __future__ import annotations

import os
from pathlib import Path

import pytest

from minerva_torchrl.runs.atomic import replace_file, replace_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notes.txt"


def only_file(path: Path) -> bool:
    return list(path.parent.iterdir()) == [path]


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
    assert events == ["fsync", "replace", "fsync"]  # the file, then the folder
    assert only_file(path)


def test_a_path_has_the_same_folder_and_ending(path: Path) -> None:
    with replace_path(path) as temporary:
        assert (temporary.parent, temporary.suffix) == (path.parent, path.suffix)
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert only_file(path)


def test_nothing_is_left_if_no_file_was_written(path: Path) -> None:
    with pytest.raises(OSError, match="nothing was written"), replace_path(path):
        pass
    assert not list(path.parent.iterdir())
