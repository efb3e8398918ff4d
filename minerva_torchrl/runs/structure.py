"""Whether loaded data has the form of what a run would have saved: names, types and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

__all__ = ["check_like", "check_optimizer", "check_rows"]

# What a state of earlier versions does not have.
_LATER = ("callbacks", "metrics", "noise", "skipped_frames")


def check_like(
    saved: Any,
    template: Any,
    path: str,
    *,
    free: Mapping[str, Callable[[Any], None]] = {},
    same_names: bool = True,
) -> None:
    """Raise a ``ValueError`` unless data has the form of a template.

    Args:
        saved (Any): tensors, numbers and texts in dictionaries, lists and tuples.
        template (Any): the same, of the form that is wanted. A tensor stands for those of its type
            and shape, a number for finite ones of at least 0 (or itself), an integer for such.
        path (str): what to call the data in an error.

    Keyword Args:
        free (mapping): paths whose content may have another form, with a function each that is
            called with the data there and raises a ``ValueError`` in its turn.
        same_names (bool): whether dictionaries must have the same names. Defaults to ``True``.

    Examples:
        >>> check_like({"step": -1}, {"step": 0}, "training")
        Traceback (most recent call last):
        ...
        ValueError: training.step is -1
    """
    if path in free:
        free[path](saved)
    elif isinstance(template, Tensor):
        _check_tensor(saved, path, template.dtype, template.shape)
    elif isinstance(template, Mapping):
        if not isinstance(saved, Mapping):
            raise _wrong(path, saved)
        for name in saved.keys() - template.keys() if same_names else ():
            raise ValueError(f"{path} has an unknown {str(name)[:40]!r}")
        for name in template.keys() - saved.keys() - {*_LATER} if same_names else ():
            raise ValueError(f"{path} has no {name!r}")
        for name in template.keys() & saved.keys():
            inside = f"{path}.{name}"
            check_like(saved[name], template[name], inside, free=free, same_names=same_names)
    elif isinstance(template, (list, tuple)):
        if type(saved) is not type(template) or len(saved) != len(template):
            raise _wrong(path, saved)
        for index, (one, wanted) in enumerate(zip(saved, template, strict=True)):
            check_like(one, wanted, f"{path}.{index}", free=free, same_names=same_names)
    elif not _is_like(saved, template):
        raise _wrong(path, saved)


def check_optimizer(state: Any, optimizer: Optimizer, path: str) -> None:
    """Raise a ``ValueError`` unless there is what an optimiser could have about its parameters.

    Args:
        state (Any): ``state`` in the optimiser's ``state_dict()``.
        optimizer (Optimizer): the optimiser, which may not have made a step yet.
        path (str): what to call the data in an error.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not isinstance(state, Mapping):
        raise _wrong(path, state)
    names = None
    for index, values in state.items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise ValueError(f"{path} is about a parameter {str(index)[:40]!r}")
        if not isinstance(values, Mapping) or not values:
            raise _wrong(f"{path}.{index}", values)
        names = values.keys() if names is None else names
        if values.keys() != names:
            raise ValueError(f"{path}.{index} has other values than the first one")
        for name, value in values.items():
            shape = torch.Size() if name == "step" else parameters[index].shape
            if isinstance(value, Tensor):
                _check_tensor(value, f"{path}.{index}.{name}", value.dtype, shape)
            elif isinstance(optimizer, (Adam, AdamW)) or not _is_like(value, 0.0):
                raise _wrong(f"{path}.{index}.{name}", value)


def check_rows(data: Any, path: str, *, rows: int, names: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` unless there are tensors with so many rows, some names among them.

    Args:
        data (Any): tensors, in dictionaries.
        path (str): what to call the data in an error.

    Keyword Args:
        rows (int): length of their first dimension.
        names (tuple of str): what must be there, with dots between the names of dictionaries.
    """
    leaves = dict(_leaves(data, ""))
    for name in {*names} - leaves.keys():
        raise ValueError(f"{path} has no {name!r}")
    for name, leaf in leaves.items():
        is_plain = type(leaf) is Tensor and leaf.layout is torch.strided and leaf.ndim > 0
        if not is_plain or len(leaf) != rows or not _fits_its_memory(leaf):
            raise _wrong(f"{path}.{name}", leaf)


def _leaves(data: Any, prefix: str) -> Any:
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _leaves(value, f"{prefix}{name}.")
    else:
        yield prefix.rstrip("."), data


def _check_tensor(saved: Any, path: str, dtype: torch.dtype, shape: torch.Size) -> None:
    if type(saved) is not Tensor or saved.layout is not torch.strided:
        raise _wrong(path, saved)
    if saved.dtype != dtype or saved.shape != shape or not _fits_its_memory(saved):
        raise _wrong(path, saved)


def _fits_its_memory(tensor: Tensor) -> bool:
    """Whether a tensor does not repeat its elements, of which a copy would take more memory."""
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _is_like(saved: Any, template: Any) -> bool:
    if type(template) is int:
        return type(saved) is int and min(template, 0) <= saved < 2**63
    if type(template) is float:
        is_number = type(saved) in (int, float) and math.isfinite(saved)
        return is_number and saved >= min(template, 0.0)
    return type(saved) is type(template)


def _wrong(path: str, saved: Any) -> ValueError:
    if isinstance(saved, Tensor):
        shown = f"a tensor of {str(saved.dtype).removeprefix('torch.')} {list(saved.shape)}"
    elif saved is None or isinstance(saved, (bool, int, float, str)):
        shown = repr(saved)[:40]
    else:
        shown = f"a {type(saved).__name__}"
    return ValueError(f"{path} is {shown}")
