"""TorchRL's loggers, for those who want their metrics elsewhere, too."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, TensorboardLogger, WandbLogger

from minerva_torchrl.algorithms.config import LoggerConfig
from minerva_torchrl.runs.atomic import replace_file
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.text import one_line

__all__ = ["MetricsLogger", "check_backend", "make_logger"]

_WANDB_SECONDS = 30.0  # to wait for its server at the start


def check_backend(config: LoggerConfig) -> None:
    """Raise if a backend's package is not installed."""
    package = config.backend
    if package != "csv" and importlib.util.find_spec(package) is None:
        raise ConfigError(
            [
                f"logger.backend={package} needs the package {package}: "
                f'pip install "minerva_torchrl[{package}]"'
            ]
        )


class MetricsLogger:
    """A logger of TorchRL's that never ends a run: when it fails, it is switched off.

    Args:
        logger (Logger, optional): the logger; without one nothing happens.
        warn (callable): called with one line when the logger fails.
    """

    def __init__(self, logger: Logger | None, warn: Callable[[str], None]) -> None:
        self._logger, self._warn = logger, warn

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Log the numbers among some values.

        Args:
            values (mapping): by name.
            step (int): frames so far.
        """
        with self._switched_off_by_errors():
            for name, value in values.items():
                if self._logger is not None and value is not None:
                    self._logger.log_scalar(name, value, step=step)

    def close(self) -> None:
        """Write what is left, so that another run of the same process gets a logger of its own."""
        with self._switched_off_by_errors():
            if isinstance(self._logger, WandbLogger):
                self._logger.experiment.finish()
            elif self._logger is not None:
                self._logger.experiment.close()

    @contextmanager
    def _switched_off_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of many classes: the network, the disk, the backend's own
            kind = type(self._logger).__name__
            self._logger = None
            self._warn(f"warning: {kind} failed and is switched off ({one_line(error)})")


def make_logger(config: LoggerConfig, run_dir: Path, hparams: Mapping[str, Any]) -> Logger | None:
    """The logger of a backend; ``None`` for ``csv``, whose files a run writes anyway.

    Args:
        config (LoggerConfig): the backend and its settings.
        run_dir (Path): folder of the run, which the logger writes to.
        hparams (mapping): settings of the run.
    """
    if config.backend == "csv":
        return None
    try:
        return _make_logger(config, run_dir, hparams)
    except Exception as error:  # of many classes: no key, no network, no folder
        advice = "logger.backend=csv needs nothing"
        if config.backend == "wandb" and config.mode == "online":
            advice = f"'wandb login' stores a key, logger.mode=offline needs none, {advice}"
        problem = f"logger.backend={config.backend} can't be used: {one_line(error).rstrip('.')}"
        raise ConfigError([f"{problem}. What helps: {advice}."]) from error


def _make_logger(config: LoggerConfig, run_dir: Path, hparams: Mapping[str, Any]) -> Logger:
    if config.backend == "tensorboard":
        logger = TensorboardLogger(exp_name="tensorboard", log_dir=str(run_dir))
        logger.experiment.flush()  # makes its file
        return logger
    import wandb

    logger = WandbLogger(
        exp_name=run_dir.name,
        offline=config.mode == "offline",
        save_dir=str(run_dir.resolve()),  # wandb runs in a process and folder of its own
        project=config.project,
        id=_wandb_id(run_dir),
        settings=wandb.Settings(init_timeout=_WANDB_SECONDS),
    )
    logger.log_hparams(dict(hparams))
    return logger


def _wandb_id(run_dir: Path) -> str:
    """The same for every session of a run, so that a resumed run goes on in the same plot."""
    file = run_dir / "wandb_id"
    if not file.exists():
        with replace_file(file) as new:
            new.write(uuid.uuid4().hex[:8].encode())
    return file.read_text().strip()
