"""A training run, from its settings to its summary."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs import snapshot
from minerva_torchrl.runs.assemble import (
    Assembly,
    assemble,
    make_evaluation_env,
    resolve_compile,
    resolve_device,
)
from minerva_torchrl.runs.atomic import read_file
from minerva_torchrl.runs.callbacks import Callback
from minerva_torchrl.runs.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from minerva_torchrl.runs.folder import (
    RunFolder,
    check_folder,
    has_just_begun,
    plain_settings,
    resume_argument,
)
from minerva_torchrl.runs.loggers import MetricsLogger, check_backend, make_logger
from minerva_torchrl.runs.loop import TrainingLoop
from minerva_torchrl.runs.manifest import is_count, mismatch
from minerva_torchrl.runs.metrics import MetricsBuffer
from minerva_torchrl.runs.parts import Networks, UserParts, find_callbacks, find_parts, with_names
from minerva_torchrl.runs.progress import Progress
from minerva_torchrl.runs.settings import resumed_config
from minerva_torchrl.runs.signals import StopOnSignals
from minerva_torchrl.runs.sizes import check_copies, check_threads
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.runs.trust import check_trust, code_in
from minerva_torchrl.runs.video import require_video_support
from minerva_torchrl.text import one_line

__all__ = ["Run", "check_same_run", "python_command", "resume_run", "train_command"]


class Run:
    """Trains with some settings, and keeps a folder with all there is to know about it.

    The folder has ``config.yaml``, ``metrics.csv``, ``eval.csv``, ``curve.png``, ``checkpoints/``,
    at the end ``summary.json``, and ``videos/`` if asked for. Everything is built and checked
    before the folder is made.

    Args:
        config (RunConfig): the settings.
        run_dir (Path): the folder. It must be new or empty, unless the run is resumed.

    Keyword Args:
        networks (callable or pair, optional): networks of your own: a function that is called with
            the environment and the settings and returns the policy, and the critic or a list of
            critics; or the two themselves. The policy is a ``ProbabilisticActor`` that reads
            ``"observation"``, with its ``spec``; critics are TensorDict modules that write what the
            algorithm's loss reads. Defaults to what ``network.factory`` names, or the algorithm's.
        make_env (callable, optional): makes a single environment of your own when it is called with
            ``env.kwargs``, of Gymnasium or TorchRL; see :func:`~minerva_torchrl.make_env`. Defaults
            to what ``env.factory`` names, or the environment ``env.name``.
        callbacks (sequence of Callback, optional): called while the run trains, in this order. A
            run that is resumed must have callbacks of the same classes again. Defaults to those
            that the setting ``callbacks`` names.
        checkpoint (Checkpoint, optional): where to go on, a checkpoint of the same run.
        restart (bool): begin again in the folder of a run that has no checkpoint yet. Defaults to
            ``False``.
        trust (bool): when the run goes on: import the code that its settings name. What is passed
            as ``networks``, ``make_env`` or ``callbacks`` needs no trust. Defaults to ``False``.
        stream (text stream, optional): where progress is shown. Defaults to ``sys.stderr``.

    Attributes:
        assembly (Assembly): environment, collector, loss, trainer and replay buffer.
        eval_env (TransformedEnv): the environment of the evaluations.
        exact (bool): whether simulators can be restored in the middle of an episode.
        metrics (MetricsBuffer): what goes into the next row of ``metrics.csv``.
        saved_frames (int): frames of the last checkpoint.
        earlier_seconds (float): time that the run took before it was resumed.
        stop_reason (str or None): why the run was asked to stop.
        restarts (int): how often it went back to a checkpoint by itself.

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
        networks: Networks | None = None,
        make_env: Callable[..., Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
        checkpoint: Checkpoint | None = None,
        restart: bool = False,
        trust: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        problems = list(config.problems())
        if problems:
            raise ConfigError(problems)
        for callback in callbacks or ():
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks must be Callback objects, got {callback!r}.")
        config = with_names(config, networks, make_env)
        self.config, self.run_dir, self.checkpoint = config, run_dir, checkpoint
        self.stop_reason: str | None = None
        self.restarts = 0
        if checkpoint is not None:
            check_same_run(config, checkpoint)
        self.metrics = MetricsBuffer()
        self.saved_frames = 0 if checkpoint is None else checkpoint.frames
        self.earlier_seconds = 0.0 if checkpoint is None else checkpoint.metadata["wall_seconds"]
        self._stream = sys.stderr if stream is None else stream
        self._progress: Progress | None = None
        self._new = checkpoint is None and not restart
        problems = list(config.problems_of_new_run()) if self._new else []
        if problems:
            raise ConfigError(problems)
        check_folder(run_dir, new=self._new)
        if not self._new:
            given = {"network.factory": networks, "env.factory": make_env, "callbacks": callbacks}
            again = [name for name, part in given.items() if part is not None]
            check_trust(config, run_dir, named_again=again, trust=trust)
        self.callbacks = tuple(find_callbacks(config) if callbacks is None else callbacks)
        parts = find_parts(config, networks=networks, make_env=make_env)
        _check_requirements(config)
        self.config, note = resolve_compile(config, resumed=not self._new)
        config = self.config
        if note is not None:
            self._stream.write(f"{note}\n")
        # TorchRL's notes would tear the progress bar.
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        torch.set_num_threads(config.num_threads)
        with ExitStack() as opened:
            self.assembly = self._assemble(parts)
            opened.callback(self.assembly.shutdown)
            self.eval_env = make_evaluation_env(config, self.assembly.env, parts)
            opened.callback(self.eval_env.close, raise_if_closed=False)
            if config.eval.video:
                self._check_rendering()
            self.exact = snapshot.state_is_exact(self.assembly)
            if checkpoint is not None:
                snapshot.restore(self.assembly, checkpoint, self.callbacks, self.metrics)
                if not self.exact:
                    snapshot.cut_episodes(self.assembly)
            self._opened = opened.pop_all()  # after an error they are closed instead

    @property
    def frames(self) -> int:
        """Frames collected so far."""
        return self.assembly.trainer.collected_frames

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self.assembly.trainer._optim_count

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.frames >= self.config.total_frames

    @property
    def stopped_by(self) -> str | None:
        """Why the run ended before its time, if it did: a signal, or a callback's reason."""
        return None if self.is_complete else self.stop_reason

    def stop(self, reason: str) -> None:
        """Ask the run to end after the present batch, with a checkpoint.

        Args:
            reason (str): what the user is told. If there are several, the first one counts.
        """
        if self.stop_reason is None:
            self.stop_reason = reason

    def train(self) -> dict[str, Any]:
        """Train to the end, or until asked to stop. That can be done once.

        Returns:
            What ``summary.json`` has; nothing if the run was complete before.
        """
        config = self.config
        with self._opened as opened:
            if self.is_complete and self._has_summary():
                self._stream.write(
                    f"{self.run_dir} is complete: it has {self.frames:,} frames. Give a larger "
                    "total_frames to go on.\n"
                )
                return {}
            done, rows = -1, {}
            if self.checkpoint is not None:
                done, rows = self.frames, self.checkpoint.metadata.get("rows", {})
                self._note_other_versions(self.checkpoint)
            folder = opened.enter_context(
                RunFolder(self.run_dir, config, new=self._new, frames=done, rows=rows)
            )
            settings = plain_settings(config, self.run_dir)
            logger = make_logger(config.logger, self.run_dir, settings)
            progress = Progress(
                config.total_frames,
                initial=self.frames,
                initial_updates=self.updates,
                title=f"{config.algo} {config.env.name}",
                stream=self._stream,
            )
            self._progress = progress
            opened.callback(progress.close)
            metrics_logger = MetricsLogger(logger, progress.write)
            opened.callback(metrics_logger.close)
            with StopOnSignals(self.stop, progress.write):
                return TrainingLoop(self, folder, progress, metrics_logger).train()

    def _assemble(self, parts: UserParts) -> Assembly:
        if not self.config.ray.collectors:
            return assemble(self.config, parts)
        # Not before, because it imports Ray.
        from minerva_torchrl.runs.distributed.assembly import assemble_on_cluster

        return assemble_on_cluster(self.config, parts, self._note)

    def _note(self, line: str) -> None:
        """Show a line to the user, at any time."""
        if self._progress is None:
            self._stream.write(f"{line}\n")
        else:
            self._progress.write(line)

    def _has_summary(self) -> bool:
        """Whether the run was not killed between its last checkpoint and its summary."""
        try:
            summary = json.loads(read_file(self.run_dir / "summary.json", limit=1 << 20))
            return bool(summary["frames"] == self.frames)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return False

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        argument = shlex.quote(resume_argument(self.run_dir))
        trust = " trust=true" if code_in(self.config) else ""
        return f"{train_command(self.config.algo)} {argument}{trust}"

    def _note_other_versions(self, checkpoint: Checkpoint) -> None:
        others = checkpoint.other_versions()
        if others:
            self._stream.write(
                f"note: the checkpoint was made with {', '.join(others)}. The run goes on, but it "
                "may not be bit for bit the one that was never interrupted.\n"
            )

    def _check_rendering(self) -> None:
        self.eval_env.reset()
        try:
            self.eval_env.base_env.render()
        except Exception as error:  # of another class from each library, for example pygame's lack
            raise ConfigError([f"eval.video: {one_line(error)}"]) from error


def resume_run(
    run_dir: Path,
    overrides: Mapping[str, Any] = {},
    *,
    algo: str | None = None,
    trust: bool = False,
    stream: TextIO | None = None,
) -> Run:
    """A run that goes on where its last checkpoint is, or begins if it was stopped before that.

    Args:
        run_dir (Path): its folder.
        overrides (mapping): settings to change, by dotted name. Defaults to none.

    Keyword Args:
        algo (str, optional): the algorithm that it must be a run of.
        trust (bool): import the code that its settings name. Defaults to ``False``.
        stream (text stream, optional): where progress is shown. Defaults to ``sys.stderr``.

    Returns:
        The run, whose ``train()`` goes on.

    Examples:
        >>> resume_run(Path("no/such/run"))
        Traceback (most recent call last):
        ...
        minerva_torchrl.runs.manifest.CheckpointError: there is no run in no/such/run: ...
    """
    config = resumed_config(run_dir, overrides)
    if algo not in (None, config.algo):
        raise ConfigError([f"{run_dir} is a run of {config.algo}, not of {algo}."])
    check_trust(config, run_dir, named_again=overrides, trust=trust)
    if has_just_begun(run_dir):
        return Run(config, run_dir, restart=True, trust=True, stream=stream)
    return Run(config, run_dir, checkpoint=open_checkpoint(run_dir), trust=True, stream=stream)


def _check_requirements(config: RunConfig) -> None:
    """Raise if a logger, a device or videos can't be used here."""
    check_threads(config)
    check_copies(config)
    check_backend(config.logger)
    resolve_device(config.device)
    if config.ray.collectors and find_spec("ray") is None:
        raise ConfigError(
            ["ray.collectors needs Ray, which is not installed: pip install minerva_torchrl[ray]"]
        )
    if config.eval.video:
        try:
            require_video_support()
        except ImportError as error:
            raise ConfigError([f"eval.video: {error}"]) from None


def python_command() -> str:
    """What to type for the Python that runs this: a path if it is in a folder below this one."""
    here = Path(sys.executable)
    below = here.is_relative_to(Path.cwd())
    return shlex.quote(str(here.relative_to(Path.cwd()))) if below else "python"


def train_command(algo: str) -> str:
    """What to type to train, in the way that this program was started: by a script or not."""
    script = sys.argv[0]
    others = ("__main__.py", "default_worker.py")  # the second one is Ray's, for runs of a sweep
    if script.endswith(".py") and not script.endswith(others):
        return f"{python_command()} {shlex.quote(script)}"
    return f"{python_command()} -m minerva_torchrl train {algo}"


def check_same_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise unless a checkpoint was written by a run of the same algorithm."""
    algo = checkpoint.metadata.get("algo")
    if algo != config.algo:
        raise CheckpointError(
            f"{checkpoint.path} is not a checkpoint of a run of {config.algo}, but of {algo}."
        )
    problem = mismatch(checkpoint.metadata, _METADATA, optional=("best_return", "rows"))
    if problem is not None:
        raise CheckpointError(f"{checkpoint.path} is not a checkpoint of a run: {problem}.")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_METADATA: dict[str, Callable[[Any], bool]] = {
    "algo": lambda value: type(value) is str,
    "wall_seconds": lambda value: _is_number(value) and 0 <= value < 1e12,
    "best_return": lambda value: value is None or _is_number(value),
    "rows": lambda value: mismatch(value, {"eval": is_count, "metrics": is_count}) is None,
}
