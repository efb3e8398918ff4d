"""Time what it takes to compile the updates of a run: with empty caches, and from them.

    python benchmarks/compiling.py
    python benchmarks/compiling.py --algos ppo --json

Each time is that of a process of its own, from the first line about compiling to the last one. The
processor time includes that of the C++ compiler, which has a process for each core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from end_to_end import OurLoop

from minerva_torchrl.runs import parse_config
from minerva_torchrl.runs.assemble import assemble

ALGOS = ("mpo", "vmpo", "ppo")
STATES = ("cold", "from cache")
SETTINGS: dict[str, dict[str, Any]] = {
    "mpo": {"replay_buffer": {"warmup_frames": 200}},
    "vmpo": {},
    "ppo": {},
}


class Stopwatch:
    """Adds up the times between the announcements of compilations."""

    def __init__(self) -> None:
        self.seconds = self.processor = 0.0
        self.graphs = 0
        self._begin: tuple[float, float] | None = None

    def __call__(self, line: str) -> None:
        now = time.perf_counter(), sum(os.times()[:4])
        if self._begin is not None:
            self.seconds += now[0] - self._begin[0]
            self.processor += now[1] - self._begin[1]
            self.graphs += 1
        self._begin = now if self._begin is None else None


def compile_run(algo: str, **changes: Any) -> dict[str, float]:
    """Compile the updates of a run in this process, and say what it took."""
    settings = {"env": {"name": "gym:HalfCheetah-v5"}, "compile": {"enabled": True}}
    loop = OurLoop(assemble(parse_config(algo, {**settings, **SETTINGS[algo], **changes})))
    watch = loop.trainer.optimization_stepper.compiled.announce = Stopwatch()
    while not watch.graphs:
        loop.step()
    loop.assembly.collector.shutdown()
    return {"seconds": watch.seconds, "processor": watch.processor, "graphs": watch.graphs}


def in_process(algo: str, cache: str) -> dict[str, float]:
    """The same in a process of its own, with a folder for the compiler's caches."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(Path(__file__).resolve()), "--child", algo]
    done = subprocess.run(line, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algos", nargs="+", choices=ALGOS, default=list(ALGOS))
    parser.add_argument("--json", action="store_true", help="one JSON line per case, no table")
    parser.add_argument("--child", choices=ALGOS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        torch.set_num_threads(1)
        print(json.dumps(compile_run(args.child)))
        return
    if not args.json:
        print(f"{'':20}{'seconds':>10}{'processor':>12}{'graphs':>8}")
    for algo in args.algos:
        with tempfile.TemporaryDirectory() as cache:
            for state in STATES:
                result = in_process(algo, cache)
                if args.json:
                    print(json.dumps({"name": f"{algo}, {state}", **result}), flush=True)
                else:
                    times = f"{result['seconds']:10.1f}{result['processor']:12.1f}"
                    print(f"{algo + ', ' + state:20}{times}{result['graphs']:8.0f}", flush=True)


if __name__ == "__main__":
    main()
