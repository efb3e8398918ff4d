"""Folders that somebody else has prepared, or that a bad day has left."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minerva_torchrl.runs import (
    Callback,
    CheckpointError,
    CheckpointStore,
    ConfigError,
    load_config,
    open_checkpoint,
    parse_config,
)
from minerva_torchrl.runs.atomic import open_file, read_file, replace_file
from minerva_torchrl.runs.csv_table import CsvTable
from minerva_torchrl.runs.folder import RunFolder, check_folder
from minerva_torchrl.runs.run import resume_run
from minerva_torchrl.runs.settings import default_run_dir
from minerva_torchrl.runs.start import first_line, quiet_interrupts
from minerva_torchrl.runs.structure import check_like, check_optimizer, check_rows
from tests.runs.tiny import (
    Killed,
    after_records,
    assert_same_runs,
    before_records,
    content,
    fix_hash,
    make_resumed,
    make_run,
    read_csv,
    resume,
    tiny_config,
    train,
    train_and_kill,
)

# Files -------------------------------------------------------------------------------------------


def link(path: Path) -> None:
    (path.parent / "important").write_text("important")
    path.symlink_to("important")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


KINDS = {link: "a link", pipe: "a named pipe", folder: "a folder"}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("mode", ["rb", "ab", "r+b"])
def test_only_files_are_opened(make: Callable[[Path], None], mode: str, tmp_path: Path) -> None:
    make(tmp_path / "eval.csv")
    before = content(tmp_path) if make is not pipe else None
    with pytest.raises(OSError, match=f"it is {KINDS[make]}, and must be a file"):
        open_file(tmp_path / "eval.csv", mode)
    assert before is None or content(tmp_path) == before


def test_a_hard_link_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "important").write_text("frames,a\n1,2\n")
    os.link(tmp_path / "important", tmp_path / "eval.csv")
    with pytest.raises(OSError, match="another name elsewhere"):
        open_file(tmp_path / "eval.csv", "ab")
    CsvTable(tmp_path / "eval.csv").append({"frames": 2, "a": 3.0})
    assert (tmp_path / "important").read_text() == "frames,a\n1,2\n"
    assert (tmp_path / "eval.csv").read_text() == "frames,a\n1,2\n2,3.0\n"


def test_large_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_file(tmp_path / "x", limit=5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and more than 4 are not read"):
        read_file(tmp_path / "x", limit=4)


def test_temporary_names_can_not_be_foreseen(tmp_path: Path) -> None:
    seen = set()
    for _ in range(2):
        with replace_file(tmp_path / "curve.png") as file:
            file.write(b"x")
            seen |= {path.name for path in tmp_path.iterdir()} - {"curve.png"}
    assert len(seen) == 2
    assert all(name.startswith(".tmp-") and len(name) > 20 for name in seen)


def test_half_a_row_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = CsvTable(tmp_path / "eval.csv", ["a"])
    table.append({"frames": 1, "a": 0.5})
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))  # a full disk
    with pytest.raises(OSError, match="No space left"):
        table.append({"frames": 2, "a": 0.25})
    monkeypatch.undo()
    table.append({"frames": 3, "a": 0.125})
    assert (tmp_path / "eval.csv").read_text() == "frames,a\n1,0.5\n3,0.125\n"


FILES = [".lock", "config.yaml", "eval.csv", "metrics.csv", "curve.png", "summary.json"]


@pytest.mark.parametrize("name", [*FILES, "checkpoints", "videos"])
@pytest.mark.parametrize("make", [link, pipe])
def test_a_run_does_not_use_them(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / name)
    message = f"run/{name} can't be used: it is {KINDS[make]}, and must be"
    with pytest.raises(CheckpointError, match=message):
        check_folder(tmp_path / "run", new=False)


# Settings ----------------------------------------------------------------------------------------

BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "has an anchor or an alias in line 1"),
        ("algo: " + "[" * 100_000, "is nested too deeply in line 1"),
        ("algo: !!python/object/apply:os.system [true]", "has a tag in line 1"),
        ("5", "is not the configuration"),
        ("", "is not the configuration"),
    ],
)
def test_settings_that_take_long_or_are_none(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", KINDS)
def test_settings_that_are_no_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "config.yaml")
    with pytest.raises(CheckpointError, match=f"can't be read: it is {KINDS[make]}"):
        load_config(tmp_path)


# Checkpoints -------------------------------------------------------------------------------------


def edit(store: CheckpointStore, **changes: Any) -> None:
    file = store.folder / "last" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": True}, "version is 'True'"),
        ({"frames": -5}, "frames is '-5'"),
        ({"frames": 10**30}, "frames is '1000"),
        ({"frames": 1e30}, "frames is '1e\\+30'"),
        ({"surplus": 1}, "there is an unknown 'surplus'"),
        ({"versions": {"torch": 2}}, "versions is"),
        ({"parts": {"a": None}}, "parts is"),
        ({"parts": {"a": {"file": "a.pt", "bytes": -1, "sha256": "0" * 64}}}, "bytes is '-1'"),
        ({"parts": {"a": {"file": "a.pt", "bytes": 1, "sha256": "x"}}}, "sha256 is 'x'"),
        ({"metadata": {"score": float("nan")}}, "is not JSON"),
    ],
)
def test_odd_manifests(store: CheckpointStore, changes: dict[str, Any], problem: str) -> None:
    store.save({"a": 1}, frames=1)
    edit(store, **changes)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(store.folder)


def test_links_that_lead_elsewhere(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other")
    other.save({"a": 1}, frames=7)
    store.save({"a": 1}, frames=1)
    (store.folder / "last").unlink()
    (store.folder / "last").symlink_to(other.folder / "frames-000000007")
    for path in (store.folder, store.folder / "last", store.folder.parent):
        with pytest.raises(CheckpointError, match="which is not beside it"):
            open_checkpoint(path)


def test_the_newest_one_if_the_link_is_lost(store: CheckpointStore) -> None:
    store.keep = 2
    for frames in (1, 2):
        store.save({"a": frames}, frames=frames)
    (store.folder / "last").unlink()
    assert open_checkpoint(store.folder.parent).frames == 2


def test_compressed_archives_are_refused(store: CheckpointStore) -> None:
    path = store.save({"a": torch.zeros(10_000)}, frames=1)
    with zipfile.ZipFile(path / "a.pt") as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    fix_hash(path, "a")
    with pytest.raises(CheckpointError, match="is not a file of tensors"):
        open_checkpoint(path).load("a")


def test_lists_in_lists_are_refused(store: CheckpointStore) -> None:
    value: Any = "ha"
    for _ in range(40):
        value = [value, value]
    path = store.save({"a": 1}, frames=1)
    torch.save({"hooks": value}, path / "a.pt")
    fix_hash(path, "a")
    with pytest.raises(CheckpointError, match="is not a file of tensors"):
        open_checkpoint(path).load("a")


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ({"w": torch.zeros(3), "n": 1, "x": 0.5}, None),
        ({"w": torch.zeros(3), "n": 1}, "state has no 'x'"),
        ({"w": torch.zeros(3), "n": 1, "x": 0.5, "y": 1}, "state has an unknown 'y'"),
        ({"w": torch.zeros(4), "n": 1, "x": 0.5}, r"state.w is a tensor of float32 \[4\]"),
        ({"w": torch.zeros(1).expand(3), "n": 1, "x": 0.5}, "state.w is a tensor"),
        ({"w": torch.zeros(3).double(), "n": 1, "x": 0.5}, "state.w is a tensor of float64"),
        ({"w": [0.0], "n": 1, "x": 0.5}, "state.w is a list"),
        ({"w": torch.zeros(3), "n": True, "x": 0.5}, "state.n is True"),
        ({"w": torch.zeros(3), "n": -1, "x": 0.5}, "state.n is -1"),
        ({"w": torch.zeros(3), "n": 1, "x": float("nan")}, "state.x is nan"),
        ("state", "state is 'state'"),
    ],
)
def test_structure(saved: Any, problem: str | None) -> None:
    template = {"w": torch.zeros(3), "n": 0, "x": 0.0}
    if problem is None:
        check_like(saved, template, "state")
    else:
        with pytest.raises(ValueError, match=problem):
            check_like(saved, template, "state")


def test_structure_of_optimisers_and_rows() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.Adam([parameter])
    check_optimizer({}, adam, "o")
    parameter.sum().backward()
    adam.step()
    state = adam.state_dict()["state"]
    check_optimizer(state, adam, "o")
    for wrong in ({5: state[0]}, {0: {}}, {0: {**state[0], "exp_avg": torch.zeros(3)}}, {0: 1}, 7):
        with pytest.raises(ValueError, match="o"):
            check_optimizer(wrong, adam, "o")
    check_rows({"a": {"b": torch.zeros(3, 2)}}, "r", rows=3, names=("a.b",))
    for rows, names in ((2, ()), (3, ("a.c",))):
        with pytest.raises(ValueError, match="r"):
            check_rows({"a": {"b": torch.zeros(3, 2)}}, "r", rows=rows, names=names)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "run"
    train_and_kill(folder, "mpo", at=140)
    return folder


@pytest.mark.parametrize(
    ("part", "keys", "value"),
    [
        ("training", ("frames",), 99),
        ("training", ("hooks", "optimization_stepper", "optimizer_actor", "state", 0), None),
        ("training", ("hooks", "finite_batches", "skipped_batches"), -1),
        ("environment", ("carrier", "entries", "observation"), torch.zeros(7)),
        ("environment", ("iterations",), "x"),
        ("replay", ("data", "batch_size"), [10**9]),
        ("replay", ("writer", "_cursor"), -3),
    ],
)
def test_mutated_parts_are_refused(
    part: str, keys: tuple[Any, ...], value: Any, original: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(original, tmp_path / "run", symlinks=True)
    last = (run_dir / "checkpoints" / "last").resolve()
    data = section = torch.load(last / f"{part}.pt", weights_only=True)
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    torch.save(data, last / f"{part}.pt")
    fix_hash(last, part)
    before = content(run_dir)
    with pytest.raises(CheckpointError, match="does not fit the run") as caught:
        resume(run_dir)
    assert "\n" not in str(caught.value)
    assert content(run_dir) == before


# What a bad day leaves ---------------------------------------------------------------------------


def metrics(folder: Path) -> list[dict[str, str]]:
    """Rows without what depends on the clock."""
    rows = read_csv(folder / "metrics.csv")
    for row in rows:
        del row["frames_per_second"], row["updates_per_second"]
    return rows


@pytest.mark.parametrize("kind", ["mpo", "ppo"])
def test_metrics_are_the_same_after_a_kill_and_a_signal(kind: str, tmp_path: Path) -> None:
    changes = {"checkpoint__interval": 50, "logger__interval": 100, "total_frames": 300}
    whole = train(tmp_path / "whole", kind, **changes).run_dir
    run = make_run(tiny_config(kind, **changes), tmp_path / "run")
    after_records(run, lambda: signal.raise_signal(signal.SIGTERM) if run.frames == 100 else None)
    run.train()
    assert run.frames in (120, 150)
    assert len(metrics(run.run_dir)) == 1  # none for the signal

    second = make_resumed(run.run_dir)

    def kill() -> None:
        if second.frames >= 260:
            raise Killed

    before_records(second, kill)
    with pytest.raises(Killed):
        second.train()
    resume(run.run_dir)
    assert metrics(run.run_dir) == metrics(whole)
    assert_same_runs(run.run_dir, whole)


def test_killed_between_an_evaluation_and_its_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CheckpointStore.save

    def killed(self: CheckpointStore, *args: Any, **kwargs: Any) -> Path:
        if kwargs["name"] == "best":
            raise Killed
        return save(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "save", killed)
    with pytest.raises(Killed):
        train(tmp_path / "run", "vmpo", total_frames=50)
    assert len(read_csv(tmp_path / "run" / "eval.csv")) == 1
    monkeypatch.undo()
    resume(tmp_path / "run")
    assert_same_runs(tmp_path / "run", train(tmp_path / "whole", "vmpo", total_frames=50).run_dir)


def test_killed_between_its_end_and_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> None:
        (tmp_path / "run" / ".tmp-0123456789abcdef.json").write_text("{")
        raise Killed

    monkeypatch.setattr(RunFolder, "write_summary", killed)
    with pytest.raises(Killed):
        train(tmp_path / "run", "vmpo", total_frames=50)
    monkeypatch.undo()
    summary = resume_run(tmp_path / "run", stream=io.StringIO()).train()
    assert summary["frames"] == 50
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert not list((tmp_path / "run").glob(".tmp-*"))
    assert resume_run(tmp_path / "run", stream=io.StringIO()).train() == {}
    assert len(read_csv(tmp_path / "run" / "eval.csv")) == 2


def test_a_folder_without_settings_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1\n")
    (tmp_path / ".tmp-0123456789abcdef.yaml").write_text("algo: vm")
    with pytest.raises(CheckpointError, match=f"start it again with run_dir={tmp_path}"):
        resume_run(tmp_path)
    run = train(tmp_path, "vmpo", total_frames=50)
    assert not list(tmp_path.glob(".tmp-*"))
    assert open_checkpoint(run.run_dir).frames == 50


class Stop(Callback):
    def on_start(self, run: Any) -> None:
        raise Killed


def test_a_folder_with_settings_alone_can_be_resumed(tmp_path: Path) -> None:
    run = make_run(tiny_config("vmpo", total_frames=50), tmp_path)
    run.callbacks = (Stop(),)
    with pytest.raises(Killed):
        run.train()
    assert (tmp_path / "config.yaml").exists()
    assert not (tmp_path / "checkpoints").exists()
    resume_run(tmp_path, stream=io.StringIO()).train()
    assert open_checkpoint(tmp_path).frames == 50


def test_a_full_disk_stops_a_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(CheckpointStore, "save", fail)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written \(No space left"):
        train(tmp_path / "run", "vmpo")
    monkeypatch.setattr("minerva_torchrl.runs.folder.replace_file", fail)
    with pytest.raises(CheckpointError, match="can't be used: No space left on device"):
        train(tmp_path / "other", "vmpo")


def test_other_versions_are_noted(original: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(original, tmp_path / "run", symlinks=True)
    file = run_dir / "checkpoints" / "last" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(manifest))
    stream = io.StringIO()
    resume(run_dir, stream, total_frames=200)
    assert "note: the checkpoint was made with torch 1.0 (now " in stream.getvalue()


# On the screen -----------------------------------------------------------------------------------


def test_the_first_line() -> None:
    config = parse_config("ppo", {"env": {"name": "gym:Pendulum-v1\x1b[2J"}, "seed": 3})
    line = "ppo gym:Pendulum-v1?[2J, seed 3, device auto: runs/x"
    assert first_line(config, "runs/x") == line
    assert first_line(config, "runs/x", resumed=True).endswith(": going on in runs/x")


def test_interrupts_leave_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, quiet_interrupts():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err == "\nStopped.\n"


def test_names_of_folders_have_no_colon() -> None:
    for name in ("gym:Pendulum-v1", "gym:my_module:Task-v0", "gym:phys2d/CartPole-v1"):
        config = parse_config("ppo", {"env": {"name": name}})
        assert ":" not in str(default_run_dir(config))


def test_a_folder_in_use_names_the_process(tmp_path: Path) -> None:
    run = make_run(tiny_config("vmpo", total_frames=50), tmp_path)
    seen: list[str] = []

    def attempt() -> None:
        with pytest.raises(ConfigError) as caught:
            resume_run(tmp_path, {"total_frames": 100})
        seen.append(str(caught.value))

    after_records(run, attempt)
    run.train()
    assert seen == [f"run_dir {tmp_path} is in use by process {os.getpid()}."]
