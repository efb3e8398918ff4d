"""Folders of runs, read and checked. Nothing in them is changed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minerva_torchrl.runs.atomic import read_file
from minerva_torchrl.runs.checkpoints import CheckpointError
from minerva_torchrl.runs.csv_table import TableError, read_table
from minerva_torchrl.runs.settings import affects_learning, load_config, parse_config

__all__ = ["LoadedRuns", "Problem", "RecordedRun", "flatten", "load_runs"]

_FILES_OF_A_RUN = ("config.yaml", "eval.csv", "summary.json")
# What a run or its logger writes in folders of its own; some of it has a config.yaml, too.
_NOT_SEARCHED = ("checkpoints", "videos", "wandb", "tensorboard")
# Settings that say which run it is. Runs are compared by the others.
_IDENTITY = ("algo", "env.name", "seed")
# Settings that a preset does not choose.
_NOT_OF_A_PRESET = (*_IDENTITY, "preset", "total_frames", "run_dir", "resume", "trust")
_LARGEST_SUMMARY = 1 << 20  # bytes
_SPEEDS = ("wall_seconds", "frames_per_second", "updates_per_second")


@dataclass(frozen=True)
class Problem:
    """A run that can't be reported."""

    folder: Path
    """Where it is."""
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """What the folder of a run says about it."""

    folder: Path
    """Where it is."""
    settings: Mapping[str, Any]
    """All settings, by dotted name."""
    frames: NDArray[np.int64]
    """Frames of the evaluations."""
    returns: NDArray[np.float64]
    """Mean return of each."""
    finished: bool
    """Whether it came to its end."""
    speed: Mapping[str, float] = field(default_factory=dict)
    """``wall_seconds``, ``frames_per_second`` and ``updates_per_second``, if they are known."""

    @property
    def task(self) -> str:
        """Name of the environment."""
        return self.settings["env.name"]

    @property
    def algo(self) -> str:
        """Name of the algorithm, for example ``mpo``."""
        return self.settings["algo"]

    @property
    def preset(self) -> str:
        """Name of the preset that its settings started from."""
        return self.settings["preset"]

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.settings["seed"]

    @property
    def last_frame(self) -> int:
        """Frames of the last evaluation."""
        return int(self.frames[-1])

    @property
    def learning_settings(self) -> dict[str, Any]:
        """The settings that make runs of an algorithm differ, apart from task and seed."""
        return {
            name: value
            for name, value in self.settings.items()
            if name not in _IDENTITY
            and affects_learning(name)
            and (name != "total_frames" or self._depends_on_total_frames)
        }

    @property
    def changes_to_preset(self) -> dict[str, Any]:
        """The settings that are not those of the preset, by dotted name.

        Seed, task, folder and number of frames are not among them.
        """
        preset = _preset_settings(self.algo, self.preset)
        return {
            name: value
            for name, value in self.settings.items()
            if name not in _NOT_OF_A_PRESET and (name not in preset or value != preset[name])
        }

    @property
    def _depends_on_total_frames(self) -> bool:
        """Whether a longer run would not have begun with this one."""
        return bool(self.settings.get("optim.anneal_lr"))


@dataclass(frozen=True)
class LoadedRuns:
    """Runs that can be reported, and what is wrong with the others."""

    runs: tuple[RecordedRun, ...]
    """Those that can be reported."""
    problems: tuple[Problem, ...]
    """The others."""


class _BrokenRun(Exception):
    """Says why a run can't be reported."""


def load_runs(
    paths: Sequence[str | Path] | str | Path, *, include_unfinished: bool = False
) -> LoadedRuns:
    """Read runs, wherever they are below some folders.

    A run is a folder with ``config.yaml``, ``eval.csv`` or ``summary.json``. If one is broken,
    unfinished, or the same as another, then it becomes a problem instead, with the reason. Of
    several that are the same, the one that is listed first is taken, finished ones before others.

    Args:
        paths (sequence of str or Path): folders of runs, or folders that have them at any depth.

    Keyword Args:
        include_unfinished (bool): take unfinished runs as well. Defaults to ``False``.

    Returns:
        The runs, and what could not be read.

    Examples:
        >>> import tempfile
        >>> from minerva_torchrl.report import load_runs
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "walker").mkdir()
        >>> _ = (folder / "walker" / "eval.csv").write_text("frames,return_mean")
        >>> loaded = load_runs(folder)
        >>> loaded.runs, loaded.problems[0].reason
        ((), 'it has no config.yaml')
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    runs: list[RecordedRun] = []
    problems: list[Problem] = []
    for folder in _find_folders([Path(path) for path in paths]):
        try:
            run = _read_run(folder, include_unfinished)
        except _BrokenRun as broken:
            problems.append(Problem(folder, str(broken)))
        else:
            runs.append(run)
    unique, duplicates = _without_duplicates(runs)
    return LoadedRuns(tuple(unique), tuple(problems + duplicates))


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, from a dataclass with sections. Lists become tuples.

    Examples:
        >>> from minerva_torchrl.algorithms.mpo import MPOConfig
        >>> flatten(MPOConfig())["env.name"]
        'cartpole-balance'
    """
    flat: dict[str, Any] = {}
    for name, value in (settings if isinstance(settings, dict) else vars(settings)).items():
        if is_dataclass(value) or isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = _with_tuples(value)
    return flat


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, (list, tuple)) else value


@cache
def _preset_settings(algo: str, preset: str) -> dict[str, Any]:
    return flatten(parse_config(algo, {"preset": preset}))


# Folders -----------------------------------------------------------------------------------------


def _find_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """Folders of runs, each once, in the order of the paths and then of the names."""
    seen = set()
    for path in paths:
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is not a folder.")
        for folder, subfolders, files in os.walk(path):
            subfolders[:] = sorted(
                name
                for name in subfolders
                if name not in _NOT_SEARCHED and not name.startswith(".")
            )
            is_new = Path(folder).resolve() not in seen
            if is_new and any(name in files for name in _FILES_OF_A_RUN):
                seen.add(Path(folder).resolve())
                yield Path(folder)


def _without_duplicates(
    runs: Sequence[RecordedRun],
) -> tuple[list[RecordedRun], list[Problem]]:
    first: dict[object, RecordedRun] = {}
    duplicates = []
    for run in sorted(runs, key=lambda run: not run.finished):
        settings = {**run.learning_settings, "total_frames": run.settings["total_frames"]}
        key = (run.task, run.algo, run.seed, tuple(sorted(settings.items())))
        earlier = first.setdefault(key, run)
        if earlier is not run:
            reason = f"it has the same task, algorithm, settings and seed as {earlier.folder}"
            duplicates.append(Problem(run.folder, reason))
    kept = {id(run) for run in first.values()}
    return [run for run in runs if id(run) in kept], duplicates


# Files -------------------------------------------------------------------------------------------


def _read_run(folder: Path, include_unfinished: bool) -> RecordedRun:
    settings = _read_settings(folder)
    summary = _read_summary(folder / "summary.json")
    finished = summary is not None and summary["frames"] >= settings["total_frames"]
    if not finished and not include_unfinished:
        if summary is None:
            raise _BrokenRun("unfinished: it has no summary.json")
        done, total = summary["frames"], settings["total_frames"]
        raise _BrokenRun(f"unfinished: it has {done:,} of {total:,} frames")
    frames, returns = _read_evaluations(folder / "eval.csv", finished=finished)
    if summary is not None and finished:
        _check_summary(summary, settings, int(frames[-1]), float(returns[-1]))
    speed = {name: summary[name] for name in _SPEEDS if name in summary} if summary else {}
    return RecordedRun(folder, settings, frames, returns, finished, speed)


def _read_settings(folder: Path) -> dict[str, Any]:
    file = folder / "config.yaml"
    if not os.path.lexists(file):
        raise _BrokenRun("it has no config.yaml")
    try:
        return flatten(load_config(folder))
    except CheckpointError as error:
        message = " ".join(str(error).split("\n")).replace(str(file), "config.yaml")
        raise _BrokenRun(message.rstrip(".")) from None


def _read_summary(file: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads(read_file(file, limit=_LARGEST_SUMMARY))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _BrokenRun(f"summary.json can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _BrokenRun("summary.json is not JSON") from None
    if not isinstance(summary, dict) or not isinstance(summary.get("frames"), int):
        raise _BrokenRun("summary.json does not have the frames of the run")
    for name in _SPEEDS:
        value = summary.get(name)
        if value is None:
            summary.pop(name, None)
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise _BrokenRun(f"summary.json has {name} = {value!r}")
    return summary


def _check_summary(
    summary: Mapping[str, Any], settings: Mapping[str, Any], frames: int, final_return: float
) -> None:
    """Raise if the files of a folder are not from the same run, or one lacks its end."""
    for name, setting in (("algo", "algo"), ("env", "env.name"), ("seed", "seed")):
        value = summary.get(name, settings[setting])
        if value != settings[setting]:
            raise _BrokenRun(
                f"summary.json has {name} = {value!r}, but config.yaml {settings[setting]!r}"
            )
    if summary["frames"] != frames:
        raise _BrokenRun(
            f"eval.csv ends at {frames:,} frames, but the run at {summary['frames']:,}"
        )
    value = summary.get("final_return", final_return)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isclose(value, final_return, rel_tol=1e-6, abs_tol=1e-9):
        raise _BrokenRun(
            f"summary.json has final_return = {value}, but the last row of eval.csv {final_return}"
        )


def _read_evaluations(
    file: Path, *, finished: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Frames and mean returns."""
    try:
        table = read_table(file, keep_last_line=finished)
    except FileNotFoundError:
        raise _BrokenRun("it has no eval.csv") from None
    except OSError as error:
        raise _BrokenRun(f"eval.csv can't be read: {error.strerror}") from None
    except TableError as error:
        raise _BrokenRun(f"eval.csv is not a table of a run: {error.reason}") from None
    if table.columns and "return_mean" not in table.columns:
        raise _BrokenRun("eval.csv has no column 'return_mean'")
    rows = table.numbers()
    if not rows:
        raise _BrokenRun("eval.csv has no evaluation")
    frames = np.array([row["frames"] for row in rows], dtype=np.int64)
    returns = np.array([row.get("return_mean", math.nan) for row in rows])
    for number in np.flatnonzero(~np.isfinite(returns)):
        raise _BrokenRun(f"line {number + 2} of eval.csv has no finite return_mean")
    return frames, returns
