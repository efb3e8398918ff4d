"""The error for an environment that does not exist."""

from __future__ import annotations

from collections.abc import Iterable

from minerva_torchrl.text import close_names, did_you_mean


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """An error that says which environments have a name like the given one.

    Args:
        kind (str): what was looked for, for example ``"DM Control task"``.
        name (str): the name that was given.
        known (iterable of str): all names that exist.
    """
    hint = did_you_mean([repr(close) for close in close_names(name, known)])
    return ValueError(
        f"there is no {kind} {name!r}.{hint} minerva_torchrl.envs.list_envs() lists all."
    )
