"""How actions look to TorchRL, and how simulators get them: continuous, discrete, or of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded

from minerva_torchrl.envs.failures import PolicyFailure

__all__ = [
    "Actions",
    "ArrayOfParts",
    "BoxActions",
    "DiscreteActions",
    "PartedActions",
    "actions_of",
    "no_action",
]


class Actions(Protocol):
    """How actions look to TorchRL, and how the simulators get them."""

    def spec(self) -> TensorSpec:
        """The spec of a single action; a ``Composite`` if it has parts."""

    def read(self, actions: Any) -> Sequence[Any] | NDArray[Any]:
        """A batch of actions as the simulators take them, one each.

        Args:
            actions (array or mapping): arrays ``[*K, ...]``, by part if there are parts.
        """


class BoxActions:
    """Actions between bounds: flat float32 in the data, clipped on the way to the simulators.

    Canonical ones are between -1 and 1 in the data, and ``center + scale * action`` in the
    simulators. Actions without bounds are the same in both.
    """

    def __init__(self, low: NDArray[Any], high: NDArray[Any], *, canonical: bool = False) -> None:
        self.low, self.high = np.array(low), np.array(high)
        self.bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())
        self.canonical = canonical and self.bounded
        self.center, self.scale = np.zeros_like(self.low), np.ones_like(self.low)
        if self.canonical:  # halved first: the sum may be too large for its type
            self.center = self.high / 2 + self.low / 2
            self.scale = self.high / 2 - self.low / 2

    def spec(self) -> TensorSpec:
        """Bounded, unless a bound is infinite."""
        low, high = (torch.from_numpy(x.flatten()).float() for x in (self.low, self.high))
        if not self.bounded:
            return Unbounded(low.shape, dtype=torch.float32)
        if self.canonical:
            low, high = -torch.ones_like(low), torch.ones_like(high)
        return Bounded(low, high, shape=low.shape, dtype=torch.float32)

    def read(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Shape, scale, clip and cast."""
        actions = self.center + self.scale * actions.reshape(-1, *self.low.shape)
        actions = np.minimum(np.maximum(actions, self.low), self.high)
        if not np.isfinite(actions).all():
            raise no_action(actions[~np.isfinite(actions)][0])
        return actions.astype(self.low.dtype, copy=False)


def no_action(value: float) -> PolicyFailure:
    """What to raise where an action is infinite or not a number."""
    return PolicyFailure(
        f"an action is not a finite number ({value}): the policy gave it, from observations that "
        "are finite. Smaller learning rates may help."
    )


class DiscreteActions:
    """Numbered actions, one-hot or as they are."""

    def __init__(self, count: int, start: int = 0, *, categorical: bool = False) -> None:
        self.count, self.start, self.categorical = count, start, categorical

    def spec(self) -> TensorSpec:
        """One-hot, or the number."""
        return Categorical(self.count) if self.categorical else OneHot(self.count)

    def read(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Numbers that begin with ``start``."""
        if not self.categorical:
            actions = actions.argmax(-1)
        return actions.reshape(-1) + self.start


@dataclass(frozen=True)
class ArrayOfParts:
    """An array of which every entry is a part."""

    names: tuple[str, ...]
    """Their names, in the order of the flat array."""
    shape: tuple[int, ...]
    """Shape of the array."""
    dtype: Any
    """Type of the array."""


class PartedActions:
    """Actions of several parts, which have entries of their own in the data.

    Args:
        parts (mapping): by name, what each part is.
        form (str, dict, tuple or ArrayOfParts): what simulators take, with the names of the parts
            in the place of their values.
    """

    def __init__(self, parts: Mapping[str, BoxActions | DiscreteActions], form: Any) -> None:
        self.parts, self.form = dict(parts), form

    def spec(self) -> Composite:
        """The specs of the parts by their names."""
        return Composite({name: part.spec() for name, part in self.parts.items()})

    def read(self, actions: Mapping[str, Any]) -> list[Any]:
        """Put the parts of each action together."""
        columns = [part.read(actions[name]) for name, part in self.parts.items()]
        rows = (dict(zip(self.parts, row, strict=True)) for row in zip(*columns, strict=True))
        return [self.assemble(row, _array) for row in rows]

    def assemble(
        self, values: Mapping[str, Any], array: Callable[[ArrayOfParts, list[Any]], Any]
    ) -> Any:
        """Values of the parts in the form that simulators take.

        Args:
            values (mapping): by the name of the part.
            array (callable): makes an array of the values of its parts.
        """

        def fill(form: Any) -> Any:
            if isinstance(form, dict):
                return {key: fill(part) for key, part in form.items()}
            if isinstance(form, tuple):
                return tuple(map(fill, form))
            if isinstance(form, ArrayOfParts):
                return array(form, [values[name] for name in form.names])
            return values[form]

        return fill(self.form)


def _array(form: ArrayOfParts, values: list[Any]) -> NDArray[Any]:
    return np.array(values, form.dtype).reshape(form.shape)


# Spaces of Gymnasium -----------------------------------------------------------------------------


def actions_of(
    space: spaces.Space[Any], *, categorical: bool = False, canonical: bool = False
) -> Actions:
    """How actions of a Gymnasium space look.

    Args:
        space (Space): a ``Box`` of floats, ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``, or
            a ``Dict`` or ``Tuple`` of these, as deep as it may be.

    Keyword Args:
        categorical (bool): represent discrete actions by their numbers and not one-hot. Defaults
            to ``False``.
        canonical (bool): continuous actions are between -1 and 1 in the data. Defaults to
            ``False``.

    Examples:
        >>> space = spaces.Dict({"arm": spaces.Box(-2.0, 2.0, (3,)), "grip": spaces.Discrete(2)})
        >>> actions = actions_of(space, canonical=True)
        >>> actions.spec()["arm"].shape, actions.spec()["grip"].shape
        (torch.Size([3]), torch.Size([2]))
        >>> actions.read({"arm": np.zeros((1, 3)), "grip": np.array([[0, 1]])})
        [{'arm': array([0., 0., 0.], dtype=float32), 'grip': np.int64(1)}]
    """
    parts: dict[str, BoxActions | DiscreteActions] = {}
    form = _form(space, (), parts, categorical, canonical)
    if categorical and not any(isinstance(part, DiscreteActions) for part in parts.values()):
        raise ValueError(f"categorical_actions needs discrete actions, got {space}.")
    return parts[form] if isinstance(form, str) else PartedActions(parts, form)


def _form(
    space: spaces.Space[Any],
    path: tuple[str, ...],
    parts: dict[str, BoxActions | DiscreteActions],
    categorical: bool,
    canonical: bool,
) -> Any:
    """What simulators take, with names of parts in the place of values. Fills in the parts."""

    def add(path: tuple[str, ...], part: BoxActions | DiscreteActions) -> str:
        name = "_".join(path)
        if name in parts:
            raise ValueError(f"two parts of an action would have the name {name!r}: {space}.")
        parts[name] = part
        return name

    def discrete(counts: Any, starts: Any) -> ArrayOfParts:
        names = tuple(
            add((*path, str(i)), DiscreteActions(int(n), int(start), categorical=categorical))
            for i, (n, start) in enumerate(zip(counts.flat, starts.flat, strict=True))
        )
        assert space.shape is not None
        return ArrayOfParts(names, space.shape, space.dtype)

    def inside(name: object, part: spaces.Space[Any]) -> Any:
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(
                "the keys of actions in a Dict must be texts without dots, because they name "
                f"entries of the data; got {name!r}."
            )
        return _form(part, (*path, name), parts, categorical, canonical)

    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return add(path, BoxActions(space.low, space.high, canonical=canonical))
    if isinstance(space, spaces.Discrete):
        return add(path, DiscreteActions(int(space.n), int(space.start), categorical=categorical))
    if isinstance(space, spaces.MultiDiscrete):
        return discrete(space.nvec, space.start)
    if isinstance(space, spaces.MultiBinary):
        return discrete(np.full(space.shape, 2), np.zeros(space.shape, int))
    if isinstance(space, spaces.Dict) and len(space.spaces):
        return {name: inside(name, part) for name, part in space.items()}
    if isinstance(space, spaces.Tuple) and len(space.spaces):
        return tuple(inside(str(i), part) for i, part in enumerate(space.spaces))
    where = f" as {'/'.join(path)!r}" if path else ""
    raise ValueError(
        "actions must be in a Box of floats, Discrete, MultiDiscrete or MultiBinary, or in a Dict "
        f"or Tuple of these, got {space}{where}."
    )
