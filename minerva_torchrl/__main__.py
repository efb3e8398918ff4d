"""The command line: ``python -m minerva_torchrl``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]

_PROGRAM = "python -m minerva_torchrl"
_HELP = f"""\
MPO, V-MPO and PPO on TorchRL.

  {_PROGRAM} train ALGORITHM [NAME=VALUE ...]   train, or go on with resume=RUN
  {_PROGRAM} evaluate RUN [...]                 evaluate a policy, make a video
  {_PROGRAM} publish RUN --out DIR              write a policy to pass on, with its card
  {_PROGRAM} report RUNS ... --out DIR          curves and tables of finished runs
  {_PROGRAM} envs [TEXT]                        names of tasks, those with TEXT in them

Each has a --help of its own.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Args:
        arguments (sequence of str, optional): defaults to those of the command line.

    Returns:
        The exit code.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    commands = {
        "train": _train,
        "evaluate": _evaluate,
        "publish": _publish,
        "report": _report,
        "envs": _envs,
    }
    if command in commands:
        from minerva_torchrl.runs.start import quiet_interrupts

        with quiet_interrupts():
            return commands[command](rest)
    if command in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    return _error(f"there is no command {command!r}. There are {', '.join(commands)}.")


def _train(arguments: list[str]) -> int:
    from minerva_torchrl.algorithms import ALGORITHMS

    algo, *rest = arguments or ["--help"]
    if algo in ALGORITHMS:
        from minerva_torchrl.runs.start import train_main

        train_main(algo, rest)
        return 0
    if algo in ("-h", "--help"):
        sys.stdout.write(f"usage: {_PROGRAM} train ALGORITHM [NAME=VALUE ...]\n\nalgorithms:\n")
        for name, algorithm in ALGORITHMS.items():
            sys.stdout.write(f"  {name:<8}{algorithm.title}: {algorithm.about()}\n")
        sys.stdout.write(f"\nPresets and settings: {_PROGRAM} train ALGORITHM --help\n")
        return 0
    return _error(f"ALGORITHM must be one of {', '.join(ALGORITHMS)}, got {algo!r}.")


def _evaluate(arguments: list[str]) -> int:
    from minerva_torchrl.runs.start import evaluate_main

    evaluate_main(arguments, prog=f"{_PROGRAM} evaluate")
    return 0


def _publish(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} publish",
        description="Write the policy of a run, without what only training needs.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder for the policy")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last")
    parser.add_argument("--episodes", type=int, default=10, help="episodes for its card (10)")
    parser.add_argument(
        "--trust", action="store_true", help="import the code that the run's settings name"
    )
    args = parser.parse_args(arguments)
    if args.episodes < 1:
        parser.error(f"--episodes must be at least 1, got {args.episodes}")
    from minerva_torchrl.report.commands import commands
    from minerva_torchrl.report.groups import group_runs
    from minerva_torchrl.report.reading import load_runs
    from minerva_torchrl.runs import CheckpointError, ConfigError, load_policy

    try:
        loaded = load_runs(args.run)
        if len(loaded.runs) != 1:
            reason = loaded.problems[0].reason if loaded.problems else "it has no run of its own"
            return _error(f"{args.run} can't be published: {reason}.")
        (command,) = commands(group_runs(loaded.runs)[0])
        policy = load_policy(args.run, name=args.checkpoint, trust=args.trust)
        policy.publish(args.out, card={"command": command}, episodes=args.episodes)
    except (CheckpointError, ConfigError, OSError) as error:
        return _error(str(error))
    sys.stdout.write(f"{args.out}: {policy.config.algo} {policy.config.env.name}\n")
    return 0


def _report(arguments: list[str]) -> int:
    from minerva_torchrl.report.__main__ import main as report_main

    return report_main(arguments)


def _envs(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} envs", description="List the names of tasks, for env.name=NAME."
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", default="", help="part of the name")
    text = parser.parse_args(arguments).text
    from minerva_torchrl.envs import list_envs

    names = [name for name in list_envs() if text.lower() in name.lower()]
    if not names:
        return _error(f"there is no task with {text!r} in its name.")
    sys.stdout.write("".join(f"{name}\n" for name in names))
    return 0


def _error(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
