"""Train each algorithm for a few minutes and see whether it still learns.

    python benchmarks/learning.py
    python benchmarks/learning.py --only ppo --seed 3 --out runs/smoke

Each run is an example with its default settings and a short budget; what is judged is its last
evaluation. The exit code is 1 if one falls short. Thresholds are well below what these runs reach,
and well above what they begin with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Case:
    algo: str
    env: str
    frames: int
    at_least: float
    """The least return of the last evaluation."""

    @property
    def name(self) -> str:
        return f"{self.algo} {self.env}"

    def arguments(self, seed: int, run_dir: Path) -> list[str]:
        settings = {
            "env.name": self.env,
            "total_frames": self.frames,
            "eval.interval": self.frames // 4,
            "seed": seed,
            "run_dir": run_dir,
        }
        return [f"{name}={value}" for name, value in settings.items()]


CASES = (
    Case("mpo", "cartpole-swingup", 20_000, at_least=250),
    Case("vmpo", "gym:HalfCheetah-v5", 120_000, at_least=1_000),
    Case("ppo", "cartpole-balance", 100_000, at_least=800),
)


def train(case: Case, seed: int, run_dir: Path) -> float:
    """The return of a run's last evaluation."""
    command = [sys.executable, str(EXAMPLES / f"{case.algo}_dmc.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = run_dir.parent / f"{run_dir.name}.log"
    with log.open("w") as file:
        code = subprocess.run(
            [*command, *case.arguments(seed, run_dir)], stdout=file, stderr=file, env=environment
        ).returncode
    if code:
        raise RuntimeError(f"{case.name} failed:\n{log.read_text()}")
    return float(json.loads((run_dir / "summary.json").read_text())["final_return"])


def judge(case: Case, final_return: float) -> str:
    """A line about a run."""
    verdict = "pass" if final_return >= case.at_least else "FALLS SHORT"
    return (
        f"{case.name:<26}{case.frames:>9,} frames   final evaluation {final_return:>7.1f}   "
        f"at least {case.at_least:>6.1f}   {verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted({case.algo for case in CASES}), help="one of them")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs (0)")
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in (None, case.algo)]
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        folders = [out.resolve() / f"{case.algo}-{args.seed}" for case in cases]
        taken = [str(folder) for folder in folders if folder.exists()]
        if taken:
            parser.error(f"argument --out: it has runs already: {', '.join(taken)}")
        sys.stdout.write(f"training {', '.join(case.name for case in cases)} ...\n")
        with ThreadPoolExecutor(args.jobs) as pool:
            returns = pool.map(train, cases, [args.seed] * len(cases), folders)
            short = 0
            for case, final_return in zip(cases, returns, strict=True):
                sys.stdout.write(judge(case, final_return) + "\n")
                sys.stdout.flush()
                short += not final_return >= case.at_least
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
