"""Settings from plain data: unknown names, wrong types and wrong values are refused."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from minerva_torchrl.text import close_names, did_you_mean

__all__ = ["ConfigError", "parse", "unknown_setting"]

T = TypeVar("T")


class ConfigError(ValueError):
    """Settings that can't be used: all that is wrong with them, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def parse(kind: type[T], data: Mapping[str, Any]) -> T:
    """Make a dataclass of settings, with nested ones as its sections, from plain data.

    Nothing is converted, except integers where a number is wanted, whole numbers such as ``1e5``
    where an integer is, and lists where a tuple is. What is missing keeps its default. Numbers that
    are infinite or none at all are refused.

    Args:
        kind (type): the dataclass.
        data (mapping): names and values; sections are mappings themselves.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Optim:
        ...     lr: float = 1e-3
        >>> parse(Optim, {"lr": 1})
        Optim(lr=1.0)
        >>> parse(Optim, {"lr": "fast", "learning_rate": 1e-4})
        Traceback (most recent call last):
        ...
        minerva_torchrl.runs.strict.ConfigError: lr must be a number, got 'fast' (str).
        there is no setting 'learning_rate'. Allowed: lr.
    """
    problems: list[str] = []
    result = _parse_section(kind, data, "", problems)
    if problems:
        raise ConfigError(problems)
    return result


def unknown_setting(kind: type, name: str) -> str | None:
    """What to say about a dotted name that is no setting; ``None`` if it is one.

    Args:
        kind (type): the dataclass of all settings.
        name (str): for example ``"optim.lr"``.
    """
    section, path = kind, ""
    for part in name.split("."):
        if get_origin(section) is dict:
            return None  # it may have any names
        if not is_dataclass(section) or part not in get_type_hints(section):
            known = list(get_type_hints(section)) if is_dataclass(section) else []
            return _unknown(path + part, part, known, path, list(_all_names(kind)))
        section, path = get_type_hints(section)[part], f"{path}{part}."
    return None


def _parse_section(kind: type, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, Mapping):
        problems.append(f"{path.rstrip('.')} must be a section of settings, got {_shown(data)}.")
        return None
    hints = get_type_hints(kind)
    values = {}
    for name, value in data.items():
        if name not in hints:
            problems.append(_unknown(f"{path}{name}", str(name), list(hints), path, []))
        elif is_dataclass(hints[name]):
            values[name] = _parse_section(hints[name], value, f"{path}{name}.", problems)
        else:
            try:
                values[name] = _parse_value(hints[name], value)
            except ValueError:
                wanted = "finite" if _has_not_finite(value) else _wanted(hints[name])
                problems.append(f"{path}{name} must be {wanted}, got {_shown(value)}.")
    return None if problems else kind(**values)


def _parse_value(hint: Any, value: Any) -> Any:
    """The value as ``hint`` wants it; ``ValueError`` if it is something else."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return _parse_value(option, value)
            except ValueError:
                continue
    elif origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(_parse_value(args[0], item) for item in value)
    elif origin is dict:
        if isinstance(value, Mapping) and _is_plain(dict(value)):
            return dict(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and _is_finite(value):
            return value
    elif hint is types.NoneType:
        if value is None:
            return None
    elif isinstance(value, hint):
        return value
    raise ValueError


def _is_plain(value: Any) -> bool:
    """Whether a value can be written to a file of settings and read again."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(not isinstance(item, Mapping) and _is_plain(item) for item in value)
    return value is None or (isinstance(value, (bool, int, float, str)) and _is_finite(value))


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, (int, float)) or math.isfinite(value)
    except OverflowError:  # an integer that is too large for a number
        return False


def _has_not_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_has_not_finite, value))
    return not _is_finite(value)


def _wanted(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(option) for option in args)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if origin is tuple:
        return f"a list, each item {_wanted(args[0])}"
    if origin is dict:
        return "a section of numbers, texts, true, false, null, and lists of these"
    names = {float: "a number", int: "an integer", bool: "true or false", str: "a text"}
    return names.get(hint, "null")


def _shown(value: Any) -> str:
    """A value as errors show it, which is never long."""
    if value is None:
        return "null"
    try:
        text = repr(value)
    except ValueError:  # an integer with thousands of digits
        text = "..."
    return f"{text if len(text) <= 100 else text[:100] + '...'} ({type(value).__name__})"


def _unknown(full: str, name: str, known: list[str], path: str, elsewhere: list[str]) -> str:
    close = [path + match for match in close_names(name, known)]
    close += [other for other in elsewhere if other.rpartition(".")[2] == name]
    message = f"there is no setting {full!r}.{did_you_mean(close[:3])}"
    return f"{message} Allowed: {', '.join(path + name for name in known)}." if known else message


def _all_names(kind: type, path: str = "") -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from _all_names(hints[field.name], f"{path}{field.name}.")
        else:
            yield path + field.name
