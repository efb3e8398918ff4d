from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

from minerva_torchrl.runs import checkpoints
from minerva_torchrl.runs.checkpoints import CheckpointError, CheckpointStore, open_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def names(store: CheckpointStore) -> list[str]:
    """Everything in the folder of a store but its links."""
    return sorted(path.name for path in store.folder.iterdir() if not path.is_symlink())


def assert_same(actual: Any, expected: Any) -> None:
    """The same types and the same bits."""
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (actual, expected)]
        assert torch.equal(*bits)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert struct.pack("d", actual) == struct.pack("d", expected)
    else:
        assert actual == expected


def through_disk(store: CheckpointStore, value: Any) -> Any:
    return open_checkpoint(store.save({"part": value}, frames=1)).load("part")


def numbered(frames: int, size: int = 10) -> dict[str, Any]:
    """Parts that tell which frames they belong to."""
    return {
        "first": torch.full((size,), frames),
        "second": {"frames": frames, "tensor": torch.full((size,), frames)},
    }


def check_numbered(store: CheckpointStore, name: str = "last") -> int:
    """The frames of a checkpoint, which must be consistent."""
    checkpoint = open_checkpoint(store.folder / name)
    first, second = checkpoint.load("first"), checkpoint.load("second")
    assert checkpoint.frames == second["frames"]
    assert (first == checkpoint.frames).all()
    assert (second["tensor"] == checkpoint.frames).all()
    return checkpoint.frames


# Round trips -------------------------------------------------------------------------------------


VALUES = {
    "int64": torch.tensor([-(2**63), 2**63 - 1, 0]),
    "bool": torch.tensor([[True], [False]]),
    "bfloat16": torch.randn(3, 2).bfloat16(),
    "special": torch.tensor([math.nan, math.inf, -0.0, 1e-45]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3, dtype=torch.uint8),
    "complex": torch.randn(3, dtype=torch.complex64),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "expanded": torch.ones(1).expand(4),
    "numbers": [0, -1, 255, 2**31, -(2**31) - 1, 2**128 + 1, -(2**2000), 0.1, -0.0, math.nan, 1j],
    "plain": (None, True, "naïve\0", torch.Size([2, 3]), torch.float32, torch.device("cpu")),
    "nested": {"a": [({"b": {2: [torch.ones(2)]}},), [], (), {}], -3: "c"},
    "repeated": [f"{index}" for index in range(1000)] * 2,
    "python_rng": random.getstate(),
    "torch_rng": torch.get_rng_state(),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_round_trip(store: CheckpointStore, value: Any) -> None:
    assert_same(through_disk(store, value), value)


def tensors() -> st.SearchStrategy[Tensor]:
    dtypes = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]
    shapes = st.lists(st.integers(0, 3), max_size=3)
    seeds = st.integers(0, 99).map(torch.Generator().manual_seed)
    return st.builds(
        lambda shape, dtype, rng: torch.randint(0, 256, shape, generator=rng).to(dtype),
        shapes,
        st.sampled_from(dtypes),
        seeds,
    )


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**300), 2**300), st.floats(), st.text(), tensors()
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=4),
    ),
)


@settings(max_examples=30, deadline=None)
@given(value=NESTED)
def test_round_trip_of_anything_nested(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_same(through_disk(CheckpointStore(folder), value), value)


def test_training_state(store: CheckpointStore) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "data": TensorDict({"a": {"b": torch.ones(4)}}, [4]).state_dict(),
    }
    loaded = through_disk(store, state)
    assert_same(loaded, state)
    assert vars(loaded["model"]) == vars(state["model"])
    assert loaded["model"]._metadata["1"] == {"version": 2}
    assert vars(loaded["data"]) == vars(state["data"])


def test_tensors_lose_what_is_not_data(store: CheckpointStore) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.note = object()
    loaded = through_disk(store, [weight, weight * 2])
    assert_same(loaded, [torch.ones(2), torch.full((2,), 2.0)])
    assert not loaded[0].requires_grad
    assert not loaded[1].requires_grad


def test_metadata_and_frames(store: CheckpointStore) -> None:
    metadata = {"score": 1.5, "names": ["ä", None], "nested": {"bad": math.inf}}
    store.save({}, frames=0, metadata=metadata)
    path = store.save({"a": 1, "b": 2}, frames=1_234_567_890, metadata=metadata)
    assert path == store.folder / "frames-1234567890"
    checkpoint = open_checkpoint(path)
    assert (checkpoint.path, checkpoint.frames) == (path, 1_234_567_890)
    assert (checkpoint.metadata, checkpoint.parts) == (metadata, ("a", "b"))


def test_what_is_on_disk(store: CheckpointStore) -> None:
    path = store.save({"net": torch.ones(3)}, frames=20_000, metadata={"a": 1})
    assert names(store) == ["frames-000020000"]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "net.pt"]
    content = (path / "net.pt").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert json.loads((path / "manifest.json").read_text()) == {
        "format": "minerva_torchrl checkpoint",
        "version": 1,
        "frames": 20_000,
        "metadata": {"a": 1},
        "parts": {"net": {"file": "net.pt", "bytes": len(content), "sha256": sha256}},
    }
    assert os.readlink(store.folder / "last") == "frames-000020000"


def test_views_are_saved_without_the_rest(store: CheckpointStore) -> None:
    big = torch.arange(1_000_000)
    value = {"slice": big[10:20], "columns": big.view(1000, 1000)[:5, ::100]}
    path = store.save({"part": value}, frames=1)
    assert (path / "part.pt").stat().st_size < 5_000
    assert_same(open_checkpoint(path).load("part"), value)


def test_long_tuples_are_quick(store: CheckpointStore) -> None:
    start = time.perf_counter()
    through_disk(store, [random.getstate()] * 200)
    assert time.perf_counter() - start < 5


# Values that are refused -------------------------------------------------------------------------


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"optimizer": [0, 1, np.ones(2)]},
            "state.optimizer[2]: numpy.ndarray can't be loaded safely; use a tensor.",
        ),
        (({"a.b": np.float64(1)},), "state[0]['a.b']: numpy.float64 can't"),
        ({3: {1, 2}}, "state[3]: set can't be loaded safely; use tensors"),
        (b"abc", "state: bytes can't be loaded safely; use a tensor"),
        (Pair(1, 2), f"state: {__name__}.Pair can't"),
        (nn.Linear(1, 1), "state: torch.nn.modules.linear.Linear can't"),
        (len, "state: builtin_function_or_method can't"),
        ([2**2039], "state[0]: int can't be loaded safely; it has more than 2039 bits"),
        ({"a": {(1, 2): 3}}, "state.a: keys must be str or int, got (1, 2)"),
        ({"a": {True: 3}}, "state.a: keys must be str or int, got True"),
        (torch.ones(2).to_sparse(), "state: torch.Tensor can't be loaded safely; use a dense"),
        (torch.ones(2, device="meta"), "state: torch.Tensor can't be loaded safely; use a dense"),
        (torch.ones(2).as_subclass(type("Own", (Tensor,), {})), "Own can't be loaded safely"),
    ],
)
def test_unsafe_values(store: CheckpointStore, value: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        store.save({"fine": 1, "state": value}, frames=1)
    assert message in str(error.value)
    assert not store.folder.exists()


def test_unsafe_attributes(store: CheckpointStore) -> None:
    state = OrderedDict(a=1)
    state.note = [np.ones(1)]
    with pytest.raises(TypeError, match=r"state\.note\[0\]: numpy.ndarray can't"):
        store.save({"state": state}, frames=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"frames": -1}, ValueError, "frames must be an integer of at least 0, got -1"),
        ({"frames": 1.0}, ValueError, "frames must be an integer"),
        ({"frames": False}, ValueError, "frames must be an integer"),
        ({"name": "first"}, ValueError, "name must be one of 'last', 'best', got 'first'"),
        ({"parts": {"../a": 1}}, ValueError, r"letters, digits, .* got '\.\./a'"),
        ({"parts": {"": 1}}, ValueError, "letters, digits"),
        ({"metadata": {"a": object()}}, TypeError, "not JSON serializable"),
    ],
)
def test_bad_arguments(
    store: CheckpointStore, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        store.save(**{"parts": {}, "frames": 1, **arguments})
    assert not store.folder.exists()


def test_bad_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        CheckpointStore(tmp_path, keep=0)


# Links and rotation ------------------------------------------------------------------------------


def test_rotation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for frames in (8, 9, 10, 11, 1_000_000_000):
        store.save(numbered(frames), frames=frames)
        assert check_numbered(store) == frames
    assert names(store) == ["frames-000000010", "frames-000000011", "frames-1000000000"]


def test_last_and_best_leave_each_other_alone(store: CheckpointStore) -> None:
    for frames in range(1, 6):
        store.save(numbered(frames), frames=frames)
        if frames in (2, 3):
            store.save(numbered(frames), frames=frames, name="best")
    assert names(store) == ["best-000000003", "frames-000000005"]
    assert (check_numbered(store, "last"), check_numbered(store, "best")) == (5, 3)
    assert store.find("best") == store.folder / "best-000000003"
    store.save(numbered(9), frames=9, name="best")
    assert names(store) == ["best-000000009", "frames-000000005"]


def test_what_is_linked_to_stays(store: CheckpointStore) -> None:
    """Back to earlier frames: the newest by frames is not the last any more."""
    for frames in (50, 30, 40):
        store.save(numbered(frames), frames=frames)
        assert check_numbered(store) == frames
    assert names(store) == ["frames-000000040", "frames-000000050"]


def test_same_frames(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for number in range(12):
        before = store.find()
        path = store.save({"number": number}, frames=7)
        assert path != before
        assert open_checkpoint(store.folder).load("number") == number
    assert names(store) == ["frames-000000007.10", "frames-000000007.11"]


def test_find(store: CheckpointStore) -> None:
    assert store.find() is None
    path = store.save({}, frames=1)
    assert (store.find(), store.find("best")) == (path, None)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="last: is a link to frames-000000001, which does"):
        store.find()
    with pytest.raises(ValueError, match="name must be one of"):
        store.find("first")


def test_clean(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.clean()
    for frames in (1, 2, 3):
        store.save(numbered(frames), frames=frames)
    store.save(numbered(3), frames=3, name="best")
    for left_over in ("frames-000000004", "frames-000000003.1", "best-000000004", ".tmp-1"):
        shutil.copytree(tmp_path / "frames-000000003", tmp_path / left_over)
    (tmp_path / ".tmp-2").symlink_to("frames-000000004")
    (tmp_path / "frames-000000002" / "manifest.json").unlink()
    (tmp_path / "frames-notes").mkdir()
    store.clean()
    assert names(store) == ["best-000000003", "frames-000000003", "frames-notes"]
    assert (check_numbered(store, "last"), check_numbered(store, "best")) == (3, 3)


def test_clean_without_links_keeps_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for frames in (1, 2):
        store.save(numbered(frames), frames=frames)
        store.save(numbered(frames), frames=frames, name="best")
    (tmp_path / "last").unlink()
    (tmp_path / "best").unlink()
    CheckpointStore(tmp_path).clean()
    assert names(store) == ["best-000000002", "frames-000000001", "frames-000000002"]


def test_copy_without_links(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "one", keep=3)
    store.save(numbered(1), frames=1)
    copy = CheckpointStore(shutil.copytree(store.folder, tmp_path / "two"), keep=3)
    assert not (copy.folder / "last").is_symlink()
    assert check_numbered(copy) == 1
    copy.save(numbered(2), frames=2)
    assert check_numbered(copy) == 2
    assert names(copy) == ["frames-000000001", "frames-000000001.1", "frames-000000002"]


# Kills, errors and full disks --------------------------------------------------------------------


def test_all_is_on_disk_before_it_is_in_use(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    flushed_before: dict[str, set[int]] = {}
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record_fsync(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        flushed_before["rename"] = set(flushed)
        rename(source, target)

    def record_replace(source: Path, target: Path) -> None:
        flushed_before["replace"] = set(flushed)
        replace(source, target)
        flushed.clear()

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    path = store.save(numbered(1), frames=1)
    inodes = {file.stat().st_ino for file in (path, *path.iterdir())}
    assert len(inodes) == 4
    assert flushed_before["rename"] == inodes
    assert flushed_before["replace"] == {*inodes, store.folder.stat().st_ino}
    assert flushed == [store.folder.stat().st_ino]


def run(function: Callable[[str], None], folder: Path) -> None:
    """Call a function of this file in a process of its own."""
    code = f"from {__name__} import *; {function.__name__}({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def fork(function: Callable[..., object], *arguments: object) -> int:
    """Call a function in a copy of this process, which exits with what it returns."""
    process = os.fork()
    if process == 0:
        code: object = 99
        try:
            code = function(*arguments)
        finally:
            os._exit(code if isinstance(code, int) else 98)
    return process


def save_for_ever(store: CheckpointStore, frames: int) -> None:
    while True:
        frames += 1
        store.save(numbered(frames, size=400_000), frames=frames)


def kill_at_random(folder: str) -> None:
    rng = random.Random(0)
    store = CheckpointStore(folder)
    store.save(numbered(0), frames=0)
    frames = 0
    deadline = time.monotonic() + 4
    for trial in range(1000):
        process = fork(save_for_ever, store, frames)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(process, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
        before, frames = frames, check_numbered(store)
        assert frames >= before
        if trial % 2:
            store.clean()
            assert names(store) == [store.find().name]
            assert check_numbered(store) == frames
        if trial >= 10 and time.monotonic() > deadline:
            break
    assert frames > 0


def test_kill_at_random_moments(tmp_path: Path) -> None:
    run(kill_at_random, tmp_path)


KILLED, RAISED, SWALLOWED, NEVER_REACHED = range(4)


def save_and_fail(store: CheckpointStore, number: int, failure: str) -> int:
    """Fail just before a file operation of a save, the first one being number 1."""
    step = 0

    def hook(event: str, _: object) -> None:
        nonlocal step
        if event == "open" or event.startswith(("os.", "shutil.")):
            step += 1
            if step == number and failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif step == number and failure == "interrupt":
                raise KeyboardInterrupt
            elif step == number:
                raise OSError(errno.ENOSPC, "No space left on device")

    sys.addaudithook(hook)  # can't be taken back, but this is a copy of the process
    try:
        store.save(numbered(2), frames=2)
    except (KeyboardInterrupt, OSError):
        return RAISED
    return SWALLOWED if step >= number else NEVER_REACHED


def fail_at_every_step(folder: str) -> None:
    os.fsync = lambda _: None  # slow, and no help against the end of a process
    for failure in ("kill", "interrupt", "full disk"):
        check_every_step(Path(folder) / failure, failure)


def check_every_step(folder: Path, failure: str) -> None:
    last_frames = set()
    for number in range(1, 1000):
        store = CheckpointStore(folder / str(number))
        store.save(numbered(1), frames=1)
        store.save(numbered(1), frames=1, name="best")
        before = names(store)
        status = os.waitpid(fork(save_and_fail, store, number, failure), 0)[1]
        outcome = os.WEXITSTATUS(status) if os.WIFEXITED(status) else KILLED
        assert outcome in (NEVER_REACHED, KILLED if failure == "kill" else RAISED, SWALLOWED)
        frames = check_numbered(store)
        last_frames.add(frames)
        for name in names(store):  # what looks like a checkpoint is a whole one
            assert name.startswith(".tmp-") or open_checkpoint(store.folder / name)
        if frames == 1 and failure != "kill":
            assert outcome == RAISED
            assert names(store) == before
        store.clean()
        assert names(store) == ["best-000000001", f"frames-{frames:09d}"]
        assert (check_numbered(store), check_numbered(store, "best")) == (frames, 1)
        store.save(numbered(2), frames=2)
        assert check_numbered(store) == 2
        if outcome == NEVER_REACHED:
            break
    assert number > 10
    assert last_frames == {1, 2}


def test_fail_at_every_step(tmp_path: Path) -> None:
    run(fail_at_every_step, tmp_path)


def exceed_the_size_of_files(folder: str) -> None:
    store = CheckpointStore(folder)
    store.save(numbered(1), frames=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 1, 100, 5_000, 100_000, 1_000_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large") as error:
            store.save(numbered(2, size=200_000), frames=2)
        assert error.value.errno == errno.EFBIG
        assert names(store) == ["frames-000000001"]
        assert check_numbered(store) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.save(numbered(2, size=200_000), frames=2)
    assert check_numbered(store) == 2


def test_file_size_limit(tmp_path: Path) -> None:
    run(exceed_the_size_of_files, tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_errors_in_the_middle_of_a_file(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """PyTorch replaces some of them by an error of its own."""
    store.save(numbered(1), frames=1)
    write = checkpoints._HashingFile.write
    calls, failing_call = 0, math.inf

    def write_or_fail(file: checkpoints._HashingFile, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls >= failing_call:
            raise error
        return write(file, data)

    monkeypatch.setattr(checkpoints._HashingFile, "write", write_or_fail)
    store.save(numbered(1), frames=1)
    total = calls
    assert total > 20
    before = names(store)
    for number in range(1, total + 1):
        calls, failing_call = 0, number
        with pytest.raises(type(error)) as raised:
            store.save(numbered(2), frames=2)
        assert raised.value is error
        assert names(store) == before
        assert check_numbered(store) == 1


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
    "odd version": (lambda path: edit_manifest(path, version="1"), "/manifest.json: lacks fields"),
    "odd frames": (lambda path: edit_manifest(path, frames=True), "/manifest.json: lacks fields"),
    "odd metadata": (lambda path: edit_manifest(path, metadata=1), "/manifest.json: lacks fields"),
    "odd parts": (lambda path: edit_manifest(path, parts=[]), "/manifest.json: lacks fields"),
    "odd part": (
        lambda path: edit_manifest(path, parts={"first": {"file": "first.pt"}}),
        "/manifest.json: lacks fields",
    ),
    "no part": (lambda path: (path / "second.pt").unlink(), "/second.pt: is missing"),
    "truncated": (
        lambda path: os.truncate(path / "second.pt", 700),
        "/second.pt: has 700 bytes instead of",
    ),
    "corrupt": (change_byte, "/second.pt: is corrupt"),
    "outside": (rename_part("../outside", "../outside.pt"), "/manifest.json: the part '../outside"),
    "file outside": (rename_part("first", "../outside.pt"), "'../outside.pt' is not allowed"),
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

    def fail(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", fail)
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
