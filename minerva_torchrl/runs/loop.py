"""What happens around the updates of a run: metrics, evaluations, checkpoints, callbacks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from tensordict import TensorDictBase

from minerva_torchrl.envs import EnvironmentFailure, PolicyFailure
from minerva_torchrl.runs import snapshot
from minerva_torchrl.runs.assemble import evaluation_seed
from minerva_torchrl.runs.evaluation import evaluate
from minerva_torchrl.runs.folder import RunFolder
from minerva_torchrl.runs.loggers import MetricsLogger
from minerva_torchrl.runs.manifest import CheckpointError
from minerva_torchrl.runs.progress import Progress
from minerva_torchrl.runs.video import write_video
from minerva_torchrl.trainers.hooks import run_first
from minerva_torchrl.trainers.stepping import GuardedStepper, NonFiniteError

if TYPE_CHECKING:
    from minerva_torchrl.runs.run import Run

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """Trains a run to its end, or until it is asked to stop.

    TorchRL's ``Trainer`` collects and updates. After each batch, when the collector has the new
    weights, come in this order: a row of metrics, an evaluation and a checkpoint, each if it is
    due, and the end if it was asked for. What can't be written, because the disk is full for
    example, is reported, and training goes on.

    Args:
        run (Run): the run.
        folder (RunFolder): where its records go.
        progress (Progress): what the user sees.
        logger (MetricsLogger): where metrics go, too.
    """

    def __init__(
        self, run: Run, folder: RunFolder, progress: Progress, logger: MetricsLogger
    ) -> None:
        self._run, self._config, self._trainer = run, run.config, run.assembly.trainer
        self._folder, self._progress, self._logger = folder, progress, logger
        self._metrics = run.metrics
        self._rates: dict[str, float] = {}  # of the updates on the present batch
        self._start = time.perf_counter()
        evaluations = folder.evaluations.rows()
        self._best_return = max((row["return_mean"] for row in evaluations), default=-math.inf)
        if run.checkpoint is not None and "best_return" in run.checkpoint.metadata:
            best = run.checkpoint.metadata["best_return"]
            self._best_return = -math.inf if best is None else best
        self._evaluated_at = int(evaluations[-1]["frames"]) if evaluations else -1

    def train(self) -> dict[str, Any]:
        """Train.

        Returns:
            What ``summary.json`` has.
        """
        run = self._run
        for callback in run.callbacks:
            callback.on_start(run)
        if run.checkpoint is None:
            self._save(required=True)  # so that a run can be resumed from its first moment on
        if run.frames == 0:
            self._evaluate()
        run_first(self._trainer, "batch_process", self._metrics.add_batch)  # with steps lost
        self._trainer.register_op("pre_steps_log", self._after_collection)
        self._trainer.register_op("post_optim_complete_log", self._after_updates)
        if run.callbacks and self._steps_are_seen:
            self._trainer.register_op("post_optim", self._after_update)
            self._trainer.optimization_stepper.metrics_interval = 1  # they see every update
        compiled = getattr(self._trainer.optimization_stepper, "compiled", None)
        if compiled is not None:
            compiled.announce = self._progress.write
        # The last hook of this stage: the one that gives the weights to the collector came before.
        self._trainer.register_op("post_steps", self._after_batch)
        if run.is_complete:  # and was killed before all of it was written down
            with self._despite_errors("curve.png"):
                self._folder.draw_curve()
        elif run.stop_reason is None:
            try:
                self._trainer.train()
            except (EnvironmentFailure, PolicyFailure):
                if run.saved_frames < run.frames:
                    self._save(episodes=False)
                raise
            except (ValueError, RuntimeError) as error:  # of a distribution, for example
                if all(bool(p.isfinite().all()) for p in run.assembly.actor.parameters()):
                    raise
                raise PolicyFailure("the parameters of the policy are not finite.") from error
        if run.stopped_by is not None:
            self._progress.write(f"stopped at {run.frames:,} frames: {run.stopped_by}")
        return self._finish()

    # At each batch -------------------------------------------------------------------------------

    def _after_collection(self, batch: TensorDictBase) -> None:
        for callback in self._run.callbacks:
            callback.on_batch(self._run, batch)

    def _after_updates(self, updates: int, losses: TensorDictBase | None) -> None:
        self._rates = self._learning_rates()  # now, because a schedule goes on after the updates
        if losses is not None:
            self._metrics.add_losses(losses)
            for callback in () if self._steps_are_seen else self._run.callbacks:
                callback.on_update(self._run, losses)

    @property
    def _steps_are_seen(self) -> bool:
        """Whether the stepper shows what each of its steps returned."""
        return isinstance(self._trainer.optimization_stepper, GuardedStepper)

    def _learning_rates(self) -> dict[str, float]:
        return self._trainer.optimization_stepper.learning_rates if self._steps_are_seen else {}

    def _after_update(self) -> None:
        for callback in self._run.callbacks:
            callback.on_update(self._run, self._trainer.optimization_stepper.latest)

    def _after_batch(self) -> None:
        run, config = self._run, self._config
        self._progress.update(run.frames, run.updates, self._metrics.episode_return)
        # A run that is stopped here writes no row that it would not have written otherwise: what
        # it has collected for the next one is in its checkpoint.
        if run.is_complete or self._is_due(config.logger.interval):
            self._write_metrics()
        self._rates = {}
        if run.is_complete or self._is_due(config.frames_per_evaluation):
            self._evaluate()
        if self._is_ending() or self._is_due(config.checkpoint.interval):
            self._save()
            if run.stop_reason is not None:  # a signal from now on waits for the next batch
                self._trainer.request_stop(run.stop_reason)

    def _is_ending(self) -> bool:
        return self._run.is_complete or self._run.stop_reason is not None

    def _is_due(self, interval: int) -> bool:
        """Whether a multiple of the interval was passed with the last batch."""
        frames = self._run.frames
        batch = self._config.collector.frames_per_batch * self._config.env.frame_skip
        return frames // interval > (frames - batch) // interval

    def _write_metrics(self) -> None:
        run, skipped = self._run, self._trainer.finite_batches
        counts = {"frames": run.frames, "updates": run.updates}
        speeds = {
            "frames_per_second": self._progress.frames_per_second,
            "updates_per_second": self._progress.updates_per_second,
        }
        row = self._metrics.take()
        row |= self._rates or self._learning_rates()
        row["skipped_frames"] = skipped.skipped_frames
        row["skipped_batches"] = skipped.skipped_batches
        row["skipped_updates"] = skipped.skipped_updates
        for callback in run.callbacks:
            for name, value in callback.metrics().items():
                if name in {**counts, **row, **speeds}:
                    kind = type(callback).__name__
                    raise ValueError(f"metrics() of {kind} has {name!r}, which is another metric.")
                row[name] = float(value)
        with self._despite_errors("metrics.csv"):
            self._folder.metrics.append({**counts, **row, **speeds})
        self._log("train", row)
        self._log("time", speeds)

    def _evaluate(self) -> None:
        run, config = self._run, self._config
        if self._evaluated_at == run.frames:
            return
        self._evaluated_at = run.frames
        run.assembly.refresh()
        pictures: list[Any] = []

        def take_picture() -> None:
            pictures.append(run.eval_env.base_env.render())

        try:
            evaluation = evaluate(
                run.eval_env,
                run.assembly.actor,
                seed=evaluation_seed(config),
                on_step=take_picture if config.eval.video else None,
                max_skipped=config.max_skipped,
            )
        except EnvironmentFailure:
            self._save()  # training itself has come to the end of a batch
            raise
        if evaluation.lost:
            self._progress.write(
                f"warning: {evaluation.lost} episodes of the evaluation were begun again, because "
                "observations or rewards were not finite"
            )
        result = evaluation.row()
        row = {"frames": run.frames, **result}
        with self._despite_errors("eval.csv"):
            self._folder.evaluations.append(row)
        self._progress.evaluated(row)
        self._log("eval", result)
        if pictures:
            with self._despite_errors("a video"):
                name = f"frames-{run.frames:09d}.mp4"
                self._progress.write(f"writing videos/{name}, {len(pictures):,} pictures")
                write_video(self._folder.path / "videos" / name, pictures, fps=30)
        with self._despite_errors("curve.png"):
            self._folder.draw_curve()
        for callback in run.callbacks:
            callback.on_evaluation(run, row)
        if result["return_mean"] > self._best_return:
            self._best_return = result["return_mean"]
            if config.checkpoint.best:
                self._save("best")

    def _save(
        self,
        name: Literal["last", "best"] = "last",
        *,
        required: bool = False,
        episodes: bool = True,
    ) -> None:
        run, config = self._run, self._config
        run.assembly.refresh()
        state = snapshot.capture(
            run.assembly,
            run.callbacks,
            metrics=self._metrics,
            replay_buffer=name == "last" and config.checkpoint.replay_buffer,
            episodes=episodes,
        )
        bad = snapshot.not_finite(state)
        if bad is not None:
            problem = f"no checkpoint was written (the one before is kept): {bad} is not finite"
            if run.is_complete and name == "last":
                raise NonFiniteError(f"{problem}.")
            self._progress.write(f"warning: {problem}")
            return
        try:
            metadata = {
                "algo": config.algo,
                "wall_seconds": self._wall_seconds(),
                "best_return": self._best_return if math.isfinite(self._best_return) else None,
                "rows": self._folder.rows(),
            }
            path = self._folder.checkpoints.save(
                state, frames=run.frames, metadata=metadata, name=name
            )
        except OSError as error:
            if required:
                where = error.filename or self._folder.path
                reason = error.strerror or type(error).__name__
                raise CheckpointError(
                    f"{where}: no checkpoint can be written ({reason}), so the run is not begun."
                ) from None
            self._warn("a checkpoint (the one before is kept)", error)
        else:
            if name == "last":
                run.saved_frames = run.frames
            for callback in run.callbacks:
                callback.on_checkpoint(run, path)
        if name == "last" and episodes and not run.exact and not run.is_complete:
            snapshot.cut_episodes(run.assembly)

    # At the end ----------------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any]:
        run, config = self._run, self._config
        seconds = self._wall_seconds()
        returns = [row["return_mean"] for row in self._folder.evaluations.rows()]
        summary = {
            "algo": config.algo,
            "env": config.env.name,
            "seed": config.seed,
            "frames": run.frames,
            "final_return": returns[-1] if returns else None,
            "best_return": max(returns, default=None),
            "skipped_frames": self._trainer.finite_batches.skipped_frames,
            "wall_seconds": round(seconds, 2),
            "frames_per_second": round(run.frames / seconds, 2),
            "updates_per_second": round(run.updates / seconds, 2),
        }
        with self._despite_errors("summary.json"):
            self._folder.write_summary(summary)
        for callback in run.callbacks:
            callback.on_end(run, summary)
        return summary

    def _wall_seconds(self) -> float:
        return self._run.earlier_seconds + time.perf_counter() - self._start

    def _log(self, group: str, values: Mapping[str, float | None]) -> None:
        named = {f"{group}/{name}": value for name, value in values.items()}
        self._logger.log(named, step=self._run.frames)

    @contextmanager
    def _despite_errors(self, what: str) -> Iterator[None]:
        """Training goes on if a file can't be written."""
        try:
            yield
        except OSError as error:
            self._warn(what, error)

    def _warn(self, what: str, error: OSError) -> None:
        self._progress.write(f"warning: could not write {what}: {error}")
