"""The folder of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.atomic import replace_file
from minerva_torchrl.runs.checkpoints import CheckpointError, CheckpointStore
from minerva_torchrl.runs.csv_table import CsvTable, TableError
from minerva_torchrl.runs.curve import draw_curve
from minerva_torchrl.runs.settings import hydra_text
from minerva_torchrl.runs.strict import ConfigError

__all__ = ["EVAL_COLUMNS", "RunFolder", "check_folder", "plain_settings", "resume_argument"]

EVAL_COLUMNS = ("frames", "return_mean", "return_std", "return_min", "return_max", "length_mean")
"""Columns of ``eval.csv``."""

_LOCK = ".lock"


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
    """

    def __init__(self, path: Path, config: RunConfig, *, new: bool, frames: int) -> None:
        self.path = path
        self._title = f"{config.algo} {config.env.name}, seed {config.seed}"
        self._lock = _lock(path)
        try:
            _check_content(path, new=new)  # now that nobody else can change it
            try:
                self.evaluations = CsvTable(path / "eval.csv", EVAL_COLUMNS)
                self.metrics = CsvTable(path / "metrics.csv", ("frames", "updates"))
            except TableError as error:
                raise CheckpointError(str(error)) from None
            with replace_file(path / "config.yaml") as file:
                settings = plain_settings(config, path)
                file.write(OmegaConf.to_yaml(OmegaConf.create(settings)).encode())
            self.checkpoints = CheckpointStore(path / "checkpoints", keep=config.checkpoint.keep)
            self.checkpoints.clean()
            self.evaluations.drop_after(frames)
            self.metrics.drop_after(frames)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

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

    Args:
        path (Path): the folder, which need not be there yet.

    Keyword Args:
        new (bool): whether it must be empty.
    """
    _check_content(path, new=new)
    if (path / _LOCK).exists():
        _lock(path).release()


def _check_content(path: Path, *, new: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError([f"run_dir {path} is a file."])
    if new and {file.name for file in path.glob("*")} - {_LOCK}:
        raise ConfigError(
            [f"run_dir {path} is not empty. Choose another, or go on with {resume_argument(path)}."]
        )


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


def _lock(path: Path) -> FileLock:
    """Make a folder if it is not there, and lock it until the process dies or releases it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"run_dir {path} can't be made: {error}"]) from None
    file = path / _LOCK
    if file.is_symlink():  # whose target is not ours to write to
        raise ConfigError([f"run_dir {path} can't be used: its {_LOCK} is a link, not a file."])
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError([f"run_dir {path} is in use by another process."]) from None
    except OSError as error:
        raise ConfigError([f"run_dir {path} can't be locked: {error}"]) from None
    return lock
