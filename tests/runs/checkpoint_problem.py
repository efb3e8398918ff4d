"""What the tests of checkpoints share."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minerva_torchrl.runs.checkpoints import CheckpointStore, open_checkpoint

ROOT = Path(__file__).parents[2]


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
