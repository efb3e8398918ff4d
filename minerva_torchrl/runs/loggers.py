"""TorchRL's loggers, for those who want their metrics elsewhere, too."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, TensorboardLogger, WandbLogger

from minerva_torchrl.algorithms.config import LoggerConfig
from minerva_torchrl.runs.atomic import replace_file
from minerva_torchrl.runs.strict import ConfigError

__all__ = ["check_backend", "close_logger", "make_logger"]


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


def make_logger(config: LoggerConfig, run_dir: Path, hparams: Mapping[str, Any]) -> Logger | None:
    """The logger of a backend; ``None`` for ``csv``, whose files a run writes anyway.

    Args:
        config (LoggerConfig): the backend and its settings.
        run_dir (Path): folder of the run, which the logger writes to.
        hparams (mapping): settings of the run.
    """
    if config.backend == "csv":
        return None
    if config.backend == "tensorboard":
        return TensorboardLogger(exp_name="tensorboard", log_dir=str(run_dir))
    logger = WandbLogger(
        exp_name=run_dir.name,
        offline=config.mode == "offline",
        save_dir=str(run_dir.resolve()),  # wandb runs in a process and folder of its own
        project=config.project,
        id=_wandb_id(run_dir),
    )
    logger.log_hparams(dict(hparams))
    return logger


def close_logger(logger: Logger | None) -> None:
    """Write what is left, so that another run of the same process gets a logger of its own."""
    if isinstance(logger, WandbLogger):
        logger.experiment.finish()
    elif logger is not None:
        logger.experiment.close()


def _wandb_id(run_dir: Path) -> str:
    """The same for every session of a run, so that a resumed run goes on in the same plot."""
    file = run_dir / "wandb_id"
    if not file.exists():
        with replace_file(file) as new:
            new.write(uuid.uuid4().hex[:8].encode())
    return file.read_text().strip()
