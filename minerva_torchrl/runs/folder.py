"""The folder of a run."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from omegaconf import OmegaConf

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.atomic import (
    TEMPORARY,
    check_kind,
    open_file,
    remove_temporary_files,
    replace_file,
)
from minerva_torchrl.runs.checkpoints import CheckpointError, CheckpointStore
from minerva_torchrl.runs.csv_table import CsvTable, TableError, TableText, read_table
from minerva_torchrl.runs.curve import draw_curve
from minerva_torchrl.runs.settings import hydra_text
from minerva_torchrl.runs.strict import ConfigError

__all__ = [
    "EVAL_COLUMNS",
    "RunFolder",
    "check_folder",
    "has_just_begun",
    "plain_settings",
    "resume_argument",
]

EVAL_COLUMNS = ("frames", "return_mean", "return_std", "return_min", "return_max", "length_mean")
"""Columns of ``eval.csv``."""

_LOCK = ".lock"
_TABLES = ("eval.csv", "metrics.csv")
_FILES = (_LOCK, "config.yaml", "curve.png", "summary.json", "wandb_id")
_FOLDERS = ("checkpoints", "videos", "tensorboard", "wandb")


class RunFolder:
    """The folder of a run while it trains. No other process can have it at the same time.

    Entered as a context manager, it is free again at the end, or when the process dies.

    Args:
        path (Path): the folder. It is made if it is not there.
        config (RunConfig): settings of the run, which are written to ``config.yaml``.

    Keyword Args:
        new (bool): whether the folder must be empty.
        frames (int): frames of the checkpoint that the run goes on from, ``-1`` without one. Rows
            of the tables that came after it are dropped, because they will come again.
        rows (mapping): rows that the tables had then, by name. Defaults to any number.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        *,
        new: bool,
        frames: int,
        rows: Mapping[str, int] = {},
    ) -> None:
        self.path = path
        self._title = f"{config.algo} {config.env.name}, seed {config.seed}"
        self._lock = _lock(path)
        try:
            _check_content(path, new=new)  # now that nobody else can change it
            for name in _TABLES:
                if check_kind(path / name):
                    _check_evaluations(path / name, read_table(path / name))
            remove_temporary_files(path)
            remove_temporary_files(path / "videos")
            # First of all: with it a run can be resumed, and without it started again.
            with replace_file(path / "config.yaml") as file:
                settings = plain_settings(config, path)
                file.write(OmegaConf.to_yaml(OmegaConf.create(settings)).encode())
            self.evaluations = CsvTable(path / "eval.csv", EVAL_COLUMNS)
            self.metrics = CsvTable(path / "metrics.csv", ("frames", "updates"))
            self.checkpoints = CheckpointStore(path / "checkpoints", keep=config.checkpoint.keep)
            self.checkpoints.clean()
            self.evaluations.drop_after(frames, rows=rows.get("eval"))
            self.metrics.drop_after(frames, rows=rows.get("metrics"))
        except TableError as error:
            self._lock.close()
            raise CheckpointError(str(error)) from None
        except OSError as error:
            self._lock.close()
            raise _unusable(path, error) from None
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def rows(self) -> dict[str, int]:
        """How many rows the tables have, all of them on the disk for good."""
        self.evaluations.flush()
        self.metrics.flush()
        return {"eval": len(self.evaluations), "metrics": len(self.metrics)}

    def draw_curve(self) -> None:
        """Draw ``curve.png`` from the tables."""
        training = self.metrics.rows()
        draw_curve(self.path / "curve.png", self.evaluations.rows(), training, title=self._title)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``. JSON has no NaN and no infinity: they become ``null``."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in summary.items()
        }
        with replace_file(self.path / "summary.json") as file:
            file.write((json.dumps(values, indent=2) + "\n").encode())


def check_folder(path: Path, *, new: bool) -> None:
    """Raise if a run can't use a folder, before anything that takes long is done for it.

    Nothing is changed.

    Args:
        path (Path): the folder, which need not be there yet.

    Keyword Args:
        new (bool): whether it must be empty.
    """
    try:
        _check_content(path, new=new)
        if check_kind(path / _LOCK):
            with open_file(path / _LOCK) as file:
                _flock(path, file, fcntl.LOCK_SH)
        for name in _TABLES:
            if check_kind(path / name):
                _check_evaluations(path / name, read_table(path / name))
    except TableError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise _unusable(path, error) from None


def _check_content(path: Path, *, new: bool) -> None:
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            inside = "" if place == path else f" can't be made: {place}"
            raise ConfigError([f"run_dir {path}{inside} is a file."])
    names = {file.name for file in path.glob("*") if not file.name.startswith(TEMPORARY)}
    if new and names - {_LOCK}:
        raise ConfigError(
            [f"run_dir {path} is not empty. Choose another, or go on with {resume_argument(path)}."]
        )
    if path.exists() and not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    for name in (*_TABLES, *_FILES):
        check_kind(path / name)
    for name in _FOLDERS:
        check_kind(path / name, stat.S_IFDIR)


def has_just_begun(path: Path) -> bool:
    """Whether a run was ended before its first checkpoint, so that there is nothing to lose.

    Args:
        path (Path): its folder.
    """
    checkpoints = path / "checkpoints"
    if any(not name.startswith(TEMPORARY) for name in _names(checkpoints)):
        return False
    try:
        return not check_kind(path / "eval.csv") or not read_table(path / "eval.csv").rows
    except TableError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise _unusable(path, error) from None


def _names(folder: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def _check_evaluations(path: Path, table: TableText) -> None:
    """Raise if an evaluation lacks a number. Metrics may: there is not always an episode."""
    for number, row in enumerate(table.rows if path.name == "eval.csv" else (), start=2):
        cells = dict(zip(table.columns, row, strict=True))
        for name in EVAL_COLUMNS:
            if not cells.get(name):
                raise TableError(path, f"{name} in line {number} is missing")


def resume_argument(run_dir: Path) -> str:
    """The setting that goes on with a run, as Hydra reads it."""
    return f"resume={hydra_text(str(run_dir))}"


def plain_settings(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Settings as ``config.yaml`` has them: with the folder, and with lists in place of tuples."""
    settings = {**asdict(config), "run_dir": str(run_dir), "resume": None, "trust": False}
    return {name: _with_lists(value) for name, value in settings.items()}


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _lock(path: Path) -> BinaryIO:
    """Make a folder if it is not there, and lock it until the process dies or closes the file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = open_file(path / _LOCK, "r+b")
    except OSError as error:
        raise _unusable(path, error) from None
    _flock(path, file, fcntl.LOCK_EX)
    with suppress(OSError):  # it is locked in any case
        file.truncate()
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
    return file


def _flock(path: Path, file: BinaryIO, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = file.read(20).strip()
        file.close()
        name = f"process {int(owner)}" if owner.isdigit() else "another process"
        raise ConfigError([f"run_dir {path} is in use by {name}."]) from None
    except OSError as error:
        file.close()
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or type(error).__name__
    return CheckpointError(f"{error.filename or path} can't be used: {reason}.")
