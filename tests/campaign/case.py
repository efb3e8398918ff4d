"""What a group of the campaign is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One case of the campaign."""

    name: str
    run: Callable[[Path], str | None]
    """Gets an empty folder. Returns ``None`` if the promise held, else one line on what broke."""
