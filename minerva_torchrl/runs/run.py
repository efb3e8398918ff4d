"""A training run, from its settings to its summary."""

from __future__ import annotations

import fcntl
import logging
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from omegaconf import OmegaConf
from tensordict import TensorDictBase

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs import snapshot
from minerva_torchrl.runs.assemble import (
    assemble,
    evaluation_seed,
    make_evaluation_env,
    resolve_device,
)
from minerva_torchrl.runs.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from minerva_torchrl.runs.curve import draw_curve
from minerva_torchrl.runs.evaluation import evaluate
from minerva_torchrl.runs.loggers import check_backend, close_logger, make_logger
from minerva_torchrl.runs.metrics import MetricsBuffer
from minerva_torchrl.runs.progress import Progress
from minerva_torchrl.runs.records import CsvTable, replace_file, write_json
from minerva_torchrl.runs.settings import hydra_text
from minerva_torchrl.runs.signals import StopRequest
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.runs.video import require_video_support, write_video

__all__ = ["Run", "check_same_run", "python_command", "resume_argument", "train_command"]

_LOCK = ".lock"
_EVAL_COLUMNS = ("frames", "return_mean", "return_std", "return_min", "return_max", "length_mean")


class Run:
    """Trains with some settings, and keeps a folder with all there is to know about it.

    The folder has ``config.yaml``, ``metrics.csv``, ``eval.csv``, ``curve.png``, ``checkpoints/``,
    at the end ``summary.json``, and ``videos/`` if asked for. Everything is built and checked
    before the folder is made.

    Args:
        config (RunConfig): the settings.
        run_dir (Path): the folder. It must be new or empty, unless the run is resumed.

    Keyword Args:
        checkpoint (Checkpoint, optional): where to go on, a checkpoint of the same run.
        restart (bool): begin again in the folder of a run that has no checkpoint yet. Defaults to
            ``False``.
        stream (text stream, optional): where progress is shown. Defaults to ``sys.stderr``.

    Examples:
        >>> import io, tempfile
        >>> from minerva_torchrl.runs import parse_config
        >>> config = parse_config(
        ...     "ppo",
        ...     {
        ...         "total_frames": 512,
        ...         "env": {"name": "gym:Pendulum-v1"},
        ...         "collector": {"frames_per_batch": 256},
        ...     },
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     summary = Run(config, Path(folder) / "run", stream=io.StringIO()).train()
        >>> summary["frames"], summary["env"]
        (512, 'gym:Pendulum-v1')
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        checkpoint: Checkpoint | None = None,
        restart: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        problems = list(config.problems())
        if problems:
            raise ConfigError(problems)
        self.config, self.run_dir, self._checkpoint = config, run_dir, checkpoint
        self._stream = sys.stderr if stream is None else stream
        self._new = checkpoint is None and not restart
        self._check_folder()
        self._check_requirements()
        # TorchRL's notes would tear the progress bar.
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        torch.set_num_threads(config.num_threads)
        self.assembly = assemble(config)
        self._eval_env = make_evaluation_env(config, self.assembly.env)
        if config.eval.video:
            self._check_rendering()
        self._exact = snapshot.state_is_exact(self.assembly)
        self._best_return = -float("inf")
        self._last_evaluated = -1
        self._earlier_seconds = 0.0
        self.saved_frames = 0 if checkpoint is None else checkpoint.frames
        """Frames of the last checkpoint."""
        if checkpoint is not None:
            snapshot.restore(self.assembly, checkpoint)
            self._earlier_seconds = checkpoint.metadata["wall_seconds"]
            if not self._exact:
                snapshot.cut_episodes(self.assembly)

    @property
    def frames(self) -> int:
        """Frames collected so far."""
        return self.assembly.trainer.collected_frames

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.frames >= self.config.total_frames

    def train(self) -> dict[str, Any]:
        """Train to the end, or until asked to stop.

        Returns:
            What ``summary.json`` has; nothing if the run was complete before.
        """
        if self.is_complete:
            self._stream.write(
                f"{self.run_dir} is complete: it has {self.frames:,} frames. Give a larger "
                "total_frames to go on.\n"
            )
            return {}
        with self._own_folder():
            self._open_records()
            self._start = time.perf_counter()
            trainer = self.assembly.trainer
            self._progress = Progress(
                self.config.total_frames,
                initial=self.frames,
                initial_updates=trainer._optim_count,
                title=f"{self.config.algo} {self.config.env.name}",
                stream=self._stream,
            )
            try:
                with StopRequest(self._progress.write) as self._stop:
                    self._train()
            finally:
                self._progress.close()
                close_logger(self._logger)
                trainer.collector.shutdown()
                self._eval_env.close(raise_if_closed=False)
            return self._finish()

    def _train(self) -> None:
        trainer = self.assembly.trainer
        if self._checkpoint is None:
            self._save()  # so that a run can be resumed from its first moment on
            if not self._exact:
                snapshot.cut_episodes(self.assembly)
        if self.frames == 0:
            self._evaluate()
        trainer.register_op("pre_steps_log", self._metrics.add_batch)
        trainer.register_op("post_optim_complete_log", self._metrics.add_losses)
        trainer.register_op("post_steps_log", self._after_batch)
        trainer.train()

    # After each batch ----------------------------------------------------------------------------

    def _after_batch(self, batch: TensorDictBase) -> None:
        trainer = self.assembly.trainer
        done = self.frames >= self.config.total_frames
        stop = self._stop.name is not None
        self._progress.update(self.frames, trainer._optim_count, self._metrics.episode_return)
        if done or stop or self._is_due(self.config.logger.interval):
            self._write_metrics()
        if done or self._is_due(self.config.eval.interval):
            self._evaluate()
        if done or stop or self._is_due(self.config.checkpoint.interval):
            self._save()
            if not self._exact and not done:
                snapshot.cut_episodes(self.assembly)
        if stop:
            trainer.request_stop(f"{self._stop.name}")

    def _is_due(self, interval: int) -> bool:
        """Whether a multiple of the interval was passed with the last batch."""
        batch = self.config.collector.frames_per_batch * self.config.env.frame_skip
        return self.frames // interval > (self.frames - batch) // interval

    def _evaluate(self) -> None:
        if self._last_evaluated == self.frames:
            return
        self._last_evaluated = self.frames
        pictures: list[Any] = []
        on_step = None
        if self.config.eval.video:

            def on_step() -> None:
                pictures.append(self._eval_env.base_env.render())

        result = evaluate(
            self._eval_env,
            self.assembly.actor,
            seed=evaluation_seed(self.config),
            on_step=on_step,
        ).row()
        row = {"frames": self.frames, **result}
        with self._despite_errors("eval.csv"):
            self._evaluations.append(row)
        self._progress.evaluated(row)
        self._log({f"eval/{name}": value for name, value in result.items()})
        if pictures:
            with self._despite_errors("a video"):
                name = f"frames-{self.frames:09d}.mp4"
                write_video(self.run_dir / "videos" / name, pictures, fps=30)
        with self._despite_errors("curve.png"):
            self._draw()
        if result["return_mean"] > self._best_return:
            self._best_return = result["return_mean"]
            if self.config.checkpoint.best:
                self._save("best")

    def _draw(self) -> None:
        draw_curve(
            self.run_dir / "curve.png",
            self._evaluations.rows(),
            self._table.rows(),
            title=f"{self.config.algo} {self.config.env.name}, seed {self.config.seed}",
        )

    def _write_metrics(self) -> None:
        trainer = self.assembly.trainer
        row = self._metrics.take()
        row["skipped_batches"] = trainer.finite_batches.skipped_batches
        row["skipped_updates"] = trainer.finite_batches.skipped_updates
        speeds = {
            "frames_per_second": self._progress.frames_per_second,
            "updates_per_second": self._progress.updates_per_second,
        }
        with self._despite_errors("metrics.csv"):
            self._table.append(
                {"frames": self.frames, "updates": trainer._optim_count, **row, **speeds}
            )
        self._log({f"train/{name}": value for name, value in row.items() if value is not None})
        self._log({f"time/{name}": value for name, value in speeds.items()})

    def _log(self, values: dict[str, float]) -> None:
        if self._logger is not None:
            for name, value in values.items():
                self._logger.log_scalar(name, value, step=self.frames)

    def _save(self, name: Literal["last", "best"] = "last") -> None:
        with_replay = name == "last" and self.config.checkpoint.replay_buffer
        metadata = {"algo": self.config.algo, "wall_seconds": self._wall_seconds()}
        with self._despite_errors("a checkpoint (the one before is kept)"):
            self._store.save(
                snapshot.capture(self.assembly, replay_buffer=with_replay),
                frames=self.frames,
                metadata=metadata,
                name=name,
            )
            if name == "last":
                self.saved_frames = self.frames

    def _despite_errors(self, what: str) -> _DespiteErrors:
        return _DespiteErrors(what, self._progress.write)

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._start

    # Beginning and end ---------------------------------------------------------------------------

    def _check_requirements(self) -> None:
        check_backend(self.config.logger)
        resolve_device(self.config.device)
        if self.config.eval.video:
            try:
                require_video_support()
            except ImportError as error:
                raise ConfigError([f"eval.video: {error}"]) from None

    def _check_rendering(self) -> None:
        self._eval_env.reset()
        try:
            self._eval_env.base_env.render()
        except RuntimeError as error:
            raise ConfigError([f"eval.video: {error}"]) from None

    def _check_folder(self) -> None:
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise ConfigError([f"run_dir {self.run_dir} is a file."])
        names = {path.name for path in self.run_dir.glob("*")} if self._new else set()
        if names - {_LOCK}:
            raise ConfigError(
                [
                    f"run_dir {self.run_dir} is not empty. Choose another, or go on with "
                    f"{resume_argument(self.run_dir)}."
                ]
            )

    def _own_folder(self) -> TextIO:
        """Make the folder, and hold a lock on it until the returned file is closed."""
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError([f"run_dir {self.run_dir} can't be made: {error}"]) from None
        lock = open(self.run_dir / _LOCK, "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_folder()  # again: another run may have come and gone
        except OSError:
            lock.close()
            raise ConfigError([f"run_dir {self.run_dir} is in use by another process."]) from None
        except ConfigError:
            lock.close()
            raise
        return lock

    def _open_records(self) -> None:
        try:
            self._evaluations = CsvTable(self.run_dir / "eval.csv", _EVAL_COLUMNS)
            self._table = CsvTable(self.run_dir / "metrics.csv", ("frames", "updates"))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        settings = asdict(self.config)
        settings["run_dir"], settings["resume"] = str(self.run_dir), None
        with replace_file(self.run_dir / "config.yaml") as file:
            file.write(OmegaConf.to_yaml(OmegaConf.create(_lists(settings))).encode())
        self._store = CheckpointStore(
            self.run_dir / "checkpoints", keep=self.config.checkpoint.keep
        )
        self._store.clean()
        self._metrics = MetricsBuffer()
        # What came after the checkpoint will come again.
        done = -1 if self._checkpoint is None else self.frames
        self._evaluations.drop_after(done)
        self._table.drop_after(done)
        for row in self._evaluations.rows():
            self._best_return = max(self._best_return, row["return_mean"])
            self._last_evaluated = int(row["frames"])
        self._logger = make_logger(self.config.logger, self.run_dir, _lists(settings))

    def _finish(self) -> dict[str, Any]:
        seconds = self._wall_seconds()
        rows = self._evaluations.rows()
        updates = self.assembly.trainer._optim_count
        summary = {
            "algo": self.config.algo,
            "env": self.config.env.name,
            "seed": self.config.seed,
            "frames": self.frames,
            "final_return": rows[-1]["return_mean"] if rows else None,
            "best_return": max((row["return_mean"] for row in rows), default=None),
            "wall_seconds": round(seconds, 2),
            "frames_per_second": round(self.frames / seconds, 2),
            "updates_per_second": round(updates / seconds, 2),
        }
        with self._despite_errors("summary.json"):
            write_json(self.run_dir / "summary.json", summary)
        return summary

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended the run before its time, if one did."""
        return self._stop.name if self.frames < self.config.total_frames else None

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        argument = shlex.quote(resume_argument(self.run_dir))
        return f"{train_command(self.config.algo)} {argument}"


def python_command() -> str:
    """What to type for the Python that runs this: a path if it is in a folder below this one."""
    here = Path(sys.executable)
    below = here.is_relative_to(Path.cwd())
    return shlex.quote(str(here.relative_to(Path.cwd()))) if below else "python"


def train_command(algo: str) -> str:
    """What to type to train, in the way that this program was started: by a script or not."""
    script = sys.argv[0]
    if script.endswith(".py") and not script.endswith("__main__.py"):
        return f"{python_command()} {shlex.quote(script)}"
    return f"{python_command()} -m minerva_torchrl train {algo}"


def resume_argument(run_dir: Path) -> str:
    """The setting that goes on with a run, as Hydra reads it."""
    return f"resume={hydra_text(str(run_dir))}"


class _DespiteErrors:
    """Training goes on if a file can't be written, for example because the disk is full."""

    def __init__(self, what: str, announce: Any) -> None:
        self.what, self.announce = what, announce

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, OSError):
            return False
        self.announce(f"warning: could not write {self.what}: {error}")
        return True


def _lists(value: Any) -> Any:
    """Settings with lists in place of tuples, as YAML knows them."""
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def check_same_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise unless a checkpoint was written by a run of the same algorithm."""
    algo = checkpoint.metadata.get("algo")
    if algo != config.algo or "wall_seconds" not in checkpoint.metadata:
        raise CheckpointError(
            f"{checkpoint.path} is not a checkpoint of a run of {config.algo}, but of {algo}."
        )
