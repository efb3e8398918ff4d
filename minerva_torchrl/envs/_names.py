"""Names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """An error that suggests names."""
    by_lower_case = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(by_lower_case[key]) for key in close)}?"
    return ValueError(
        f"there is no {kind} {name!r}.{hint if close else ''} "
        "minerva_torchrl.envs.list_envs() lists all."
    )
