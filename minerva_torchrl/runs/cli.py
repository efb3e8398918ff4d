"""What the example scripts call."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minerva_torchrl.runs.checkpoints import CheckpointError, open_checkpoint
from minerva_torchrl.runs.run import Run, check_same_run, python_command
from minerva_torchrl.runs.settings import (
    default_run_dir,
    explicit_overrides,
    parse_config,
    resumed_config,
)
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.trainers import NonFiniteError

__all__ = ["train"]


def train(config: DictConfig) -> None:
    """Train, or go on training, with settings that Hydra put together.

    Errors in settings or checkpoints end the program with status 2 and a line for each; a run that
    is no longer finite ends it with status 1; a run that was asked to stop ends it with status 0.

    Args:
        config (DictConfig): what ``@hydra.main`` passes on.
    """
    try:
        run = _make_run(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
        summary = run.train()
    except (ConfigError, CheckpointError, OmegaConfBaseException) as error:
        _write(*(f"error: {line}" for line in str(error).splitlines()))
        raise SystemExit(2) from None
    except NonFiniteError as error:
        _write(f"error: {error}", f"The last good checkpoint: {run.run_dir / 'checkpoints/last'}")
        raise SystemExit(1) from None
    if not summary:
        return
    if run.stopped_by is not None:
        _write(f"Saved at {run.saved_frames:,} frames. Go on with:", f"  {run.resume_command()}")
        raise SystemExit(0)  # a sweep ends here, too
    _write(*_last_lines(run, summary))


def _make_run(settings: dict[str, Any]) -> Run:
    resume = settings.get("resume")
    if resume is None:
        config = parse_config(settings["algo"], settings)
        return Run(config, Path(config.run_dir) if config.run_dir else default_run_dir(config))
    run_dir = Path(resume)
    overrides = explicit_overrides(HydraConfig.get().overrides.task)
    del overrides["resume"]
    config = resumed_config(run_dir, overrides)
    if config.algo != settings["algo"]:
        raise ConfigError([f"{run_dir} is a run of {config.algo}, not of {settings['algo']}."])
    if _has_just_begun(run_dir):
        return Run(config, run_dir, restart=True)
    checkpoint = open_checkpoint(run_dir)
    check_same_run(config, checkpoint)
    return Run(config, run_dir, checkpoint=checkpoint)


def _has_just_begun(run_dir: Path) -> bool:
    """Whether a run was ended before its first checkpoint, so that there is nothing to lose."""
    evaluations = run_dir / "eval.csv"
    rows = evaluations.read_bytes().count(b"\n") - 1 if evaluations.exists() else 0
    return rows <= 0 and not os.path.lexists(run_dir / "checkpoints" / "last")


def _last_lines(run: Run, summary: dict[str, Any]) -> list[str]:
    folder, more = run.run_dir, 2 * run.config.total_frames
    returns = [summary["final_return"], summary["best_return"]]
    final, best = ("unknown" if value is None else f"{value:.1f}" for value in returns)
    script, quoted = f"{python_command()} {shlex.quote(sys.argv[0])}", shlex.quote(str(folder))
    return [
        f"{summary['algo']} {summary['env']}: {summary['frames']:,} frames in "
        f"{summary['wall_seconds']:.0f} s, final evaluation {final}, best {best}",
        "",
        f"  curve       {folder / 'curve.png'}",
        f"  watch       {python_command()} examples/evaluate.py {quoted} --episodes 10",
        f"  go on       {run.resume_command()} total_frames={more}",
        f"  other task  {script} env.name=walker-walk total_frames=100_000",
    ]


def _write(*lines: str) -> None:
    sys.stderr.write("".join(line + "\n" for line in lines))
