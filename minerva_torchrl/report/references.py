"""Numbers to compare with: lines in the plots, and bars that results must reach."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.runs.strict import ConfigError, parse

__all__ = ["Bar", "Reference", "References", "ReferencesError", "load_references"]


@dataclass(frozen=True)
class Reference:
    """A result from elsewhere."""

    task: str
    label: str
    """What to call it."""
    value: float
    """The return."""
    algo: str | None = None
    """Algorithm that it is a result of, if that is one of ours."""
    frames: int | None = None
    """After how many frames it was measured."""


@dataclass(frozen=True)
class Bar:
    """A result that is required."""

    task: str
    algo: str
    frames: int
    """Budget at which it is measured."""
    at_least: float
    """The least mean over seeds."""
    preset: str = "default"


@dataclass(frozen=True)
class References:
    """What there is to compare with."""

    references: tuple[Reference, ...] = ()
    bars: tuple[Bar, ...] = ()


class ReferencesError(ValueError):
    """Says what is wrong with a file of references, one line for each entry."""


_Entry = TypeVar("_Entry", Reference, Bar)


def load_references(path: str | Path) -> References:
    """Read a YAML or JSON file of references and bars.

    It has a list of references, or a mapping with ``references`` and ``bars``, both lists.

    Args:
        path (str or Path): the file.

    Returns:
        References and bars.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "references.yaml"
        >>> _ = path.write_text('''
        ... references:
        ... - {task: cartpole-swingup, label: tonic 642 ± 160, value: 642, frames: 100_000}
        ... bars:
        ... - {task: cartpole-swingup, algo: mpo, frames: 100_000, at_least: 600}
        ... ''')
        >>> load_references(path).bars[0].preset
        'default'
        >>> _ = path.write_text("bars: [{task: walker-walk, algo: sac, frames: 10, at_least: 5}]")
        >>> load_references(path)
        Traceback (most recent call last):
        ...
        minerva_torchrl.report.references.ReferencesError: ...references.yaml: bars[0]: algo must
        be one of mpo, vmpo, ppo, got 'sac'.
    """
    path = Path(path)
    content = _read(path)
    if isinstance(content, list):
        content = {"references": content}
    lists = [field.name for field in fields(References)]
    if not isinstance(content, Mapping) or any(name not in lists for name in content):
        raise ReferencesError(
            f"{path}: must be a list of references, or have references and bars; got "
            f"{list(content) if isinstance(content, Mapping) else type(content).__name__}."
        )
    problems: list[str] = []
    references = _entries(Reference, content, "references", problems)
    bars = _entries(Bar, content, "bars", problems)
    if problems:
        raise ReferencesError("\n".join(f"{path}: {problem}" for problem in problems))
    return References(tuple(references), tuple(bars))


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(path.read_bytes())
        return OmegaConf.to_container(OmegaConf.load(path))
    except UnicodeDecodeError:
        raise ReferencesError(f"{path}: is not text.") from None
    except (YAMLError, OmegaConfBaseException, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ReferencesError(f"{path}: can't be understood: {reason}") from None
    except OSError as error:
        reason = error.strerror or "it is neither a list nor a mapping"
        raise ReferencesError(f"{path}: can't be read: {reason}.") from None


def _entries(
    kind: type[_Entry], content: Mapping[str, Any], name: str, problems: list[str]
) -> list[_Entry]:
    listed = content.get(name) or []
    if not isinstance(listed, list):
        problems.append(f"{name} must be a list, got {type(listed).__name__}.")
        return []
    entries = []
    for index, data in enumerate(listed):
        try:
            _check_names(kind, data)
            entry = parse(kind, data)
            _check_values(entry)
        except ConfigError as error:
            problems += [f"{name}[{index}]: {problem}" for problem in error.problems]
        else:
            entries.append(entry)
    return entries


def _check_names(kind: type[Reference] | type[Bar], data: object) -> None:
    """Raise if something that is required is not there, or something else is."""
    required = [field.name for field in fields(kind) if field.default is MISSING]
    optional = [field.name for field in fields(kind) if field.default is not MISSING]
    allowed = f"It has {', '.join(required)}, and if wanted {', '.join(optional)}."
    if not isinstance(data, Mapping):
        raise ConfigError([f"must be a mapping, got {data!r}. {allowed}"])
    missing = [name for name in required if name not in data]
    unknown = [str(name) for name in data if name not in (*required, *optional)]
    problems = [f"{', '.join(missing)} is missing. {allowed}"] if missing else []
    if unknown:
        problems.append(f"{', '.join(unknown)} is unknown. {allowed}")
    if problems:
        raise ConfigError(problems)


def _check_values(entry: Reference | Bar) -> None:
    problems = []
    if entry.algo is not None and entry.algo not in ALGORITHMS:
        problems.append(f"algo must be one of {', '.join(ALGORITHMS)}, got {entry.algo!r}.")
    elif isinstance(entry, Bar) and entry.preset not in ALGORITHMS[entry.algo].presets:
        allowed = ", ".join(ALGORITHMS[entry.algo].presets)
        problems.append(f"preset must be one of {allowed} for {entry.algo}, got {entry.preset!r}.")
    name = "value" if isinstance(entry, Reference) else "at_least"
    value = getattr(entry, name)
    if not math.isfinite(value):
        problems.append(f"{name} must be finite, got {value}.")
    if entry.frames is not None and entry.frames < 1:
        problems.append(f"frames must be positive, got {entry.frames}.")
    if problems:
        raise ConfigError(problems)
