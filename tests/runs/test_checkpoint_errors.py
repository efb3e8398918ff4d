from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minerva_torchrl.runs.checkpoints import CheckpointError, CheckpointStore, open_checkpoint
from tests.runs.checkpoint_problem import (
    check_numbered,
    numbered,
)

# Checkpoints that can't be read ------------------------------------------------------------------


def edit_manifest(path: Path, **changes: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def part_entry(path: Path, part: str) -> dict[str, Any]:
    content = (path / f"{part}.pt").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    return {"file": f"{part}.pt", "bytes": len(content), "sha256": sha256}


def change_byte(path: Path) -> None:
    content = bytearray((path / "second.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "second.pt").write_bytes(content)


def rename_part(part: str, file: str) -> Callable[[Path], None]:
    def rename(path: Path) -> None:
        (path.parent / "outside.pt").write_bytes((path / "first.pt").read_bytes())
        edit_manifest(path, parts={part: {**part_entry(path, "first"), "file": file}})

    return rename


ODD = "/manifest.json: is not what a minerva_torchrl checkpoint has: "
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), ": has no manifest.json, so"),
    "not JSON": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff{"),
        "/manifest.json: is not JSON",
    ),
    "deep JSON": (
        lambda path: (path / "manifest.json").write_text("[" * 100_000),
        "/manifest.json: is not JSON",
    ),
    "not an object": (
        lambda path: (path / "manifest.json").write_text("[]"),
        "/manifest.json: is not the manifest of a minerva_torchrl checkpoint",
    ),
    "foreign": (
        lambda path: edit_manifest(path, format="webpack"),
        "/manifest.json: is not the manifest of a minerva_torchrl checkpoint",
    ),
    "newer": (
        lambda path: edit_manifest(path, version=2, parts=None),
        "/manifest.json: has version 2, newer than version 1",
    ),
    "odd version": (
        lambda path: edit_manifest(path, version="1"),
        ODD,
    ),
    "odd frames": (
        lambda path: edit_manifest(path, frames=True),
        ODD,
    ),
    "odd metadata": (
        lambda path: edit_manifest(path, metadata=1),
        ODD,
    ),
    "odd parts": (
        lambda path: edit_manifest(path, parts=[]),
        ODD,
    ),
    "odd part": (
        lambda path: edit_manifest(path, parts={"first": {"file": "first.pt"}}),
        ODD,
    ),
    "no part": (lambda path: (path / "second.pt").unlink(), "/second.pt: is missing"),
    "truncated": (
        lambda path: os.truncate(path / "second.pt", 700),
        "/second.pt: has 700 bytes instead of",
    ),
    "corrupt": (change_byte, "/second.pt: is corrupt"),
    "outside": (rename_part("../outside", "../outside.pt"), "has: the part '../outside' is not"),
    "file outside": (rename_part("first", "../outside.pt"), "the part 'first' is not allowed"),
}


def assert_one_line(error: pytest.ExceptionInfo[CheckpointError], path: Path, text: str) -> None:
    message = str(error.value)
    assert message.startswith(str(path))
    assert text in message
    assert "\n" not in message
    assert error.value.__cause__ is None
    assert error.value.__context__ is None or error.value.__suppress_context__


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_checkpoints(
    store: CheckpointStore, damage: Callable[[Path], object], message: str
) -> None:
    path = store.save(numbered(1), frames=1)
    assert check_numbered(store) == 1
    damage(path)
    for given_path in (path, store.folder / "last", store.folder, store.folder.parent):
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(given_path)
        assert_one_line(error, path, message)


def test_ways_to_name_a_checkpoint(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.save({}, frames=1)
    run_folder = store.folder.parent
    for given_path in (path, store.folder / "last", store.folder, run_folder, str(run_folder)):
        assert open_checkpoint(given_path).path == path
    monkeypatch.chdir(run_folder)
    assert open_checkpoint("checkpoints/last").path == path


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    for name, message in [
        ("nowhere", ": there is no such folder"),
        ("empty", ": there is no checkpoint in it"),
        ("file", ": is a file, but a checkpoint is a folder"),
        ("link", ": is a link to gone, which does not exist"),
    ]:
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path / name)
        assert_one_line(error, tmp_path / name, message)


def test_last_without_its_target(store: CheckpointStore) -> None:
    shutil.rmtree(store.save({}, frames=1))
    link = store.folder / "last"
    for path in (link, store.folder, store.folder.parent):
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert_one_line(error, link, ": is a link to frames-000000001, which does not exist")


def test_unreadable_files(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.save({"part": 1}, frames=1)

    def fail(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert_one_line(error, path, ": can't be read (Permission denied)")


def test_unknown_part(store: CheckpointStore) -> None:
    checkpoint = open_checkpoint(store.save({"a": 1, "b": 2}, frames=1))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load("../a")
    assert_one_line(error, checkpoint.path, "has no part '../a', only a, b.")


def test_part_lost_after_it_was_verified(store: CheckpointStore) -> None:
    checkpoint = open_checkpoint(store.save({"a": 1}, frames=1))
    shutil.rmtree(checkpoint.path)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load("a")
    assert_one_line(error, checkpoint.path, "can't be loaded (FileNotFoundError: ")


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("as_archive", [True, False])
def test_code_is_not_run(store: CheckpointStore, tmp_path: Path, as_archive: bool) -> None:
    path = store.save({"part": 1}, frames=1)
    trace, file = tmp_path / "trace", path / "part.pt"
    if as_archive:
        torch.save({"weights": [Payload(trace)]}, file)
    else:
        file.write_bytes(pickle.dumps(Payload(trace), protocol=2))
    edit_manifest(path, parts={"part": part_entry(path, "part")})
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load("part")
    assert_one_line(error, file, "refused, because it is not a file of tensors and plain values")
    assert not trace.exists()
    if as_archive:  # it would have run
        torch.load(file, weights_only=False)
        assert trace.exists()


def test_garbage_with_the_right_hash(store: CheckpointStore) -> None:
    path = store.save({"part": 1}, frames=1)
    for content in (b"", b"garbage", (path / "part.pt").read_bytes()[:-20]):
        (path / "part.pt").write_bytes(content)
        edit_manifest(path, parts={"part": part_entry(path, "part")})
        checkpoint = open_checkpoint(path)
        with pytest.raises(CheckpointError) as error:
            checkpoint.load("part")
        assert_one_line(error, path / "part.pt", ": ")
