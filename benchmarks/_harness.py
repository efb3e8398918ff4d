"""Interleaved timing: A, B, C, A, B, C, ..., medians, and ratios within each round."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minerva_torchrl.trainers.compiled import why_not


@dataclass
class Result:
    """Times of one case, in milliseconds, by round."""

    name: str
    times: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def ratio_to(self, other: Result) -> float:
        """Median over rounds of this case's time relative to another's."""
        return statistics.median(a / b for a, b in zip(self.times, other.times, strict=True))


def make_parser(description: str, *, rounds: int, threads: int = 2) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--threads", type=int, default=threads, help=f"threads of torch ({threads})"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds ({rounds})")
    parser.add_argument("--json", action="store_true", help="one JSON line per case, no table")
    parser.add_argument(
        "--cpu",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="processor time instead of the clock's: for one thread on a busy machine",
    )
    return parser


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the option for compiled updates, which are timed where there is a compiler."""
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=why_not("cpu") is None,
        help="ours compiled, too; without a cache that takes up to a minute for each graph",
    )


def start(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> Any:
    """Read the command line and prepare torch: threads, seed, and no notes between the results."""
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return args


def measure(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    repeats: Mapping[str, int] | None = None,
    per: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Result]:
    """Time the cases in turn; a time is the mean over a case's repeats within a round.

    Args:
        cases: what to call, by name.
        rounds: number of times that all of them are timed.
        warmup: calls of each before the first round.
        repeats: calls per round, by name; one where nothing is said.
        per: units of work in a call. Times are those of one unit.
        clock: gives the time in seconds.
    """
    repeats = repeats or {}
    for case in cases.values():
        for _ in range(warmup):
            case()
    results = {name: Result(name, []) for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            count = repeats.get(name, 1)
            begin = clock()
            for _ in range(count):
                case()
            results[name].times.append((clock() - begin) * 1e3 / (count * per))
    return results


def report(
    results: Mapping[str, Result],
    *,
    config: str,
    as_json: bool,
    floors: Mapping[str, str],
    frames: int | None = None,
) -> None:
    """Print the results.

    Args:
        results: by name.
        config: what was measured.
        as_json: one JSON line per case instead of a table.
        floors: for each case the name of the floor that does the same mathematics.
        frames: frames that a time stands for, to show frames per second as well.
    """
    if not as_json:
        print(f"\n{config}, {_threads()}, medians of interleaved rounds")
        print(
            f"{'':36}{'ms':>10}{'of floor':>12}" + ("" if frames is None else f"{'frames/s':>12}")
        )
    for name, result in results.items():
        floor = floors.get(name)
        ratio = None if floor is None else result.ratio_to(results[floor])
        rate = None if frames is None else frames * 1e3 / result.median
        if as_json:
            extra = {} if rate is None else {"frames_per_second": round(rate, 1)}
            print_json(name, config, median_ms=result.median, ratio=ratio, **extra)
        else:
            shown = "" if ratio is None else f"{ratio:.3f}"
            rated = "" if rate is None else f"{rate:12.0f}"
            print(f"{name:36}{_milliseconds(result.median):>10}{shown:>12}{rated}", flush=True)


def print_json(
    name: str, config: str, *, median_ms: float | None, ratio: float | None, **extra: Any
) -> None:
    """One line with the fields that every case has, and any others."""
    line = {
        "name": name,
        "config": config,
        "threads": torch.get_num_threads(),
        "median_ms": None if median_ms is None else round(median_ms, 4),
        "ratio_to_floor": None if ratio is None else round(ratio, 4),
    }
    print(json.dumps(line | extra), flush=True)


def check_same_parameters(
    ours: Mapping[str, Tensor], floor: Mapping[str, Tensor], *, lr: float
) -> None:
    """Raise an AssertionError unless two sets of parameters are equal but for rounding.

    Args:
        ours: parameters after some steps, by name.
        floor: those that they should be equal to.
        lr: learning rate, as a measure of what is small. Adam's first steps have its size whatever
            the gradient is, so that rounding shows where the gradient is next to nothing: it is the
            mean that counts.
    """
    assert ours.keys() == floor.keys(), f"{sorted(ours)} are not {sorted(floor)}"
    for name, parameter in ours.items():
        error = (parameter - floor[name]).abs().mean().item()
        assert error < 2e-3 * lr, f"{name} differs from the floor's by {error} on average"


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'' if count == 1 else 's'}"


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"
