"""Vectors of known-good implementations, read from ``MINERVA_GOLDEN_DIR`` or ``tests/golden``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

RTOL = 1e-6

Tree = dict[str, Any]


def load(name: str) -> Tree:
    """A file of vectors as a tree of tensors (and strings); a missing file is an error."""
    folder = Path(os.environ.get("MINERVA_GOLDEN_DIR") or Path(__file__).parent / "golden")
    tree: Tree = {}
    with np.load(folder / f"{name}.npz") as archive:
        for key in archive.files:
            *parents, leaf = key.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            value = archive[key]
            node[leaf] = str(value) if value.dtype.kind == "U" else torch.as_tensor(value)
    return tree


def cases(name: str, group: str) -> list[Tree]:
    """The numbered cases of a group."""
    tree = load(name)[group]
    return [tree[key] for key in sorted(tree, key=int)]


def updates(case: Tree) -> list[Tree]:
    """The updates of a case in order."""
    keys = sorted((k for k in case if k.startswith("update")), key=lambda k: int(k[6:]))
    return [case[key] for key in keys]


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """A tree of tensors with keys joined by dots."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def assert_close(
    actual: Tensor, expected: Tensor, *, atol: float = 1e-12, message: str = ""
) -> None:
    """Equal to the golden tolerance; ``atol`` only covers values that are zero but for rounding."""
    torch.testing.assert_close(
        actual.detach().double(),
        expected.double(),
        rtol=RTOL,
        atol=atol,
        msg=lambda text: f"{message}: {text}",
    )


def hyperparameters(case: Tree, defaults: dict[str, Any]) -> dict[str, Any]:
    """The stored constructor arguments over the reference's defaults."""
    stored = {k: v if isinstance(v, str) else v.item() for k, v in case.get("hp", {}).items()}
    return defaults | stored


def make_optimizer(params: Any, hp: dict[str, Any], **kwargs: Any) -> torch.optim.Optimizer:
    """The optimiser that the reference agents build: Adam with eps 1e-5, or SGD with momentum."""
    if hp["optimizer_type"] == "sgd":
        return torch.optim.SGD(params, momentum=hp["sgd_momentum"], **kwargs)
    return torch.optim.Adam(params, eps=1e-5, **kwargs)
