"""Put the promises of docs/reliability.md to the test: ``python -m tests.campaign``.

Each case runs in a process of its own, forked from this one, with an empty folder and a time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import pkgutil
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

import tests.campaign
from tests.campaign.case import Case

TIME_LIMIT = 400.0  # seconds per case, on a machine that may be busy


@dataclass
class Running:
    """A case in its process."""

    group: str
    case: Case
    process: int
    result: int
    folder: Path
    end: float

    def __init__(self, group: str, case: Case) -> None:
        self.group, self.case = group, case
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        self.result, answer = os.pipe()
        self.end = time.monotonic() + TIME_LIMIT
        self.process = os.fork()
        if self.process == 0:
            _run_and_exit(case, self.folder, answer)
        os.close(answer)

    def finish(self) -> str | None:
        """What broke, if anything did."""
        chunks = []
        hangs = time.monotonic() > self.end
        while not hangs and (chunk := os.read(self.result, 65536)):
            chunks.append(chunk)
        os.close(self.result)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # what is left of it
        os.waitpid(self.process, 0)
        shutil.rmtree(self.folder, ignore_errors=True)
        answer = b"".join(chunks).decode()
        if hangs:
            return f"no end after {TIME_LIMIT:.0f} s"
        if not answer:
            return "its process died"
        return answer[1:] or None


def _run_and_exit(case: Case, folder: Path, answer: int) -> None:
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(folder)
    try:
        problem = case.run(folder) or ""
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
    data = f".{' '.join(problem.split())[:1000]}".encode()
    os.write(answer, data)
    os._exit(0)


def groups(names: list[str]) -> dict[str, ModuleType]:
    """The modules with cases, by the name of their group."""
    found = {}
    for module in pkgutil.iter_modules(tests.campaign.__path__):
        if not module.name.startswith("_"):
            imported = importlib.import_module(f"tests.campaign.{module.name}")
            if hasattr(imported, "GROUP") and (not names or module.name in names):
                found[imported.GROUP] = imported
    return found


def all_cases(modules: dict[str, ModuleType], seed: int, quick: bool) -> Iterator[tuple[str, Case]]:
    for group, module in modules.items():
        rng = random.Random(f"{seed} {group}")
        found = list(module.cases(rng, quick))
        rng.shuffle(found)
        for case in found:
            yield group, case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("groups", nargs="*", help="names of modules; all of them by default")
    parser.add_argument("--quick", action="store_true", help="fewer cases, at most five minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    modules = groups(args.groups)
    counts = {group: [0, 0] for group in modules}  # tried, broken
    waiting = all_cases(modules, args.seed, args.quick)
    running: list[Running] = []
    more = True
    while more or running:
        while more and len(running) < args.jobs:
            late = time.monotonic() - begin > 60 * args.minutes
            following = None if late else next(waiting, None)
            more = following is not None
            if following is not None:
                running.append(Running(*following))
        if not running:
            continue
        timeout = max(0.0, min(one.end for one in running) - time.monotonic())
        ready, _, _ = select.select([one.result for one in running], [], [], timeout)
        for one in list(running):
            if one.result in ready or time.monotonic() > one.end:
                running.remove(one)
                problem = one.finish()
                counts[one.group][0] += 1
                if problem is not None:
                    counts[one.group][1] += 1
                    sys.stdout.write(f"BROKEN  {one.group}: {one.case.name}: {problem}\n")
                    sys.stdout.flush()
    sys.stdout.write(f"\n{'group':<28}{'tried':>7}{'held':>7}{'broken':>8}\n")
    for group, (tried, broken) in counts.items():
        sys.stdout.write(f"{group:<28}{tried:>7}{tried - broken:>7}{broken:>8}\n")
    minutes = (time.monotonic() - begin) / 60
    left = sum(1 for _ in waiting)
    sys.stdout.write(f"seed {args.seed}, {minutes:.1f} minutes\n")
    if left:
        sys.stdout.write(f"{left} cases were not tried, because the time was up\n")
    return int(any(broken for _, broken in counts.values()) or left > 0)


if __name__ == "__main__":
    raise SystemExit(main())
