"""A few rounds of the main benchmarks, one after the other, in a few minutes.

    python benchmarks/quick.py
    python benchmarks/quick.py --json > results.jsonl

Each runs in a process of its own. With few rounds the ratios are rough; on a machine that is busy
with other things, `--cpu` makes them steadier.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import make_parser

FOLDER = Path(__file__).resolve().parent
RUNS = {  # arguments by script, and rounds relative to those asked for
    "mpo_update.py": (["--config", "r10"], 3),
    "vmpo_update.py": (["--config", "cheetah", "--no-compile"], 1),  # compiling takes its time
    "ppo_iteration.py": (["--config", "small", "--no-compile"], 1),
    "collection.py": ([], 1),
    "replay.py": ([], 1),
    "sb3.py": (["--updates", "eager"], 1),
}


def command(script: str, *, rounds: int, threads: int, flags: Iterable[str] = ()) -> list[str]:
    """How to run one of the benchmarks."""
    arguments, factor = RUNS[script]
    line = [sys.executable, str(FOLDER / script), *arguments]
    return [*line, "--rounds", str(rounds * factor), "--threads", str(threads), *flags]


def main() -> int:
    # One thread, like training runs: with more, whatever else the machine does shows in all times.
    args = make_parser(__doc__, rounds=3, threads=1).parse_args()
    begin, failed = time.perf_counter(), []
    flags = ["--json"] * args.json + ["--cpu"] * (args.clock is time.process_time)
    for script in RUNS:
        line = command(script, rounds=args.rounds, threads=args.threads, flags=flags)
        if subprocess.run(line, check=False).returncode:
            failed.append(script)
    if not args.json:
        print(f"\n{time.perf_counter() - begin:.0f} seconds in all")
    for script in failed:
        print(f"{script} failed", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
