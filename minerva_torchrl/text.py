"""Texts that every part of the package writes in the same way."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

__all__ = ["close_names", "did_you_mean", "format_duration", "one_line"]


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the known names that look like a misspelt one, the closest first.

    Upper and lower case count as the same.

    Examples:
        >>> close_names("cheeta-run", ["walker-walk", "cheetah-run"])
        ['cheetah-run']
    """
    by_lower_case = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    return [by_lower_case[key] for key in close]


def did_you_mean(suggestions: Sequence[str]) -> str:
    """The end of an error message about a misspelt name; nothing if there is no suggestion.

    Examples:
        >>> "there is no setting 'sead'." + did_you_mean(["seed"])
        "there is no setting 'sead'. Did you mean seed?"
    """
    return f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""


def format_duration(seconds: float) -> str:
    """A duration in its two largest units.

    Examples:
        >>> [format_duration(seconds) for seconds in (12.3, 165, 3780)]
        ['12s', '2m45s', '1h03m']
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def one_line(error: BaseException) -> str:
    r"""What an error says, in a line that is not too long; its class if it says nothing.

    Examples:
        >>> one_line(ValueError("too\nlarge"))
        'too large'
        >>> one_line(KeyError())
        'KeyError'
    """
    text = " ".join(str(error).split())
    return (text if len(text) <= 300 else f"{text[:300]}...") or type(error).__name__
