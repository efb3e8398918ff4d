"""The command line: ``python -m minerva_torchrl.report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minerva_torchrl.report.make import make_report
from minerva_torchrl.report.reading import LoadedRuns, load_runs
from minerva_torchrl.report.references import References, ReferencesError, load_references
from minerva_torchrl.report.values import count

__all__ = ["main"]

_DESCRIPTION = """\
Write a report about training runs: learning curves, tables, settings and commands, as
report.html (one file that needs nothing else) and as report.md with its plots.
"""
_EXAMPLE = """\
example:
  python -m minerva_torchrl.report runs/ --out report/ --budgets 100_000 500_000 \\
      --references references.yaml --machine "2 cores, no GPU"

file of references:
  references:
  - {task: cartpole-swingup, algo: mpo, label: tonic, value: 642, deviation: 160, frames: 100_000}

exit codes: 0 if there is a report, 1 if no run could be reported, 2 for wrong arguments.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a report.

    Args:
        arguments (sequence of str, optional): defaults to those of the command line.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    out: Path = options.out
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            parser.error(f"argument --out: {path} is a file, not a folder")
    references = References()
    if options.references is not None:
        try:
            references = load_references(options.references)
        except ReferencesError as error:
            parser.error("\n".join(f"argument --references: {e}" for e in str(error).split("\n")))
    loaded = load_runs(options.runs, include_unfinished=options.include_unfinished)
    if not loaded.runs:
        sys.stderr.write(f"error: {_nothing_to_report(options.runs, loaded)}\n")
        return 1
    for problem in loaded.problems:
        sys.stderr.write(f"skipped {problem.folder}: {problem.reason}\n")
    try:
        page = make_report(
            loaded,
            out,
            budgets=options.budgets,
            references=references,
            machine=options.machine,
            name=options.name,
        )
    except OSError as error:
        sys.stderr.write(f"error: the report can't be written: {error}\n")
        return 1
    sys.stdout.write(f"{page}: {count(len(loaded.runs), 'run')}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minerva_torchrl.report",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        metavar="RUNS",
        nargs="+",
        type=_folder,
        help="folders of runs, or folders that have such at any depth",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="folder to write the report to"
    )
    parser.add_argument(
        "--budgets",
        metavar="FRAMES",
        nargs="+",
        type=_budget,
        help="numbers of frames to compare at (default: round ones, and the shortest run's)",
    )
    parser.add_argument(
        "--references", metavar="FILE", type=Path, help="YAML or JSON with numbers to compare with"
    )
    parser.add_argument(
        "--name", type=_file_name, default="report", help="name of the files (report)"
    )
    parser.add_argument("--machine", metavar="TEXT", help="what the runs were made on")
    parser.add_argument(
        "--include-unfinished", action="store_true", help="take unfinished runs as well"
    )
    return parser


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path


def _file_name(text: str) -> str:
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"must be a name without a folder, got {text!r}")
    return text


def _budget(text: str) -> int:
    try:
        frames = int(text)
    except ValueError:
        frames = 0
    if frames < 1:
        raise argparse.ArgumentTypeError(
            f"must be a positive number of frames such as 100_000, got {text!r}"
        )
    return frames


def _nothing_to_report(paths: Sequence[Path], loaded: LoadedRuns) -> str:
    where = ", ".join(map(str, paths))
    if not loaded.problems:
        return f"there is no run in {where}: no folder has config.yaml, eval.csv or summary.json."
    reasons = "; ".join(f"{problem.folder}: {problem.reason}" for problem in loaded.problems)
    return f"there is nothing to report in {where}. {reasons}."


if __name__ == "__main__":
    raise SystemExit(main())
