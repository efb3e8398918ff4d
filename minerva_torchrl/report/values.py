"""Numbers and settings as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

__all__ = [
    "count",
    "interval",
    "mean_and_deviation",
    "number",
    "seed_list",
    "setting_text",
    "settings_text",
]


def number(value: float | None) -> str:
    """A measured number with one decimal, or three if it is small; ``-`` if there is none.

    Examples:
        >>> number(641.97), number(-0.25), number(12_000.5), number(None)
        ('642.0', '-0.250', '12,000.5', '-')
    """
    return "-" if value is None else f"{value:,.{_decimals(value)}f}"


def mean_and_deviation(mean: float, deviation: float | None) -> str:
    """A mean and its standard deviation, with as many decimals.

    Examples:
        >>> mean_and_deviation(641.97, 3.14), mean_and_deviation(0.5, None)
        ('642.0 ± 3.1', '0.500 ± -')
    """
    decimals = _decimals(mean, deviation or 0.0)
    spread = "-" if deviation is None else f"{deviation:,.{decimals}f}"
    return f"{mean:,.{decimals}f} ± {spread}"


def interval(low: float, high: float) -> str:
    """Two ends, with as many decimals.

    Examples:
        >>> interval(-3.0, 641.97)
        '-3.0 to 642.0'
    """
    decimals = _decimals(low, high)
    return f"{low:,.{decimals}f} to {high:,.{decimals}f}"


def count(value: int, noun: str) -> str:
    """A number of things.

    Examples:
        >>> count(1, "seed"), count(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def seed_list(seeds: Sequence[int]) -> str:
    """Seeds, as a range if they are many in a row.

    Examples:
        >>> seed_list([0, 1, 7]), seed_list(range(10))
        ('0, 1, 7', '0–9')
    """
    in_a_row = len(seeds) > 4 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]}–{seeds[-1]}" if in_a_row else ", ".join(map(str, seeds))


def setting_text(value: Any) -> str:
    """The value of a setting, short, as it is written on the command line.

    Examples:
        >>> setting_text(0.0003), setting_text(40.0), setting_text(1_000_000)
        ('3e-4', '40', '1_000_000')
        >>> setting_text((256, 256)), setting_text(None), setting_text(True)
        ('[256,256]', 'null', 'true')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(setting_text(item) for item in value) + "]"
    return str(value)


def settings_text(settings: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Some of the settings as ``name=value``.

    Examples:
        >>> settings_text({"seed": 0, "optim.lr_actor": 1e-3}, ["optim.lr_actor"])
        ['optim.lr_actor=1e-3']
    """
    return [f"{name}={setting_text(settings.get(name))}" for name in names]


def _decimals(*values: float) -> int:
    return 1 if max(abs(value) for value in values) >= 10 else 3


def _float_text(value: float) -> str:
    """All digits, without an exponent unless the number is tiny or huge."""
    if not math.isfinite(value):
        return str(value)
    digits = Decimal(repr(value)).normalize()
    if value and not 0.01 <= abs(value) < 1e9:
        return f"{digits:e}".replace("e+", "e")
    return f"{digits:f}"
