"""The command line of training and evaluation, for ``__main__`` and the example scripts."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.envs import EnvironmentFailure, PolicyFailure
from minerva_torchrl.runs.checkpoints import CheckpointError
from minerva_torchrl.runs.distributed import WorkersLost
from minerva_torchrl.runs.evaluation import evaluate
from minerva_torchrl.runs.help import train_help
from minerva_torchrl.runs.load import load_policy
from minerva_torchrl.runs.run import Run, python_command, resume_run, train_command
from minerva_torchrl.runs.settings import (
    check_overrides,
    default_run_dir,
    explicit_overrides,
    hydra_text,
    parse_config,
    register_configs,
)
from minerva_torchrl.runs.sizes import check_copies
from minerva_torchrl.runs.start import first_line
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.runs.trust import code_in
from minerva_torchrl.runs.video import require_video_support, write_video
from minerva_torchrl.trainers import NonFiniteError

__all__ = ["run_evaluation", "run_training", "train"]

# Training ----------------------------------------------------------------------------------------


def run_training(algo: str, arguments: Sequence[str], *, config_dir: Path | None = None) -> None:
    """What :func:`~minerva_torchrl.runs.train_main`, which describes it, does with PyTorch."""
    arguments = check_overrides(algo, arguments)
    register_configs(algo)
    folder = None if config_dir is None else str(config_dir.resolve())
    name = "train" if folder is None else algo
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(_help(folder, name, arguments))
        return
    sys.argv[1:] = arguments  # where Hydra looks for them
    program = hydra.main(version_base="1.3", config_path=folder, config_name=name)(train)
    if not {"-m", "--multirun"} & {*arguments}:
        program()
        return
    with tempfile.TemporaryDirectory() as private:  # where Hydra notes what a sweep consists of
        sys.argv.append(f"hydra.sweep.dir={hydra_text(private)}")
        program()
        found = Path(private) / "optimization_results.yaml"
        if found.exists():  # of a search
            _write(*_best_of(OmegaConf.to_container(OmegaConf.load(found))))


def _best_of(results: Any) -> list[str]:
    """What a search has found, from what Hydra's Optuna sweeper writes: settings as to be typed."""
    if "best_value" not in results:  # of several objectives
        return []
    settings = " ".join(f"{name}={value}" for name, value in results["best_params"].items())
    return [f"best of the search: {float(results['best_value']):.1f} with {settings}"]


def train(config: DictConfig) -> float | None:
    """Train, or go on training, with settings that Hydra put together.

    Errors in settings end the program with status 2 and a line for each; a folder that can't be
    used, a run that is no longer finite, one whose environment fails, and one whose end can't be
    saved, with status 1; a run that was asked to stop with status 0, or 130 if it was to stop at
    once.

    Args:
        config (DictConfig): what ``@hydra.main`` passes on.

    Returns:
        The final evaluation, for sweepers that search for the best settings; ``None`` if the run
        was complete before.

    Examples:
        See :func:`~minerva_torchrl.runs.train_main`, which calls it.
    """
    run: Run | None = None
    try:
        run = _make_run(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
        if not sys.stderr.isatty() or HydraConfig.get().mode == RunMode.MULTIRUN:
            # On a terminal it was the first thing to be seen.
            _write(first_line(run.config, run.run_dir, resumed=run.checkpoint is not None))
        while True:
            try:
                summary = run.train()
                break
            except WorkersLost as error:
                run = _go_back(run, error)
    except CheckpointError as error:
        raise _failure(error, status=1) from None
    except (ConfigError, OmegaConfBaseException) as error:
        raise _failure(error) from None
    except KeyboardInterrupt:  # at the start, or the second one
        if run is None or not run.saved_frames:
            _write("Stopped.")
        else:
            saved = f"Stopped. The last checkpoint has {run.saved_frames:,} frames. Go on with:"
            _write(saved, f"  {run.resume_command()}")
        raise SystemExit(130) from None
    except (NonFiniteError, EnvironmentFailure, PolicyFailure) as error:
        lines = [f"error: {error}"]
        if run is not None:
            last = run.run_dir / "checkpoints/last"
            lines.append(f"The last good checkpoint: {last} at {run.saved_frames:,} frames")
        _write(*lines)
        raise SystemExit(1) from None
    if not summary:
        return None
    if run.saved_frames < run.frames:
        _write(f"error: {run.run_dir} is not saved: {run.saved_frames:,} of {run.frames:,} frames")
        raise SystemExit(1)
    if run.stopped_by is not None:
        _write(f"Saved at {run.saved_frames:,} frames. Go on with:", f"  {run.resume_command()}")
        raise SystemExit(0)  # a sweep ends here, too
    _write(*_last_lines(run, summary))
    final: float | None = summary["final_return"]
    return final


def _go_back(run: Run, error: WorkersLost) -> Run:
    """The run at its last checkpoint, unless that was tried often enough."""
    tried = run.restarts
    if tried >= run.config.ray.max_restarts:
        last = f"The last checkpoint has {run.saved_frames:,} frames. Go on with:"
        _write(f"error: {error}", last, f"  {run.resume_command()}")
        raise SystemExit(1) from None
    _write(f"warning: {error} Going back to the last checkpoint, {run.saved_frames:,} frames.")
    run = resume_run(run.run_dir, trust=True)
    run.restarts = tried + 1
    return run


def _help(folder: str | None, name: str, arguments: Sequence[str]) -> str:
    """The help, with the settings that the command line gives."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    initialize: Any = hydra.initialize if folder is None else hydra.initialize_config_dir
    try:
        with initialize(folder, version_base="1.3"):
            settings: Any = OmegaConf.to_container(hydra.compose(name, overrides), resolve=True)
        config = parse_config(settings["algo"], settings)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        raise _failure(error) from None
    return train_help(config, train_command(config.algo))


def _make_run(settings: dict[str, Any]) -> Run:
    resume = settings.get("resume")
    if resume is None:
        config = parse_config(settings["algo"], settings)
        return Run(config, Path(config.run_dir) if config.run_dir else default_run_dir(config))
    if not isinstance(resume, str):
        raise ConfigError([f"resume must be the folder of a run, got {resume!r}."])
    run_dir = Path(resume)
    overrides = explicit_overrides(HydraConfig.get().overrides.task)
    for name in ("resume", "trust"):
        overrides.pop(name, None)
    return resume_run(run_dir, overrides, algo=settings["algo"], trust=settings["trust"])


def _last_lines(run: Run, summary: dict[str, Any]) -> list[str]:
    folder, more = run.run_dir, 2 * run.config.total_frames
    returns = [summary["final_return"], summary["best_return"]]
    final, best = ("unknown" if value is None else f"{value:.1f}" for value in returns)
    lines = [
        f"{summary['algo']} {summary['env']}: {summary['frames']:,} frames in "
        f"{summary['wall_seconds']:.0f} s, final evaluation {final}, best {best}",
        "",
        f"  curve       {folder / 'curve.png'}",
        f"  go on       {run.resume_command()} total_frames={more}",
    ]
    if run.config.env.factory is None:  # which would be the task whatever its name
        train = train_command(run.config.algo)
        lines.append(f"  other task  {train} env.name=walker-walk total_frames=100_000")
    if ALGORITHMS[run.config.algo].__module__.startswith("minerva_torchrl."):
        # Other algorithms are known to the programs that register them only.
        evaluation = f"{python_command()} -m minerva_torchrl evaluate {shlex.quote(str(folder))}"
        trust = " --trust" if code_in(run.config).keys() - {"callbacks"} else ""
        video = shlex.quote(str(folder / "policy.mp4"))
        lines.append(f"  watch       {evaluation} --video {video}{trust}")
    return lines


# Evaluation --------------------------------------------------------------------------------------


def run_evaluation(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """What :func:`~minerva_torchrl.runs.evaluate_main`, which describes it, does with PyTorch."""
    args = _evaluation_arguments(arguments, prog)
    try:
        _evaluate(args)
    except (
        CheckpointError,
        ConfigError,
        ImportError,
        EnvironmentFailure,
        PolicyFailure,
    ) as error:
        _write(f"error: {error}")
        raise SystemExit(1) from None


def _evaluation_arguments(arguments: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Evaluate the policy of a run, and make a video of it.",
        epilog="Videos need OpenGL: without a display, set MUJOCO_GL=egl (or osmesa).",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="folder of a run, of one of its checkpoints, or of a published policy",
    )
    parser.add_argument("--episodes", type=int, default=10, help="number of episodes (10)")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last")
    parser.add_argument("--seed", type=int, help="seed (default: that of the run's evaluations)")
    parser.add_argument(
        "--trust", action="store_true", help="import the code that the run's settings name"
    )
    parser.add_argument("--video", metavar="FILE", help="write the first episode to an mp4 file")
    args = parser.parse_args(arguments)
    if args.episodes < 1:
        parser.error(f"--episodes must be at least 1, got {args.episodes}")
    if args.seed is not None and not 0 <= args.seed < 2**32:
        parser.error(f"--seed must be between 0 and 2**32 - 1, got {args.seed}")
    if args.video and not args.video.endswith(".mp4"):
        parser.error(f"--video must end in .mp4, got {args.video}")
    return args


def _evaluate(args: argparse.Namespace) -> None:
    if args.video:
        require_video_support()
    policy = load_policy(args.run, name=args.checkpoint, trust=args.trust)
    check_copies(policy.config, episodes=args.episodes)
    env = policy.make_env(episodes=args.episodes, seed=args.seed, video=bool(args.video))
    pictures: list[Any] = []
    seed = policy.evaluation_seed if args.seed is None else args.seed
    with tqdm(desc="drawing", unit="pictures", disable=None if args.video else True) as bar:

        def draw() -> None:
            pictures.append(env.base_env.render())
            bar.update()

        result = evaluate(env, policy.actor, seed=seed, on_step=draw if args.video else None)
    config, frames = policy.config, policy.frames
    lines = [f"{config.algo} {config.env.name} at {frames:,} frames"]
    for i, (score, length) in enumerate(zip(result.returns, result.lengths, strict=True), 1):
        lines.append(f"  episode {i:<3} return {score:9.2f}   length {length}")
    row = result.row()
    lines.append(
        f"return {row['return_mean']:.2f} ± {row['return_std']:.2f}   "
        f"min {row['return_min']:.2f}   max {row['return_max']:.2f}"
    )
    if args.video:
        write_video(args.video, pictures, fps=30, progress=True)
        lines.append(f"video: {args.video}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _failure(error: Exception, status: int = 2) -> SystemExit:
    """Say what is wrong, one line each, and what to end the program with."""
    _write(*(f"error: {line}" for line in str(error).splitlines()))
    return SystemExit(status)


def _write(*lines: str) -> None:
    sys.stderr.write("".join(line + "\n" for line in lines))
