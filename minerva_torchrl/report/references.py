"""Published results to compare with: lines in the plots, a table, and suites of tasks."""

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
from minerva_torchrl.report.values import mean_and_deviation, number
from minerva_torchrl.runs.strict import ConfigError, parse

__all__ = ["Name", "Reference", "References", "ReferencesError", "load_references"]


@dataclass(frozen=True)
class Reference:
    """A result from elsewhere."""

    task: str
    """Name of the environment."""
    label: str
    """What to call it."""
    value: float
    """The return."""
    algo: str | None = None
    """Algorithm that it is a result of, if that is one of ours."""
    frames: int | None = None
    """After how many frames it was measured."""
    deviation: float | None = None
    """Its standard deviation over seeds."""

    @property
    def result(self) -> str:
        """The return, with its deviation if it is known."""
        if self.deviation is None:
            return number(self.value)
        return mean_and_deviation(self.value, self.deviation)


@dataclass(frozen=True)
class Suite:
    """Tasks whose results are put together."""

    title: str
    """What to call it."""
    folder: str
    """Name of the folder in which its runs are."""
    tasks: tuple[str, ...]
    """Names of the environments."""
    frames: tuple[int, ...]
    """Where it is evaluated, the last one for the tables."""
    published: str
    """CSV file with ``task, method, env_steps, seeds, mean, std``, next to the references."""
    methods: tuple[str, ...]
    """Those of its methods that are shown, the best last."""
    compared: str | None = None
    """Name of a folder of runs with other settings, to compare the suite's with."""
    note: str = ""
    """What readers should know of the published returns."""


@dataclass(frozen=True)
class Name:
    """What to call runs with certain settings."""

    name: str
    """What to call them."""
    settings: dict[str, Any]
    """By dotted name, as in ``{algo: mpo, loss.value_estimator: retrace}``."""


@dataclass(frozen=True)
class References:
    """What there is to compare with, and what to call the runs."""

    references: tuple[Reference, ...] = ()
    """Published results."""
    suites: tuple[Suite, ...] = ()
    """Tasks whose results are put together."""
    names: tuple[Name, ...] = ()
    """Short names of runs."""
    folder: Path = Path()
    """Where the files that suites name are."""


_Entry = TypeVar("_Entry", Reference, Suite, Name)


class ReferencesError(ValueError):
    """Says what is wrong with a file of references, one line for each entry."""


def load_references(path: str | Path) -> References:
    """Read a YAML or JSON file of references.

    It has a list of references, or a mapping with that list as ``references``, with ``suites`` if
    several tasks are to be put together, and with ``names`` for runs whose settings are too long a
    name. The first name that fits counts.

    Args:
        path (str or Path): the file.

    Returns:
        The references.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "references.yaml"
        >>> _ = path.write_text('''
        ... references:
        ... - {task: cartpole-swingup, label: tonic, value: 642, deviation: 160, frames: 100_000}
        ... ''')
        >>> load_references(path).references[0].frames
        100000
        >>> _ = path.write_text("[{task: walker-walk, algo: sac, label: x, value: 5}]")
        >>> load_references(path)
        Traceback (most recent call last):
        ...
        minerva_torchrl.report.references.ReferencesError: ...references.yaml: references[0]: algo
        must be one of mpo, vmpo, ppo, got 'sac'.
    """
    path = Path(path)
    content = _read(path)
    if isinstance(content, list):
        content = {"references": content}
    lists = ["references", "suites", "names"]
    if not isinstance(content, Mapping) or any(name not in lists for name in content):
        raise ReferencesError(
            f"{path}: must be a list of references, or have references, suites and names; got "
            f"{list(content) if isinstance(content, Mapping) else type(content).__name__}."
        )
    problems: list[str] = []
    references = _entries(Reference, content, "references", problems)
    suites = _entries(Suite, content, "suites", problems)
    names = _entries(Name, content, "names", problems)
    if problems:
        raise ReferencesError("\n".join(f"{path}: {problem}" for problem in problems))
    return References(tuple(references), tuple(suites), tuple(names), path.parent)


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


def _check_names(kind: type[_Entry], data: object) -> None:
    """Raise if something that is required is not there, or something else is."""
    required: list[str] = [entry.name for entry in fields(kind) if entry.default is MISSING]
    optional: list[str] = [entry.name for entry in fields(kind) if entry.default is not MISSING]
    wanted = f", and if wanted {', '.join(optional)}" if optional else ""
    allowed = f"It has {', '.join(required)}{wanted}."
    if not isinstance(data, Mapping):
        raise ConfigError([f"must be a mapping, got {data!r}. {allowed}"])
    missing = [name for name in required if name not in data]
    unknown = [str(name) for name in data if name not in (*required, *optional)]
    problems = [f"{', '.join(missing)} is missing. {allowed}"] if missing else []
    if unknown:
        problems.append(f"{', '.join(unknown)} is unknown. {allowed}")
    if problems:
        raise ConfigError(problems)


def _check_values(entry: Reference | Suite | Name) -> None:
    if isinstance(entry, Name):
        if not (entry.name and entry.settings):
            raise ConfigError(["name and settings must not be empty."])
        return
    if isinstance(entry, Suite):
        if not (entry.tasks and entry.frames and min(entry.frames) > 0):
            raise ConfigError(["tasks and frames must have at least one entry, frames positive."])
        return
    problems = []
    if entry.algo is not None and entry.algo not in ALGORITHMS:
        problems.append(f"algo must be one of {', '.join(ALGORITHMS)}, got {entry.algo!r}.")
    if not math.isfinite(entry.value):
        problems.append(f"value must be finite, got {entry.value}.")
    if entry.deviation is not None and not 0 <= entry.deviation < math.inf:
        problems.append(f"deviation must be finite and not negative, got {entry.deviation}.")
    if entry.frames is not None and entry.frames < 1:
        problems.append(f"frames must be positive, got {entry.frames}.")
    if problems:
        raise ConfigError(problems)
