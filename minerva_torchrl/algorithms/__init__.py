"""The algorithms that training runs know, one file each.

A new one is a subclass of :class:`Algorithm` and one line: in the list below, or, outside of this
package, a call of :func:`register`. Runs, checkpoints, reports and the command line find it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from minerva_torchrl.algorithms.config import RunConfig

if TYPE_CHECKING:
    from minerva_torchrl.algorithms.common import Algorithm, Preset

__all__ = ["ALGORITHMS", "Algorithm", "Preset", "Registry", "RunConfig", "register"]


def __getattr__(name: str) -> Any:
    """Import PyTorch only for what needs it: names and settings do not."""
    if name in ("Algorithm", "Preset"):
        return getattr(import_module(f"{__name__}.common"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Registry(Mapping[str, "type[Algorithm[Any]]"]):
    """Algorithms by name. A file is imported when its algorithm is asked for.

    Args:
        **places: names, each with module and class as ``"module:Class"``.

    Examples:
        >>> list(ALGORITHMS)
        ['mpo', 'vmpo', 'ppo']
        >>> ALGORITHMS["vmpo"].title
        'V-MPO'
    """

    def __init__(self, **places: str) -> None:
        self._places = places
        self._classes: dict[str, type[Algorithm[Any]]] = {}

    def __getitem__(self, name: str) -> type[Algorithm[Any]]:
        if name not in self._classes:
            module, _, attribute = self._places[name].partition(":")
            self._classes[name] = getattr(import_module(module), attribute)
        return self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def register(self, algorithm: type[Algorithm[Any]]) -> type[Algorithm[Any]]:
        """Make an algorithm known, under the name that ``algo`` has in its settings.

        Args:
            algorithm (type): a subclass of :class:`Algorithm`.

        Returns:
            The same class, so that this can be used as a decorator.
        """
        name = algorithm.config_class().algo
        place = f"{algorithm.__module__}:{algorithm.__qualname__}"
        if not name or self._places.get(name, place) != place:
            raise ValueError(
                f"algo must have a default that no other algorithm has, got {name!r} in "
                f"{algorithm.config_class.__name__}."
            )
        self._places[name], self._classes[name] = place, algorithm
        return algorithm


ALGORITHMS = Registry(
    mpo="minerva_torchrl.algorithms.mpo:MPO",
    vmpo="minerva_torchrl.algorithms.vmpo:VMPO",
    ppo="minerva_torchrl.algorithms.ppo:PPO",
)
"""All algorithms, in the order in which they are listed anywhere."""

register = ALGORITHMS.register
