from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections import OrderedDict, namedtuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn

from minerva_torchrl.runs.checkpoints import CheckpointError, CheckpointStore, open_checkpoint
from tests.runs.checkpoint_problem import (
    assert_same,
    check_numbered,
    names,
    numbered,
    through_disk,
)

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
    metadata = {"score": 1.5, "names": ["ä", None], "nested": {"worst": -2.5}}
    store.save({}, frames=0, metadata=metadata)
    path = store.save({"a": 1, "b": 2}, frames=1_234_567_890, metadata=metadata)
    assert path == store.folder / "frames-1234567890"
    checkpoint = open_checkpoint(path)
    assert (checkpoint.path, checkpoint.frames) == (path, 1_234_567_890)
    assert (checkpoint.metadata, checkpoint.parts) == (metadata, ("a", "b"))


PACKAGES = ("minerva_torchrl", "torch", "torchrl", "tensordict", "mujoco")


def test_other_versions_are_told(store: CheckpointStore) -> None:
    path = store.save({}, frames=1)
    assert open_checkpoint(path).other_versions() == []
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["versions"] |= {"torch": "1.0.0", "mujoco": "2.1"}
    file.write_text(json.dumps(manifest))
    assert open_checkpoint(path).other_versions() == [
        f"torch 1.0.0 (now {version('torch')})",
        f"mujoco 2.1 (now {version('mujoco')})",
    ]
    del manifest["versions"]  # as in version 0.1
    file.write_text(json.dumps(manifest))
    assert open_checkpoint(path).other_versions() == []


def test_metadata_is_finite(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.save({}, frames=1, metadata={"score": math.inf})
    assert not store.folder.exists()


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
        "versions": {name: version(name) for name in PACKAGES},
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
